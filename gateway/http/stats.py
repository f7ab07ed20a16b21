"""GET /stats, /metrics and /server_info: three views of one snapshot."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
from aiohttp import web

from gateway.http.edge import EDGE
from gateway.metrics import Observed, render_metrics

__all__ = ["routes"]

routes = web.RouteTableDef()

_NO_STORE = {"Cache-Control": "no-store"}


@routes.get("/stats")
async def stats(request: web.Request) -> web.Response:
    """The whole snapshot as JSON, and the edge's own counters under ``http``."""
    edge = request.app[EDGE]
    snapshot = edge.engine.stats()
    fields: dict[str, Any] = {field.name: getattr(snapshot, field.name) for field in dataclasses.fields(snapshot)}
    fields["http"] = edge.counters.snapshot()
    return web.Response(body=orjson.dumps(fields), content_type="application/json", headers=_NO_STORE)


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """The same in Prometheus' text format."""
    edge = request.app[EDGE]
    text = render_metrics(Observed(stats=edge.engine.stats(), http=edge.counters.snapshot()))
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(request: web.Request) -> web.Response:
    """The few facts that load tools ask an SGLang server for."""
    edge = request.app[EDGE]
    card = edge.engine.model_card()
    snapshot = edge.engine.stats()
    body = {
        "version": snapshot.version,
        "served_model_name": card.name,
        "model_path": card.name,
        "context_length": card.context_len,
        "internal_states": [{"avg_spec_accept_length": snapshot.speculation.acceptance_length}],
    }
    return web.Response(body=orjson.dumps(body), content_type="application/json", headers=_NO_STORE)
