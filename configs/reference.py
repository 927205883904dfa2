"""Prints the reference of the configuration, from `configs/schema.py`: `python -m configs.reference`.

`python -m configs.reference --write` writes it to `docs/reference/configuration.md`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs import schema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "configuration.md"

HEADINGS: dict[type[schema.Section], str] = {
    schema.BatonConfig: "top level",
    schema.ModelConfig: "`model`",
    schema.PoolConfig: "`prefill` and each entry of `decode`",
    schema.ResourcesConfig: "`resources`",
    schema.VllmEngineConfig: "`engine` of kind `vllm`",
    schema.DiskKVConfig: "`engine.disk_kv`",
    schema.MockEngineConfig: "`engine` of kind `mock`",
    schema.ChannelConfig: "`channel`",
    schema.PacingConfig: "`channel.pacing`",
    schema.PlacementConfig: "`placement`",
    schema.WeightsConfig: "`placement.weights`",
    schema.PinsConfig: "`placement.pins`",
    schema.ClassConfig: "each entry of `placement.classes`",
    schema.IngressConfig: "`ingress`",
    schema.KeyConfig: "each entry of `keys` in the file of `ingress.keys_file`",
    schema.StoredResponsesConfig: "`ingress.stored_responses`",
    schema.BatchesConfig: "`ingress.batches`",
    schema.LoraConfig: "`lora`",
    schema.AdapterConfig: "each entry of `lora.adapters`",
    schema.ScalingConfig: "`scaling`",
    schema.TraceConfig: "`trace`",
    schema.TracingConfig: "`tracing`",
}
"""Every section of the schema, in the order of the page, with its heading."""

UNITS = {
    "_tokens_per_s": "tokens/s",
    "bytes_per_s": "bytes/s",
    "_s": "s",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_percent": "%",
    "_len": "tokens",
    "_seqs": "sessions",
    "_blocks": "blocks",
    "_layers": "layers",
    "_descriptors": "descriptors",
    "_requests": "requests",
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "_queued": "requests",
    "_attempts": "placements",
    "_intervals": "plans",
    "_cpus": "CPUs",
    "_gpus": "GPUs",
    "_threads": "threads",
    "_utilization": "share",
    "_share": "share",
    "headroom": "share",
    "block_size": "tokens",
    "parallel_size": "workers",
    "pipeline_parallel_size": "stages",
    "replicas": "replicas",
    "overcommit": "multiple",
    "admission_slack": "multiple",
}
"""The unit of a number, by the end of its field's name. The longest end that fits decides."""

HEAD = """<!-- Printed by `python -m configs.reference --write` from configs/schema.py: change the text there. -->

# Configuration

The `args` of a Serve YAML file are validated by `configs/schema.py` before anything starts. A wrong key or value fails
`make serve` and `serve run` with a message that names it. Three mappings are free-form: Serve checks `autoscaling`,
vLLM checks `engine_args` when a replica starts, and the ingress checks `server_args`.

Rules between fields are in `configs/checks.py`. `channel.kind: vllm` is described under
[The handoff](../concepts/handoff.md#channelkind-vllm).
"""


def unit(name: str) -> str:
    """The unit of the field, "" for one without."""
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else ""


def page() -> str:
    """The whole page, in Markdown."""
    return HEAD + "".join(_section(section, heading) for section, heading in HEADINGS.items())


def _section(section: type[schema.Section], heading: str) -> str:
    about = " ".join((section.__doc__ or "").split())
    rows = "".join(_row(name, field) for name, field in section.model_fields.items())
    return f"\n### {heading}\n\n{about}\n\n| key | default | unit | meaning |\n| --- | --- | --- | --- |\n{rows}"


def _row(name: str, field: FieldInfo) -> str:
    about = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {_default(field)} | {unit(name)} | {about} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default: Any = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "see below"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


def main() -> None:
    """Print the page, or write it."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
