"""The model, made ready before anything else starts."""

from __future__ import annotations

import subprocess
import sys

from app.launch.config import LaunchError
from configs.schema import BatonConfig


def prepare_model(config: BatonConfig) -> str:
    """Run `deployments.checkpoint.prepare` in a process of its own, whose memory ends with it. Progress goes to stderr.

    A Ctrl-C in the terminal does not reach that process, which would print a traceback: `subprocess.run` kills it.
    """
    command = [sys.executable, "-m", "deployments.checkpoint.prepare", "--source", config.model.source]
    if config.model.cache_dir is not None:
        command += ["--cache-dir", str(config.model.cache_dir)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=900.0, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError("preparing the model took more than 15 minutes") from error
    if done.returncode:
        raise LaunchError("the model could not be prepared (see above)")
    return done.stdout.strip()
