"""The secret that replicas, ingresses and the session manager of a cluster know each other by."""

from __future__ import annotations

import secrets

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from configs.schema import BatonConfig

SECRET_KEY = b"baton-channel-secret"


def cluster_secret(config: BatonConfig) -> str:
    """The configured secret, or one made once per Ray cluster and kept in its GCS."""
    if config.channel.secret is not None:
        return config.channel.secret
    _internal_kv_put(SECRET_KEY, secrets.token_hex(32).encode(), overwrite=False)
    return bytes(_internal_kv_get(SECRET_KEY)).decode()
