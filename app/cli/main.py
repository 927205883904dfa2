"""The commands of `baton`. What a command needs is imported when it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app.cli import batch
from app.cli.failing import or_fail

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on separate replicas, and look after them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(batch.app, name="batch")
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Url = Annotated[str, typer.Option(envvar="BATON_URL", help="where Baton answers, its route prefix included")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
HERE = "http://127.0.0.1:8000"


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="a configuration, as configs/cpu.yaml")],
    port: Annotated[int | None, typer.Option(help="HTTP port; default: the configuration's")] = None,
    ray_address: Annotated[str | None, typer.Option(help="host:port of a Ray cluster; default: one of our own")] = None,
    ray_port: Annotated[int, typer.Option(help="of a Ray of our own")] = 6379,
    dashboard_port: Annotated[int, typer.Option(help="of Ray's dashboard")] = 8265,
    proxy: Annotated[str | None, typer.Option(help="haproxy (default) or serve, in a Ray of our own")] = None,
    observe: Annotated[bool, typer.Option("--observe", help="start Prometheus too, beside a Ray of our own")] = False,
    prometheus_port: Annotated[int | None, typer.Option(help="default: 9090, or another where that is busy")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="logical CPUs of our own Ray; default: what is needed")] = None,
    timeout_s: Annotated[float, typer.Option(help="the longest until ready")] = 900.0,
) -> None:
    """Start everything and serve, as `make serve`."""
    options = {
        "--config": config,
        "--port": port,
        "--ray-address": ray_address,
        "--ray-port": ray_port,
        "--dashboard-port": dashboard_port,
        "--proxy": proxy,
        "--prometheus-port": prometheus_port,
        "--num-cpus": num_cpus,
        "--timeout-s": timeout_s,
    }
    given = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    _become("app.launch", [*given, *(["--observe"] if observe else [])])


@app.command()
def status(url: Url = HERE, as_json: Json = False) -> None:
    """Show the state of a running Baton."""
    from app.cli.client import fetch_status
    from app.cli.tables import status_text

    state = or_fail(lambda: fetch_status(url))
    typer.echo(json.dumps(state) if as_json else status_text(state))


@app.command()
def sessions(
    request_id: Annotated[str | None, typer.Argument(help="show when this request did what")] = None,
    url: Url = HERE,
    as_json: Json = False,
) -> None:
    """List the sessions of a running Baton, or show the timeline of one request's."""
    from app.cli.client import fetch_status, fetch_timelines
    from app.cli.tables import session_rows, sessions_text, timelines_text

    if request_id is not None:
        found = or_fail(lambda: fetch_timelines(url, request_id))
        typer.echo(json.dumps(found) if as_json else timelines_text(found))
        return
    rows = session_rows(or_fail(lambda: fetch_status(url)))
    typer.echo(json.dumps({"sessions": rows}) if as_json else sessions_text(rows))


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="its name in `baton status`")],
    resume: Annotated[bool, typer.Option("--resume", help="put it back into service")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="until no session is there")] = False,
    url: Url = HERE,
    as_json: Json = False,
) -> None:
    """Take a replica out of service: nothing new goes there, and its sessions move or end."""
    from app.cli.client import drain as ask
    from app.cli.draining import drained_text, until_empty

    found = or_fail(lambda: ask(url, replica, resume))
    if wait and not resume:
        with _busy(f"{found['sessions']} sessions move off {replica}, or end there"):
            or_fail(lambda: until_empty(url, replica))
        found["sessions"] = 0
    typer.echo(json.dumps(found) if as_json else drained_text(found))


@app.command()
def explain(
    what: Annotated[str, typer.Argument(help="a request's body as a file of JSON, - for stdin, or a prompt")],
    model: Annotated[str | None, typer.Option(help="model or adapter; default: what the body says")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="of the answer; default: what the body says")] = None,
    priority: Annotated[str, typer.Option("--class", help="priority class; default: the configuration's")] = "",
    completion: Annotated[bool, typer.Option("--completion", help="a prompt is no chat message")] = False,
    url: Url = HERE,
    as_json: Json = False,
) -> None:
    """Say where a request would go now, and what each way costs. Nothing is served."""
    from app.cli.client import fetch_explanation
    from app.cli.explained import body_of, explained_text

    found = or_fail(lambda: fetch_explanation(url, body_of(what, model, max_tokens, completion), priority))
    typer.echo(json.dumps(found) if as_json else explained_text(found))


prefixes = typer.Typer(help="Pin prefixes, so that they stay in the prefix caches of all replicas.")
app.add_typer(prefixes, name="prefixes")


@prefixes.command("add")
def add_prefix(
    what: Annotated[str, typer.Argument(help="a request's body as a file of JSON, - for stdin, or a prompt")],
    model: Annotated[str | None, typer.Option(help="model or adapter; default: what the body says")] = None,
    completion: Annotated[bool, typer.Option("--completion", help="a prompt is no chat message")] = False,
    key: Annotated[str, typer.Option(help="with `separate_caches`: the name of the API key that it is for")] = "",
    url: Url = HERE,
    as_json: Json = False,
) -> None:
    """Pin the prompt that a request with this body has."""
    from app.cli.client import pin_prefix
    from app.cli.explained import body_of
    from app.cli.tables import prefixes_text

    found = or_fail(lambda: pin_prefix(url, body_of(what, model, None, completion), key))
    typer.echo(json.dumps(found) if as_json else prefixes_text([found]))


@prefixes.command("list")
def list_prefixes(url: Url = HERE, as_json: Json = False) -> None:
    """List the pinned prefixes, and how many replicas have them."""
    from app.cli.client import fetch_prefixes
    from app.cli.tables import prefixes_text

    found = or_fail(lambda: fetch_prefixes(url))
    typer.echo(json.dumps(found) if as_json else prefixes_text(found["prefixes"]))


@prefixes.command("remove")
def remove_prefix(
    prefix: Annotated[str, typer.Argument(help="its id in `baton prefixes list`")],
    url: Url = HERE,
    as_json: Json = False,
) -> None:
    """Unpin a prefix. Its blocks stay cached until others need them."""
    from app.cli.client import unpin_prefix

    found = or_fail(lambda: unpin_prefix(url, prefix))
    typer.echo(json.dumps(found) if as_json else f"{prefix} is not pinned any more")


@app.command()
def doctor(
    transfer: Annotated[bool, typer.Option("--transfer", help="also move KV between two processes: a minute")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine; exit status 1 on a fail."""
    from app.cli.machine import examine, has_gpu
    from app.cli.tables import aligned
    from app.cli.transfers import transfers

    lines = examine()
    if transfer:
        with _busy("moving KV between two processes"):
            lines += transfers(has_gpu())
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(line) for line in lines]}))
    else:
        typer.echo("\n".join(aligned([(each.level, each.check, each.found, each.hint) for each in lines])))
    if any(line.level == "fail" for line in lines):
        raise typer.Exit(1)


@app.command(context_settings=_FORWARDED)
def plan(context: typer.Context) -> None:
    """Find the cheapest fleet for a trace."""
    _forward("load_tests.plan", context.args)


@app.command(context_settings=_FORWARDED)
def tune(context: typer.Context) -> None:
    """Measure engines and print settings."""
    _forward("load_tests.tune", context.args)


def _busy(what: str) -> AbstractContextManager[object]:
    """Shows on a terminal that something takes a while. Nothing of it is in a file or a pipe."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def _forward(module: str, arguments: list[str]) -> None:
    """Run a module of the load tests, which the product itself may not import. Its last line of stdout is JSON."""
    if "--json" not in arguments:
        _become(module, arguments)
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if lines := done.stdout.splitlines():
        typer.echo(lines[-1])
    raise typer.Exit(done.returncode)


def _become(module: str, arguments: list[str]) -> NoReturn:
    """Replace this process, so that signals reach the module itself."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main() -> None:
    """The console script."""
    app()
