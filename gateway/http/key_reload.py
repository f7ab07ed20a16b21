"""Reads the API keys again while the gateway runs. A bad file changes nothing: the old keys stay."""

from __future__ import annotations

import structlog

from gateway.config import GatewayConfig
from gateway.http.key_ring import KeyRing
from wire.settings import ConfigError

__all__ = ["reload_keys"]

log = structlog.get_logger("gateway")


def reload_keys(keys: KeyRing, config: GatewayConfig) -> bool:
    """Accept the keys that configuration and key file hold now, and no others.

    Returns:
        False if they can't be used; the reason is in the log.
    """
    try:
        found = config.all_api_keys()
    except ConfigError as error:
        log.error("api keys not reloaded, the old ones stay", problem=str(error))
        return False
    num_old = len(keys)
    keys.replace(found)
    log.info("api keys reloaded", num_keys=len(keys), num_before=num_old)
    return True
