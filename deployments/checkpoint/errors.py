"""The errors of model preparation."""

from __future__ import annotations


class ModelError(Exception):
    """The model source cannot be turned into a model that an engine can load."""


class AdapterError(ModelError):
    """A folder holds no LoRA adapter that an engine can load."""


class CheckpointError(ModelError):
    """A converted checkpoint is incomplete, is corrupt or does not match its configuration."""
