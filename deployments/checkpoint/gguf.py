"""Converts GGUF to a Hugging Face checkpoint, and verifies that the result is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.checkpoint.errors import CheckpointError

_REQUIRED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_SAMPLE = "In 1984 there were 12,345 cats.\n\n  x = café"


def convert(gguf: Path, directory: Path, say: Callable[[str], None]) -> None:
    """Dequantise `gguf` to bfloat16 and save weights, configuration, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    say("weights are dequantised; saving")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # The file's end of text is the chat's end of turn. Without it here, a served chat would never stop.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def verify(directory: Path) -> None:
    """Check files, weights against the configuration, and the tokenizer.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    _verify_files(directory)
    _verify_weights(directory)
    _verify_tokenizer(directory)


def _verify_files(directory: Path) -> None:
    missing = [name for name in _REQUIRED if not (directory / name).is_file()]
    _require(not missing, f"the conversion left out {', '.join(missing)}")


def _verify_weights(directory: Path) -> None:
    """The safetensors header must name exactly the tensors that the configuration implies, in the same shapes."""
    from safetensors import SafetensorError, safe_open

    expected = _expected_shapes(directory)
    try:
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            found = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {part.get_dtype() for part in slices.values()}
    except SafetensorError as error:
        raise CheckpointError(f"model.safetensors does not open: {error}") from None
    _require(
        found == expected,
        f"tensors differ from the configuration: {sorted(found.items() ^ expected.items())[:4]}",
    )
    _require(dtypes == {"BF16"}, f"weights are {sorted(dtypes)}, not BF16")


def _expected_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):  # shapes only: no memory, no initialisation
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def _verify_tokenizer(directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(_SAMPLE)["input_ids"]
    _require(tokenizer.decode(ids) == _SAMPLE, "the tokenizer does not give text back unchanged")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    _require("hello" in prompt and tokenizer.eos_token in prompt, f"the chat template is not one: {prompt!r}")
    generation = json.loads((directory / "generation_config.json").read_text())
    _require(
        generation.get("eos_token_id") == tokenizer.eos_token_id,
        "generation does not stop at the end of turn",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckpointError(otherwise)
