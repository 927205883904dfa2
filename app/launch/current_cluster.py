"""Ray's file that names the current cluster: `ray_current_cluster`, which `ray start` writes and `ray stop` removes.

`serve run` and every other command of Ray without an address join the cluster that this file names. When that cluster
has ended, they wait for it for minutes. This module does not import ray, whose import takes seconds.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from app.launch.ports import port_is_free


def current_cluster_file() -> Path:
    """Where Ray keeps the file (`ray._common.utils.get_ray_address_file`)."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # Ray's own default
    return Path(folder) / "ray" / "ray_current_cluster"


def clear_ended_cluster() -> bool:
    """Remove the file when the cluster that it names has ended; True when it is removed.

    A cluster has ended when its address is this machine's and nothing listens there. The file stays when it names a
    living cluster, or one on another machine.
    """
    file = current_cluster_file()
    try:
        host, _, port = file.read_text().strip().rpartition(":")
    except OSError:
        return False
    if not port.isdigit() or not port_is_free(host, int(port)):
        return False
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    return True
