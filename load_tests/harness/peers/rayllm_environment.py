"""An environment for Ray Serve LLM: Baton's packages, and the missing packages of Ray's `llm` extra.

It shares the site-packages of Baton's environment, so that Ray, vLLM, torch and NIXL are the same. What it adds does
not enter Baton's environment.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from load_tests.harness.application import ROOT

# What `import ray.serve.llm` needs besides ray[serve] and vLLM.
PACKAGES = ("jsonref==1.1.0", "pandas==3.1.1", "pyarrow==26.0.1")
INSTALL_TIMEOUT_S = 600.0


def python(folder: Path | None = None) -> Path:
    """The environment's interpreter.

    The environment is made on first use, and again after the packages above or Baton's environment have changed.
    """
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
