"""What happens to every request: an id, a JSON error for whatever goes wrong, timing headers, counters."""

from __future__ import annotations

import asyncio
import re
from uuid import uuid4

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.errors import (
    ClientError,
    GatewayError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    RequestTooLarge,
)
from gateway.http.edge import EDGE
from gateway.http.rate_limit import rate_limit_headers
from gateway.http.request_trace import note_error
from gateway.http.server_timing import TIMINGS
from gateway.http.sse import ClientGone
from gateway.openai.errors import error_body, error_headers, error_status

__all__ = ["REQUEST_ID", "answer_errors", "set_headers"]

REQUEST_ID = web.RequestKey("request_id", str)
_STARTED_S = web.RequestKey("started_s", float)

_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Not an official status: what proxies log for a client that left. Nobody reads it.
_CLIENT_CLOSED_STATUS = 499

_log = structlog.get_logger("gateway.http")


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: gives the request its id and turns every error into a nested OpenAI error object."""
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _SAFE_REQUEST_ID.fullmatch(given) else uuid4().hex
    request[_STARTED_S] = asyncio.get_running_loop().time()
    counters = request.app[EDGE].counters
    try:
        # Every log line of this request, the engine's too, carries the id.
        with structlog.contextvars.bound_contextvars(http_request_id=request[REQUEST_ID]):
            return await handler(request)
    except ClientGone:
        counters.client_closed += 1
        return web.Response(status=_CLIENT_CLOSED_STATUS)
    except asyncio.CancelledError:
        if request.transport is None or request.transport.is_closing():
            counters.client_closed += 1
        raise
    except GatewayError as error:
        note_error(request, error.code)
        return _error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error_response(_from_http_exception(error, request), error)
    except Exception as error:  # noqa: BLE001 # the request boundary (STYLE E3)
        _log.exception("request_failed", http_request_id=request[REQUEST_ID], path=request.path, exc_info=error)
        note_error(request, InternalError.default_code)
        return _error_response(InternalError("An internal error occurred; the log has the details."))


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before any head is sent: request id, time to the head, and the response is counted."""
    if REQUEST_ID not in request:
        return
    elapsed_ms = (asyncio.get_running_loop().time() - request[_STARTED_S]) * 1000
    response.headers["x-request-id"] = request[REQUEST_ID]
    response.headers["openai-processing-ms"] = str(round(elapsed_ms))
    response.headers["Server-Timing"] = ", ".join([f"head;dur={elapsed_ms:.1f}", *request.get(TIMINGS, ())])
    response.headers.update(rate_limit_headers(request))
    resource = request.match_info.route.resource
    route = "unknown" if resource is None else resource.canonical
    request.app[EDGE].counters.responses[f"{route} {response.status}"] += 1


def _error_response(error: GatewayError, cause: web.HTTPException | None = None) -> web.Response:
    headers = error_headers(error)
    if cause is not None and "Allow" in cause.headers:
        headers["Allow"] = cause.headers["Allow"]
    response = web.Response(
        status=error_status(error), body=error_body(error), content_type="application/json", headers=headers
    )
    if isinstance(error, RequestTooLarge):
        response.force_close()  # the rest of the body is not worth reading
    return response


def _from_http_exception(error: web.HTTPException, request: web.Request) -> GatewayError:
    target = f"{request.method} {request.path[:200]}"
    match error.status:
        case 404:
            return NotFound(f"Unknown URL: {target}", code="unknown_url")
        case 405:
            return MethodNotAllowed(f"Not allowed here: {target}")
        case 413:
            return RequestTooLarge("The request body is larger than the limit.")
        case _:
            return ClientError(error.reason or "Bad request")
