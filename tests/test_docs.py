"""The documents against the repository: what they must name, what must resolve, and what no file may hold."""

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
from configs.reference import HEADINGS
from deployments.manager.calls import Status
from deployments.manager.manager import SessionManager

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LONGEST_README = 160
LOGS = "docs/benchmarks/log-"
"""Diaries name files as they were on their day."""


def page(name: str) -> str:
    return (DOCS / name).read_text()


def site_pages() -> list[Path]:
    return [path for path in sorted(DOCS.rglob("*.md")) if DOCS / "assets" not in path.parents]


def pages() -> list[Path]:
    """Every document that a reader may open."""
    return [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *site_pages()]


each_page = pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))

each_section = pytest.mark.parametrize("section", HEADINGS, ids=lambda section: section.__name__)

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|opt|srv)/[\w.-]+")
REGISTRY = re.compile(
    r"py[p]i\.org|pythonh[o]sted\.org|download\.py[t]orch\.org|file:/{2}|https?://[^\s/]+/(?:[\w.-]+/)*simple\b"
)


def table(name: str, heading: str) -> dict[str, str]:
    """The table under a heading of a page: first column without backticks -> second column."""
    found = re.split(rf"\n#+ {re.escape(heading)}\n", page(name))
    assert len(found) == 2, heading
    text = re.split(r"\n#+ ", found[1])[0]
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


@each_section
def test_every_configuration_key_is_in_its_table(section: type[schema.Section]) -> None:
    assert list(table("reference/configuration.md", HEADINGS[section])) == list(section.model_fields)


@each_section
def test_the_defaults_are_the_schemas(section: type[schema.Section]) -> None:
    written = table("reference/configuration.md", HEADINGS[section])
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
    text = page("getting-started.md")
    assert [target for target in targets if not re.search(rf"`make {target}(?![\w-])", text)] == []


def test_every_variable_of_make_has_its_row() -> None:
    variables = re.findall(r"^([A-Z_]+)\s*\?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(variables) > 5
    assert set(table("getting-started.md", "Variables of `make serve`")) == set(variables)


def test_every_configuration_file_has_its_row() -> None:
    files = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert set(table("guides/configure.md", "Files to start from")) == files


def test_every_folder_is_in_the_picture_of_the_rooms() -> None:
    rooms = page("contributing/architecture.md").split("\n## Rooms\n")[1].split("```")[1]
    folders = {path.parent for room in ("app", "deployments", "transfer") for path in (ROOT / room).rglob("*.py")}
    assert [folder.name for folder in folders if f"{folder.name}/" not in rooms] == []
    others = {"configs", "deploy", "load_tests", "tests", "docs"}
    pictured = set(re.findall(r"^ *([\w-]+)/ ", rooms, re.MULTILINE)) - others
    assert sorted(pictured - {folder.name for folder in folders}) == []


@each_page
def test_every_file_that_is_named_exists(path: Path) -> None:
    if str(path.relative_to(ROOT)).startswith(LOGS):
        pytest.skip("a diary")
    named = set(
        re.findall(
            r"(?:app|configs|deployments|docs|load_tests|tests|transfer)/[\w/.-]+\.(?:py|yaml)", path.read_text()
        )
    )
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


@each_page
def test_every_folder_that_is_named_exists(path: Path) -> None:
    if str(path.relative_to(ROOT)).startswith(LOGS):
        pytest.skip("a diary")
    named = set(re.findall(r"`((?:app|deployments|load_tests|tests|transfer)(?:/\w+)+)/?`", path.read_text()))
    assert sorted(name for name in named if not (ROOT / name).is_dir()) == []


def test_files_are_named_where_they_should_be() -> None:
    private = re.findall(r"(?:app|deployments|load_tests|transfer)/[\w/]+\.py", page("contributing/upgrading-vllm.md"))
    assert len(set(private)) > 15


def test_every_file_that_imports_vllm_is_in_the_table_of_private_things() -> None:
    text = page("contributing/upgrading-vllm.md")
    product = [path for room in ("app", "deployments", "transfer") for path in (ROOT / room).rglob("*.py")]
    importers = [path for path in product if re.search(r"^\s*(?:from|import) vllm\b", path.read_text(), re.MULTILINE)]
    assert len(importers) > 5
    assert [name for path in importers if f"`{(name := str(path.relative_to(ROOT)))}`" not in text] == []


def test_every_split_rule_is_in_the_table() -> None:
    source = (ROOT / "deployments/policy/placement/split.py").read_text()
    rules = set(re.findall(r', "(\w+)"\)', source)) | {"one_token"}
    assert len(rules) == 4
    assert set(table("reference/http-api.md", "Which requests are split")) == rules


def test_every_error_code_is_in_the_table() -> None:
    from app.errors import TABLE

    errors = page("reference/http-api.md").split("\n## Errors\n")[1]
    assert sorted(row.code for row in TABLE.values() if f"`{row.code}`" not in errors) == []
    assert sorted(row.status for row in TABLE.values() if not re.search(rf"^\|.*\b{row.status}\b", errors, re.M)) == []


def test_every_reason_to_refuse_is_in_the_table() -> None:
    errors = page("reference/http-api.md").split("\n## Errors\n")[1]
    sources = [path.read_text() for path in (ROOT / "deployments/policy").rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r'code="(\w+)"', source)}
    assert codes
    assert sorted(code for code in codes if f"`{code}`" not in errors) == []


def test_every_counter_of_a_replica_is_in_the_table() -> None:
    from transfer.channel.outbox import COUNTERS

    engine = "".join(path.read_text() for path in sorted((ROOT / "deployments/engine/vllm").glob("*.py")))
    names = re.findall(r'"(\w+)"', re.split(r"^COUNTERS[^=\n]*= \(", engine, flags=re.MULTILINE)[1].split(")")[0])
    assert len(names) > 3
    counters = page("reference/metrics.md").split("\n## Counters of a replica")[1].split("\n## ")[0]
    assert [name for name in [*COUNTERS, *names] if f"`{name}`" not in counters] == []


async def test_every_field_of_the_status_is_in_the_table() -> None:
    args = yaml.safe_load((ROOT / "configs/mock.yaml").read_text())["applications"][0]["args"]
    status = await SessionManager(schema.BatonConfig.model_validate(args)).ask(Status())
    fields = set(table("reference/metrics.md", "`GET /baton/status`"))
    written = {re.split(r"[.`]", field)[0] for field in fields}
    assert {"pools", "promises"} <= status.keys()
    assert sorted(status.keys() - written) == []


def test_the_glossary_has_every_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", page("reference/glossary.md"), re.MULTILINE)
    words = [word.strip("` ") for row in rows for word in row.split(",") if row not in ("word", "---")]
    assert len(words) > 50
    assert sorted({word for word in words if words.count(word) > 1}) == []


@each_page
def test_programs_are_not_persons(path: Path) -> None:
    if str(path.relative_to(ROOT)).startswith(LOGS):
        pytest.skip("a diary")
    assert re.findall(r"\b(?:whoever|nobody|somebody|everybody)\b", path.read_text(), re.IGNORECASE) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@each_page
def test_every_link_resolves(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    broken = []
    for link in links:
        if urlsplit(link).scheme:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_readme_leads_to_every_kind_of_page() -> None:
    linked = set(re.findall(r"\]\(docs/([^)\s#]+)", (ROOT / "README.md").read_text()))
    expected = {str(path.relative_to(DOCS)) for path in site_pages() if path.parent.name != "benchmarks"}
    assert sorted(expected - linked - {"index.md"}) == []


class _Loader(yaml.SafeLoader):
    """MkDocs names a Python function in its file."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def site() -> dict[str, Any]:
    settings: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    return settings


def leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [name for each in (entry.values() if isinstance(entry, dict) else entry) for name in leaves(each)]


def test_the_navigation_has_every_page_once() -> None:
    assert sorted(leaves(site()["nav"])) == sorted(str(path.relative_to(DOCS)) for path in site_pages())


def test_the_site_brings_what_material_would_load_from_a_network() -> None:
    settings = site()
    assert settings["theme"]["font"] is False
    assert "repo_url" not in settings  # Material asks the repository's host for its stars
    scripts = settings["extra_javascript"]
    assert any("mermaid" in script for script in scripts)
    assert [script for script in scripts if not (DOCS / script).is_file()] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert built.returncode == 0, built.stderr
    loaded = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//"
    )
    html = list((tmp_path / "site").rglob("*.html"))
    assert len(html) > 20
    assert [file.name for file in html if loaded.search(file.read_text())] == []


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
