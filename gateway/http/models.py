"""GET /v1/models and /v1/models/{id}: known from the configuration, so they answer while the model still loads."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from gateway.errors import NotFound
from gateway.http.edge import EDGE
from gateway.ports import ModelCard

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/v1/models")
async def list_models(request: web.Request) -> web.Response:
    """The served model under its name and each alias."""
    card = request.app[EDGE].engine.model_card()
    names = [card.name, *card.aliases]
    body = {"object": "list", "data": [_model_fields(card, name) for name in names]}
    return web.Response(body=orjson.dumps(body), content_type="application/json")


@routes.get("/v1/models/{model_id:.+}")
async def get_model(request: web.Request) -> web.Response:
    """One model; names may hold slashes."""
    card = request.app[EDGE].engine.model_card()
    name = request.match_info["model_id"]
    if name not in (card.name, *card.aliases):
        raise NotFound(f"The model {name[:100]!r} does not exist here.", code="model_not_found", param="model")
    return web.Response(body=orjson.dumps(_model_fields(card, name)), content_type="application/json")


def _model_fields(card: ModelCard, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "breakeven",
        "root": card.name,
        "parent": None,
        "max_model_len": card.context_len or None,  # not known while loading
    }
