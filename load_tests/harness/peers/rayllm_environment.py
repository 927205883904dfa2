"""An environment for Ray Serve LLM: ours, and beside it the packages of Ray's `llm` extra that ours lacks.

It shares our site-packages, so that Ray, vLLM, torch and NIXL are the same; what it adds does not get into ours.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from load_tests.harness.application import ROOT

# What `import ray.serve.llm` asks for beside ray[serve] and vLLM.
PACKAGES = ("jsonref==1.1.0", "pandas==3.1.1", "pyarrow==26.0.1")
INSTALL_TIMEOUT_S = 600.0


def python(folder: Path | None = None) -> Path:
    """The environment's interpreter; made at first, or after the packages above or our environment have changed."""
    ours = sysconfig.get_paths()["purelib"]
    key = hashlib.sha256("\n".join((*PACKAGES, ours, sys.version)).encode()).hexdigest()[:12]
    environment = (folder or ROOT / ".cache" / "peers") / f"rayllm-{key}"
    interpreter, complete = environment / "bin" / "python", environment / "complete"
    if not complete.exists():
        print(f"installing {', '.join(PACKAGES)} into {environment}", file=sys.stderr)
        _run(sys.executable, "-m", "venv", "--clear", str(environment))
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (environment / "lib" / version / "site-packages" / "ours.pth").write_text(f"{ours}\n")
        _run(str(interpreter), "-m", "pip", "install", "--quiet", *PACKAGES)
        complete.touch()
    return interpreter


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, stdout=sys.stderr)
