"""Where Baton's lines go in an engine's process, which has no other handler than vLLM's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def join(vllm_config: VllmConfig) -> None:
    """Where vLLM writes its lines as JSON, let Baton's go the same way, with what their `extra` says."""
    if vllm_config.logging_config.formatter != "json":
        return
    ours = logging.getLogger("baton")
    ours.handlers = list(logging.getLogger("vllm").handlers)
    ours.propagate = False
