"""What `baton explain` asks for, and what it prints for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.cli.client import CliError
from app.cli.tables import aligned


def body_of(what: str, model: str | None, max_tokens: int | None, completion: bool) -> dict[str, Any]:
    """The body of a request: a file of JSON, `-` for standard input, or a prompt's text.

    `completion`: the text is the prompt of a completion, and not a user's message. Raises CliError.
    """
    text = sys.stdin.read() if what == "-" else _content(what)
    if text is None:
        body: dict[str, Any] = {"prompt": what} if completion else {"messages": [{"role": "user", "content": what}]}
    else:
        try:
            body = json.loads(text)
        except ValueError as error:
            raise CliError(f"{what} holds no JSON: {error}") from error
        if not isinstance(body, dict):
            raise CliError(f"{what} holds no JSON object")
    given = {"model": model, "max_tokens": max_tokens}
    return body | {name: value for name, value in given.items() if value is not None}


def _content(what: str) -> str | None:
    """The text of the file of that name; None where there is none."""
    path = Path(what)
    try:
        return path.read_text() if path.is_file() else None
    except (OSError, ValueError):  # a prompt that can be no file's name, or a file that is no text
        return None


def explained_text(found: Mapping[str, Any]) -> str:
    """The decision, what it was made from, and each way with the parts of its cost, from `/baton/explain`."""
    lines = [_outcome(found["decision"])]
    if "request" in found:
        lines.append(_request(found["request"], found["decision"]))
    if found["decision"]["outcome"] == "placed":
        lines.append(_forecast(found["decision"]["forecast"]))
    if candidates := found.get("candidates"):
        lines += ["", *_ways(found, candidates)]
    if passed_over := found.get("passed_over"):
        lines += ["", "not weighed:", *(f"  {each['replica']}: {each['why']}" for each in passed_over)]
    return "\n".join(lines)


def _outcome(decision: Mapping[str, Any]) -> str:
    if decision["outcome"] == "placed":
        prefill, decode = decision["prefill"], decision["decode"]
        if prefill and decode:
            where = f"{prefill} computes the prompt, {decode} writes the answer"
        else:
            where = f"{prefill or decode} does all"
        return f"placed, {decision['mode']}: {where} ({decision['reason']})"
    code = f" ({decision['code']})" if decision.get("code") else ""
    after = decision.get("retry_after_s")
    again = "" if after is None else f"; ask again in {after:.1f} s"
    return f"{decision['outcome']}{code}: {decision['reason']}{again}"


def _request(request: Mapping[str, Any], decision: Mapping[str, Any]) -> str:
    cached = f", {decision['cached_tokens']} of them cached" if "cached_tokens" in decision else ""
    objectives = [
        f"{name} {request[key]:g} s" for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")) if request[key]
    ]
    of_class = f"class {request['class']} ({', '.join(objectives) or 'no objectives'})"
    rule = f"; not split: {request['rule']}" if request["rule"] else ""
    return (
        f"prompt: {request['prompt_tokens']} tokens{cached}; answer: at most {request['max_tokens']}, "
        f"expected {request['expected_tokens']:g}; {of_class}{rule}"
    )


def _forecast(forecast: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {forecast[f'{name}_s']:.3f}" for name in ("queue", "prefill", "transfer"))
    first = f"first token after {forecast['ttft_s']:.3f} s ({parts})"
    trusted = "" if forecast["trusted"] else "; too few steps are known yet to refuse by it"
    return f"forecast: {first}, then one every {1000 * forecast['tpot_s']:.0f} ms{trusted}"


def _ways(found: Mapping[str, Any], candidates: list[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for each in candidates for name in each["parts"]}, key=lambda name: -_most(candidates, name))
    head = ("PREFILL", "DECODE", "COST", *(name.replace("_", " ").upper() for name in names))
    rows = [
        (
            each["prefill"] or "-",
            each["decode"] or "-",
            f"{each['cost_s']:.3f}",
            *(f"{each['parts'][name]:.3f}" if name in each["parts"] else "-" for name in names),
        )
        for each in candidates
    ]
    shown = f"{len(candidates)} of {found['ways']} ways" if len(candidates) < found["ways"] else "all ways"
    note = f"costs in seconds of all requests, {shown}; {found['near_s']:.3f} more than the least counts as equal:"
    return [note, *aligned([head, *rows])]


def _most(candidates: list[Mapping[str, Any]], name: str) -> float:
    return max(abs(float(each["parts"].get(name, 0.0))) for each in candidates)
