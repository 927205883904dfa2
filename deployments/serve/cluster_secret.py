"""The secret by which the replicas, ingresses and session manager of a cluster recognise each other."""

from __future__ import annotations

import secrets

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from configs.schema import BatonConfig

SECRET_KEY = b"baton-channel-secret"


def cluster_secret(config: BatonConfig) -> str:
    """The configured secret, or else one that is made once per Ray cluster and kept in its GCS."""
    if config.channel.secret is not None:
        return config.channel.secret
    _internal_kv_put(SECRET_KEY, secrets.token_hex(32).encode(), overwrite=False)
    return bytes(_internal_kv_get(SECRET_KEY)).decode()
