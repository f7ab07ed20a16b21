"""Probes: /health and /ping say that the process lives, /ready that it takes requests, and what it waits for if not."""

from __future__ import annotations

import orjson
from aiohttp import web

from gateway.http.edge import EDGE

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/health")
@routes.get("/ping")
async def live(_: web.Request) -> web.Response:
    """200 as long as the event loop runs."""
    return web.Response(body=b'{"status":"ok"}', content_type="application/json")


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """200 once requests are taken; 503 with the load phase before, and while draining."""
    phase = request.app[EDGE].engine.load_phase()
    is_open = phase.is_ready and not phase.is_draining
    status = "draining" if phase.is_draining else "ready" if phase.is_ready else "loading"
    body = orjson.dumps({"status": status, "phase": phase.phase, "progress": phase.progress})
    headers = {} if is_open else {"Retry-After": "1"}
    return web.Response(status=200 if is_open else 503, body=body, content_type="application/json", headers=headers)
