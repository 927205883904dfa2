"""Prints the reference of the console command: `python -m app.cli.reference`.

`python -m app.cli.reference --write` writes it to `docs/reference/cli.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from typer.testing import CliRunner

from app.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
COMMANDS = (
    *("serve", "status", "sessions", "drain", "explain"),
    *("prefixes add", "prefixes list", "prefixes remove"),
    *("batch run", "batch status", "batch cancel"),
    "doctor",
)
WIDTH = 100

_HEAD = """# Console command

`make env` puts `baton` into `.venv/bin`. With `--json` a command prints one JSON object to stdout. A command that
fails says why in one line on stderr: its exit status is 1, and 2 for a wrong option. This page is what `--help`
prints (`python -m app.cli.reference --write`).

`status`, `sessions`, `drain`, `explain`, `prefixes` and `batch` ask a running Baton ([HTTP API](http-api.md)).
`sessions REQUEST_ID` says [when the request did what](../guides/observe.md#one-sessions-timeline). The
administrator's key in the variable `BATON_ADMIN_KEY` is sent as the header `x-baton-admin-key`; what `batch`
asks goes with the API key in `BATON_API_KEY`. No command shows the text of a prompt or an answer. What `explain`,
`prefixes` and `drain` print is in [Operate](../guides/operate.md); batches are in [Batches](../guides/batches.md).
"""
_TAIL = """
`doctor` starts no engine and opens no NIXL agent: it reads what is installed and what the kernel says. With
`--transfer` two processes also move KV to each other, over NIXL and Baton's channel, and every byte is compared.
`make gpu-check` prints more of that ([GPUs](../guides/gpus.md)). On a machine with two cores and no GPU:

```
ok  python         3.11
ok  ray            2.60.0
ok  nixl           1.5.1
ok  vllm           0.32.0
ok  torch          2.13.0+cpu
ok  nixl plugins   AZURE_BLOB, GDS, GDS_MT, GPUNETIO, GUSLI, INFINIA, LIBFABRIC, OBJ, POSIX, UCX
ok  gpus           none: engines run on the CPU
ok  cores          2
ok  memory         20.9 GiB available
ok  /dev/shm       23.5 GiB free
ok  open files     20000 at most
ok  locked memory  8192 KiB at most
ok  huge pages     none set aside; none are needed
ok  network        3 interfaces; RDMA: none, KV goes over TCP
ok  port 8000      free
ok  port 6379      free
ok  port 8265      free
ok  clock          tsc
```

And the lines that `--transfer` adds there:

```
ok    kv by UCX's choice   1.31 GB/s at most; 139 MB came as they were sent
ok    kv by TCP            1.08 GB/s at most; 139 MB came as they were sent
```

## baton plan

All options are those of the planner: `baton plan --help`, and [Plan](../guides/planning.md). On a terminal it
counts the fleets that it has simulated. With `--json` the table and the count are left out.

## baton tune

All options are those of `make tune`: `baton tune --help`, and [Tune](../guides/tune.md). On a terminal a bar
shows how many measurements are done. With `--json` there is no bar, and stdout has only the result.
"""


def page() -> str:
    """The whole page."""
    sections = [f"\n## baton {name}\n\n```\n{help_of(*name.split())}```\n" for name in COMMANDS]
    return f"{_HEAD}\n```\n{help_of()}```\n{''.join(sections)}{_TAIL}"


def help_of(*command: str) -> str:
    """What `--help` prints on a terminal of `WIDTH` columns."""
    shown = CliRunner().invoke(
        app, [*command, "--help"], prog_name="baton", terminal_width=WIDTH, env={"BATON_URL": None}
    )
    return "".join(f"{line.rstrip()}\n" for line in shown.output.splitlines())


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
