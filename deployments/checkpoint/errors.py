"""Why a model cannot be made ready."""

from __future__ import annotations


class ModelError(Exception):
    """The model source cannot be turned into something loadable."""


class CheckpointError(ModelError):
    """A converted checkpoint is incomplete, corrupt or not what its configuration says."""
