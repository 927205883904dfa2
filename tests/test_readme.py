"""The README against the repository: what it must name, and what no file may hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import BaseModel

from configs import schema

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()

# The heading under which a section's keys are, for every section of the schema.
HEADINGS: dict[type[schema.Section], str] = {
    schema.BatonConfig: "top level",
    schema.ModelConfig: "`model`",
    schema.PoolConfig: "`prefill` and each entry of `decode`",
    schema.ResourcesConfig: "`resources`",
    schema.VllmEngineConfig: "`engine` of kind `vllm`",
    schema.MockEngineConfig: "`engine` of kind `mock`",
    schema.ChannelConfig: "`channel`",
    schema.PacingConfig: "`channel.pacing`",
    schema.ClassConfig: "each entry of `placement.classes`",
    schema.WeightsConfig: "`placement.weights`",
    schema.PlacementConfig: "`placement`",
    schema.IngressConfig: "`ingress`",
}
each_section = pytest.mark.parametrize("section", HEADINGS, ids=lambda section: section.__name__)

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|opt|srv)/[\w.-]+")
REGISTRY = re.compile(
    r"py[p]i\.org|pythonh[o]sted\.org|download\.py[t]orch\.org|file:/{2}|https?://[^\s/]+/(?:[\w.-]+/)*simple\b"
)


def table(heading: str) -> dict[str, str]:
    """The table under a `###` heading: first column without backticks -> second column."""
    assert README.count(f"\n### {heading}\n") == 1, heading
    text = re.split(r"\n##", README.split(f"\n### {heading}\n")[1])[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    return {key.strip("`"): default for key, default, *_ in rows}


def shipped() -> list[Path]:
    """The files that are or would be committed."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("only a git checkout says which files are tracked")
    listing = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
    return [file for name in names.split("\0") if name and (file := ROOT / name).is_file()]


def text_of(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError:  # no text
        return ""


def test_every_section_of_the_schema_has_a_heading() -> None:
    assert set(HEADINGS) == set(schema.Section.__subclasses__())


@each_section
def test_every_configuration_key_is_in_its_table(section: type[schema.Section]) -> None:
    assert list(table(HEADINGS[section])) == list(section.model_fields)


@each_section
def test_the_defaults_are_the_schemas(section: type[schema.Section]) -> None:
    written = table(HEADINGS[section])
    for key, field in section.model_fields.items():
        default: Any = field.get_default(call_default_factory=True, validated_data={})
        if field.is_required():
            assert written[key] == "required"
        elif not isinstance(default, BaseModel):
            plain = list(default) if isinstance(default, tuple) else default
            assert yaml.safe_load(written[key].strip("`")) == plain, key


def test_every_make_target_is_mentioned() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) > 5
    assert [target for target in targets if not re.search(rf"make {target}(?![\w-])", README)] == []


def test_every_variable_of_make_is_mentioned() -> None:
    variables = re.findall(r"^([A-Z_]+)\s*\?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for name in variables if f"`{name}`" not in README] == []


def test_every_configuration_file_is_mentioned() -> None:
    files = [f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")]
    assert [name for name in files if name not in README] == []


def test_every_folder_is_in_the_picture_of_the_rooms() -> None:
    rooms = README.split("\n## Rooms\n")[1].split("```")[1]
    folders = {path.parent for room in ("app", "deployments", "transfer") for path in (ROOT / room).rglob("*.py")}
    assert [folder.name for folder in folders if f"{folder.name}/" not in rooms] == []


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:app|configs|deployments|load_tests|tests|transfer)/[\w/.-]+\.(?:py|yaml)", README))
    assert len(named) > 20
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_split_rule_is_in_the_table() -> None:
    source = (ROOT / "deployments/policy/placement/split.py").read_text()
    rules = set(re.findall(r', "(\w+)"\)', source)) | {"one_token"}
    assert len(rules) == 5
    assert set(table("Which requests are split")) == rules


def test_every_error_code_is_in_the_readme() -> None:
    from app.errors import TABLE

    assert sorted(row.code for row in TABLE.values() if f"`{row.code}`" not in README) == []
    assert sorted(row.status for row in TABLE.values() if not re.search(rf"^\|.*\b{row.status}\b", README, re.M)) == []


def test_no_file_holds_a_machine_path_or_a_registry() -> None:
    patterns = [MACHINE_PATH, REGISTRY]
    if len(ROOT.parts) > 2:
        patterns.append(re.compile(re.escape(str(ROOT)) + r"(?![\w-])"))
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in shipped()
        for pattern in patterns
        for match in pattern.finditer(text_of(file))
    ]
    assert found == []


def test_no_file_holds_what_this_machine_installs_from() -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    lines = [line for line in settings.splitlines() if re.search(r"(index-url|find-links)=", line)]
    places = {place for line in lines for place in re.findall(r"[^\s'\"=]*/[^\s'\"]*", line.partition("=")[2])}
    parts = {urlsplit(place).hostname or urlsplit(place).path for place in places}
    secret = {part for part in parts if len(part) > 4 and part != "localhost"}
    found = [f"{file.relative_to(ROOT)}: {part}" for file in shipped() for part in secret if part in text_of(file)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "/" + "home/ann/x",
        "see /" + "work/main",
        "file:/" + "//wheels",
        "https://pypi" + ".org",
        "http:/" + "/a.b/c/simple/",
    ],
)
def test_the_patterns_see_what_they_should(text: str) -> None:
    assert MACHINE_PATH.search(text) or REGISTRY.search(text)


def test_the_patterns_let_ordinary_text_pass() -> None:
    for text in ("tests/work/x.py", ".cache/models", "http://127.0.0.1:8000/v1", "a simple/plain thing", "/tmp/ray"):
        assert not MACHINE_PATH.search(text)
        assert not REGISTRY.search(text)
