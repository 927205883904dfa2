"""`baton batch run`, `status` and `cancel`. What a command needs is imported when it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.failing import or_fail

if TYPE_CHECKING:
    from app.cli.batch_client import BatchClient

app = typer.Typer(help="Answer a file of requests when there is room for them.", no_args_is_help=True)
LOOK_S = 0.5
INTERRUPTED = 130

Url = Annotated[str, typer.Option(envvar="BATON_URL", help="where Baton answers, its route prefix included")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
HERE = "http://127.0.0.1:8000"


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="a JSONL file: a request with its custom_id in each line", exists=True)],
    output: Annotated[Path | None, typer.Option(help="where the answers go; default: FILE.output.jsonl")] = None,
    errors: Annotated[Path | None, typer.Option(help="where failed lines go; default: FILE.errors.jsonl")] = None,
    endpoint: Annotated[str | None, typer.Option(help="of every line; default: the first line's url")] = None,
    window: Annotated[str, typer.Option(help="completion window, as 30m, 24h or 7d")] = "24h",
    detach: Annotated[bool, typer.Option("--detach", help="do not wait: print the batch's id")] = False,
    url: Url = HERE,
    as_json: Json = False,
) -> None:
    """Send a file, wait for its batch, and fetch what it has made; exit status 1 where the batch is not completed."""
    asked = or_fail(lambda: endpoint or first_url(file))
    with _client(url) as client:
        file_id = or_fail(lambda: client.upload(file))
        batch = or_fail(lambda: client.create(file_id, asked, window))
        if not detach:
            batch = or_fail(lambda: _waited(client, batch))
            where = {"output": output or _beside(file, "output"), "error": errors or _beside(file, "errors")}
            batch["files"] = or_fail(lambda: _fetched(client, batch, where))
    typer.echo(json.dumps(batch) if as_json else batch_text(batch))
    if not detach and batch["status"] != "completed":
        raise typer.Exit(1)


@app.command()
def status(
    batch_id: Annotated[str, typer.Argument(help="the batch's id")], url: Url = HERE, as_json: Json = False
) -> None:
    """Show how far a batch is."""
    _show(url, as_json, lambda client: client.batch(batch_id))


@app.command()
def cancel(
    batch_id: Annotated[str, typer.Argument(help="the batch's id")], url: Url = HERE, as_json: Json = False
) -> None:
    """End a batch as it is. What it has answered stays."""
    _show(url, as_json, lambda client: client.cancel(batch_id))


def _show(url: str, as_json: bool, ask: Callable[[BatchClient], Mapping[str, Any]]) -> None:
    with _client(url) as client:
        batch = or_fail(lambda: ask(client))
    typer.echo(json.dumps(batch) if as_json else batch_text(batch))


def first_url(file: Path) -> str:
    """The `url` of a file's first line that is not blank. Raises CliError."""
    from app.cli.client import CliError

    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        found = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(f"the first line of {file} has no url: give --endpoint") from error
    return str(found)


def batch_text(batch: Mapping[str, Any]) -> str:
    """A batch for people, in a line or a few."""
    counts = batch["request_counts"]
    lines = [
        f"{batch['id']}: {batch['status']}; of {counts['total']} lines {counts['completed']} are answered, "
        f"and {counts['failed']} have failed"
    ]
    lines += [f"  {error['code']}: {error['message']}" for error in (batch.get("errors") or {}).get("data", ())]
    if "files" in batch:
        lines += [f"  {which}: {path}" for which, path in batch["files"].items()]
    else:
        named = {which: batch.get(f"{which}_file_id") for which in ("output", "error")}
        lines += [f"  {which}: {file_id}" for which, file_id in named.items() if file_id]
    return "\n".join(lines)


def _waited(client: BatchClient, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch when it is over, with a bar on a terminal. It goes on where the user interrupts this."""
    from rich.console import Console
    from rich.progress import Progress

    from app.cli.batch_client import OVER

    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(batch["status"], total=None)
            while batch["status"] not in OVER:
                time.sleep(LOOK_S)
                batch = client.batch(batch["id"])
                counts = batch["request_counts"]
                done = counts["completed"] + counts["failed"]
                bar.update(task, description=batch["status"], completed=done, total=counts["total"] or None)
    except KeyboardInterrupt:
        typer.echo(f"{batch['id']} goes on: `baton batch status` shows it, `baton batch cancel` ends it", err=True)
        raise typer.Exit(INTERRUPTED) from None
    return batch


def _fetched(client: BatchClient, batch: Mapping[str, Any], where: Mapping[str, Path]) -> dict[str, str]:
    """The files that a batch has made, each where it is now."""
    made = {which: path for which, path in where.items() if batch[f"{which}_file_id"] is not None}
    for which, path in made.items():
        client.download(batch[f"{which}_file_id"], path)
    return {which: str(path) for which, path in made.items()}


def _beside(file: Path, what: str) -> Path:
    return file.with_name(f"{file.stem}.{what}.jsonl")


def _client(url: str) -> BatchClient:
    from app.cli.batch_client import BatchClient

    return BatchClient(url)
