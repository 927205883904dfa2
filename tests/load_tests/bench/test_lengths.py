"""The report on predicted lengths: better than a constant where prompts tell something, and calibrated in any case."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from load_tests.bench import lengths

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, telling: bool) -> None:
    """A trace whose long prompts have long answers, or whose answers are of any length."""
    rng = random.Random(2)
    lines = [HEAD]
    for number in range(4096):
        is_long = rng.random() < 0.5
        answer = max(1, round(rng.gauss(700 if (is_long if telling else rng.random() < 0.5) else 60, 10)))
        lines.append(f"2023-11-16 18:{number // 60 % 60:02}:{number % 60:02}.0,{3000 if is_long else 100},{answer}")
    (folder / "made.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("telling", [True, False])
def test_a_prompt_may_tell_how_long_its_answer_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], telling: bool
) -> None:
    write(tmp_path, telling)
    monkeypatch.setenv("TRACES", str(tmp_path))
    lengths.main(["--traces", "made"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["traces"]["made"]
    assert found["requests"] == 4096 - 1024
    accuracy = found["bucket_accuracy"]
    if telling:
        assert accuracy["p50"] > 1.2 * accuracy["constant"]
        assert found["sum_error"]["predicted"] < found["sum_error"]["constant"]
    assert found["sum_error"]["predicted"] < 0.1
    assert found["future"].keys() == {f"{way}_{written}" for way in ("chance", "end") for written in (0, 64, 256)}
    # Behind 64 tokens, only long answers are left, and these are told exactly.
    late = found["future"]["chance_256"]
    assert late["ratio"]["128"] == pytest.approx(1.0, abs=0.05)
    assert late["error"] < 0.15
