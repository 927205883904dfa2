"""deployments.checkpoint.prepare: sources, the manifest, broken checkpoints, one conversion among processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from deployments.checkpoint import prepare as model
from deployments.checkpoint.errors import CheckpointError, ModelError
from deployments.checkpoint.prepare import Bundle, check, resolve

SOURCE = "bundled:smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the file inside the package."""
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(Bundle, "gguf", lambda self: path)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Converter:
    """Writes two small files and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, directory: Path) -> None:
        self.calls += 1
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(gguf.read_bytes() * 100)


def test_converts_once_and_leaves_only_the_checkpoint(cache: Path) -> None:
    convert = Converter()
    first = resolve(SOURCE, cache, convert=convert)
    assert resolve(SOURCE, cache, convert=convert) == first == cache / "smollm2-135m-instruct"
    assert convert.calls == 1
    assert {path.name for path in cache.iterdir()} == {
        "smollm2-135m-instruct",
        ".smollm2-135m-instruct.lock",
    }
    check(cache / "smollm2-135m-instruct", full=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "manifest.json").unlink(),
        lambda directory: (directory / "manifest.json").write_text("{"),
        lambda directory: (directory / "manifest.json").write_text("[]"),
        lambda directory: (directory / "manifest.json").write_text('{"conversion": 0}'),
        lambda directory: (directory / "model.safetensors").write_bytes(b"short"),
        lambda directory: (directory / "config.json").write_text("[]"),
        lambda directory: (directory / "config.json").unlink(),
    ],
    ids=["no manifest", "half a manifest", "odd manifest", "old version", "truncated", "changed", "missing"],
)
def test_a_broken_checkpoint_is_replaced(cache: Path, damage: object) -> None:
    convert = Converter()
    directory = resolve(SOURCE, cache, convert=convert)
    assert isinstance(directory, Path)
    assert callable(damage)
    damage(directory)
    with pytest.raises(CheckpointError):
        check(directory)
    assert resolve(SOURCE, cache, convert=convert) == directory
    assert convert.calls == 2
    check(directory, full=True)


def test_large_files_are_compared_by_size_unless_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_CHEAP_HASH_BYTES", 10)
    directory = Path(resolve(SOURCE, cache, convert=Converter()))
    weights = directory / "model.safetensors"
    weights.write_bytes(b"x" * weights.stat().st_size)
    check(directory)
    with pytest.raises(CheckpointError, match="hash differs"):
        check(directory, full=True)


def test_a_failed_conversion_leaves_nothing_and_the_next_one_works(cache: Path) -> None:
    def fail(gguf: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise CheckpointError("not whole")

    with pytest.raises(CheckpointError, match="not whole"):
        resolve(SOURCE, cache, convert=fail)
    assert [path.name for path in cache.iterdir()] == [".smollm2-135m-instruct.lock"]
    (cache / ".smollm2-135m-instruct.tmp-1").mkdir()  # what a killed conversion leaves
    resolve(SOURCE, cache, convert=Converter())
    assert not list(cache.glob("*tmp*"))


def _slow_resolve(cache: Path, log: Path) -> None:
    def convert(gguf: Path, directory: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        Converter()(gguf, directory)

    resolve(SOURCE, cache, convert=convert)


def test_concurrent_processes_convert_once(cache: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # the fixture's stand-in must be there too
    log = tmp_path / "conversions"
    processes = [fork.Process(target=_slow_resolve, args=(cache, log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(log.read_text().split()) == 1


def test_waiting_for_the_lock_has_an_end(cache: Path) -> None:
    cache.mkdir()
    lock = cache / "lock"
    with (
        model._locked(lock, 1.0),
        pytest.raises(ModelError, match="another process"),
        model._locked(lock, 0.1),
    ):
        pass


def test_other_sources_pass_through(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path.resolve()
    assert resolve("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert resolve("gpt2") == "gpt2"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/no/such/place", "looks like a path"),
        ("./here", "looks like a path"),
        ("~/models/x", "looks like a path"),
        ("a/b/c", "looks like a path"),
        ("", "looks like a path"),
        ("bundled:other", "there is: smollm2-135m-instruct"),
    ],
)
def test_wrong_sources_say_why(source: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        resolve(source)


def test_a_directory_without_a_configuration_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_missing_package_is_named() -> None:
    bundle = Bundle(name="x", package="no_such_package", distribution="no-such-package", file="x.gguf")
    with pytest.raises(ModelError, match="no-such-package"):
        _real_gguf(bundle)


_real_gguf = Bundle.gguf


def test_the_command_prints_the_path_alone(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = resolve(SOURCE, cache, convert=Converter())
    assert model.main(["--cache-dir", str(cache)]) == 0
    assert capsys.readouterr().out == f"{prepared}\n"
    assert model.main(["--source", "/nowhere"]) == 1
    assert "looks like a path" in capsys.readouterr().err


def test_the_real_conversion_holds_what_a_chat_needs(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Uses, or makes, the repository's own cached checkpoint."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(Bundle, "gguf", _real_gguf)
    directory = Path(resolve(SOURCE))
    check(directory, full=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("hello")["input_ids"] == tokenizer("hello", add_special_tokens=False)["input_ids"]
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
