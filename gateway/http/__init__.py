"""The aiohttp application: routes, middleware, server-sent events, dashboard. Part of the gateway, floor 2."""

from gateway.http.app import create_app, create_runner, start_server

__all__ = ["create_app", "create_runner", "start_server"]
