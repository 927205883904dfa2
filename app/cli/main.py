"""The commands of `baton`. What a command needs is imported when it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on separate replicas, and look after them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
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
        "--num-cpus": num_cpus,
        "--timeout-s": timeout_s,
    }
    given = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    _become("app.launch", given)


@app.command()
def status(url: Url = HERE, as_json: Json = False) -> None:
    """Show the state of a running Baton."""
    from app.cli.tables import status_text

    state = _state(url)
    typer.echo(json.dumps(state) if as_json else status_text(state))


@app.command()
def sessions(url: Url = HERE, as_json: Json = False) -> None:
    """List the sessions of a running Baton."""
    from app.cli.tables import session_rows, sessions_text

    rows = session_rows(_state(url))
    typer.echo(json.dumps({"sessions": rows}) if as_json else sessions_text(rows))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine; exit status 1 on a fail."""
    from app.cli.machine import examine
    from app.cli.tables import aligned

    lines = examine()
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


def _state(url: str) -> dict[str, Any]:
    from app.cli.client import CliError, fetch_status

    try:
        return fetch_status(url)
    except CliError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _forward(module: str, arguments: list[str]) -> None:
    """Run a module of the load tests, which the product itself may not import. Its last line of stdout is JSON."""
    if "--json" not in arguments:
        _become(module, arguments)
    rest = [each for each in arguments if each != "--json"]
    done = subprocess.run([sys.executable, "-m", module, *rest], stdout=subprocess.PIPE, text=True, check=False)
    if lines := done.stdout.splitlines():
        typer.echo(lines[-1])
    raise typer.Exit(done.returncode)


def _become(module: str, arguments: list[str]) -> NoReturn:
    """Replace this process, so that signals reach the module itself."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main() -> None:
    """The console script."""
    app()
