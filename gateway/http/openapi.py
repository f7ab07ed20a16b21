"""GET /openapi.json: the description of every route, built once a version is known."""

from __future__ import annotations

from functools import lru_cache

import orjson
from aiohttp import web

from gateway.http.edge import EDGE
from gateway.openai.openapi import openapi_document

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.get("/openapi.json")
async def openapi(request: web.Request) -> web.Response:
    """The document."""
    body = _document(request.app[EDGE].engine.stats().version)
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-cache"})


@lru_cache(maxsize=1)
def _document(version: str) -> bytes:
    return orjson.dumps(openapi_document(version=version))
