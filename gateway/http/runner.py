"""aiohttp's runner, with JSON for what never becomes a request: bytes that are not HTTP, and heads that are too long.

aiohttp answers these below the application, in plain text and with a traceback in the log. Its protocol class is the
one place where that can be changed; a test over a real socket holds it there (test_malformed_http.py).
"""

from __future__ import annotations

from uuid import uuid4

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from gateway.errors import ClientError, GatewayError, InternalError
from gateway.http.edge import EDGE
from gateway.openai.errors import error_body, error_status

__all__ = ["JsonErrorRunner"]

_MAX_REASON_CHARS = 120

_log = structlog.get_logger("gateway.http")


class JsonErrorRunner(web.AppRunner):
    """An AppRunner whose every answer is JSON where it is an error."""

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self.app)


class _Server(web.Server):
    """Makes one protocol for each connection.

    Args:
        made: the server aiohttp has made; its settings are taken over.
    """

    def __init__(self, made: web.Server, app: web.Application) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        self.counters = app[EDGE].counters

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(web.RequestHandler):
    def __init__(self, server: _Server, **settings: object) -> None:
        super().__init__(server, **settings)  # type: ignore[arg-type]
        self._counters = server.counters

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer, and close the connection: nobody knows where the next request would begin."""
        error = _error(exc, message)
        request_id = uuid4().hex
        if isinstance(error, InternalError):
            _log.error("request_failed", http_request_id=request_id, exc_info=exc)
        else:
            _log.info("malformed_request", http_request_id=request_id, reason=error.message)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent already")
        self._counters.responses[f"malformed {error_status(error)}"] += 1
        response = web.Response(
            status=error_status(error),
            body=error_body(error),
            content_type="application/json",
            headers={"x-request-id": request_id},
        )
        response.force_close()
        return response


def _error(exc: BaseException | None, message: str | None) -> GatewayError:
    if isinstance(exc, LineTooLong):
        return ClientError("The request line or a header is too long.", code="head_too_large")
    if isinstance(exc, HttpProcessingError):
        # The parser's first line says what is wrong; the next ones quote the client's bytes.
        reason = (message or "").strip().partition("\n")[0].strip(" :")[:_MAX_REASON_CHARS]
        shown = "".join(char for char in reason if char.isprintable())
        return ClientError(f"The request is not valid HTTP: {shown or 'it can not be parsed'}.", code="invalid_http")
    return InternalError("An internal error occurred; the log has the details.")
