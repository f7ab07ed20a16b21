"""What can be done with a stored response: read it, read its stream again, stop it, forget it, list its input."""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import web

from gateway.errors import InvalidRequest
from gateway.http.auth import KEY_ID
from gateway.http.edge import EDGE
from gateway.http.event_reader import answer_from_log
from gateway.http.response_store import StoredResponse

__all__ = ["routes"]

routes = web.RouteTableDef()

_MAX_LISTED = 100
_DEFAULT_LISTED = 20
_MAX_SEQUENCE_NUMBER = 2**31 - 1


@routes.get("/v1/responses/{response_id}")
async def get_response(request: web.Request) -> web.StreamResponse:
    """The response as it stands; with ``stream=true`` the events of one that was created as a stream in background."""
    entry = _entry(request)
    if _boolean(request, "stream"):
        if entry.events is None:
            raise InvalidRequest(
                "Only a response that was created with background and stream can be streamed again.", param="stream"
            )
        after = _integer(request, "starting_after", default=-1, low=0, high=_MAX_SEQUENCE_NUMBER)
        return await answer_from_log(request, request.app[EDGE], entry.events, after + 1)
    return _json(entry.response.fields())


@routes.delete("/v1/responses/{response_id}")
async def delete_response(request: web.Request) -> web.Response:
    """Forget it; what still runs is stopped first."""
    entry, edge = _entry(request), request.app[EDGE]
    response_id = entry.response.response_id
    await edge.jobs.cancel(response_id)
    edge.responses.remove(response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


@routes.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: web.Request) -> web.Response:
    """Stop a response that runs in the background; one that has ended stays as it is."""
    entry = _entry(request)
    if not entry.response.request.is_background:
        raise InvalidRequest("Only a response that was created with background can be cancelled.")
    await request.app[EDGE].jobs.cancel(entry.response.response_id)
    return _json(entry.response.fields())


@routes.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: web.Request) -> web.Response:
    """The items of its input, newest first unless asked otherwise, in pages."""
    items = list(_entry(request).input_items)
    if _choice(request, "order", ("desc", "asc")) == "desc":
        items.reverse()
    after = request.query.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest("after must be the id of an item of this response.", param="after")
        items = items[ids.index(after) + 1 :]
    limit = _integer(request, "limit", default=_DEFAULT_LISTED, low=1, high=_MAX_LISTED)
    page = items[:limit]
    return _json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


def _entry(request: web.Request) -> StoredResponse:
    store = request.app[EDGE].responses
    return store.get(request.match_info["response_id"], request[KEY_ID], time.monotonic())


def _json(fields: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(fields), content_type="application/json")


def _boolean(request: web.Request, name: str) -> bool:
    return _choice(request, name, ("false", "true")) == "true"


def _choice(request: web.Request, name: str, allowed: tuple[str, ...]) -> str:
    """One of ``allowed``, of which the first is the default."""
    value = request.query.get(name, allowed[0])
    if value not in allowed:
        raise InvalidRequest(f"{name} must be {' or '.join(allowed)}.", param=name)
    return value


def _integer(request: web.Request, name: str, *, default: int, low: int, high: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and low <= int(text) <= high):
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}.", param=name)
    return int(text)
