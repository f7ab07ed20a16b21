"""Reads a request's JSON body: type, size and time are checked before anything is parsed."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import hdrs, web

from gateway.config import GatewayConfig
from gateway.errors import BodyTimeout, InvalidRequest, RequestTooLarge, UnsupportedMediaType
from gateway.openai.fields import parse_json_object

__all__ = ["read_json_body"]


async def read_json_body(request: web.Request, config: GatewayConfig) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        UnsupportedMediaType: a content type is given and is not JSON in UTF-8.
        RequestTooLarge: by its announced length, before it is read, or while it is read.
        BodyTimeout: it did not arrive in time.
        InvalidRequest: not a JSON object, or broken compression.
    """
    _check_content_type(request)
    if request.content_length is not None and request.content_length > config.max_body_bytes:
        raise _too_large(config)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await request.read()
    except TimeoutError:
        raise BodyTimeout(f"The request body did not arrive within {config.body_timeout_s:g} s.") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(config) from None
    except web.RequestPayloadError:
        raise InvalidRequest("The request body is cut off or its compression is broken.", code="invalid_body") from None
    return parse_json_object(body)


def _check_content_type(request: web.Request) -> None:
    if hdrs.CONTENT_TYPE not in request.headers:
        return
    kind = request.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"The content type must be application/json, not {kind[:80]}.")
    if (request.charset or "utf-8").lower().replace("_", "-") not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType("The body must be UTF-8.")


def _too_large(config: GatewayConfig) -> RequestTooLarge:
    return RequestTooLarge(f"The request body is larger than the limit of {config.max_body_bytes} bytes.")
