"""Errors the gateway can answer with, split by whose fault they are.

    GatewayError
    ├── ClientError          the request is at fault: 4xx
    │   ├── InvalidRequest           400  wrong field, wrong type, too long
    │   ├── AuthenticationFailed     401
    │   ├── NotFound                 404  unknown model or URL
    │   ├── MethodNotAllowed         405
    │   ├── BodyTimeout              408  the body did not arrive in time
    │   ├── RequestTooLarge          413
    │   └── UnsupportedMediaType     415
    ├── OverloadError        nobody's fault, try later: carries retry_after_s
    │   ├── QueueFull                429
    │   ├── NotReady                 503  still loading
    │   └── Draining                 503  shutting down
    ├── UpstreamError        the target is at fault
    │   ├── TargetFailed             502
    │   ├── TargetUnavailable        503
    │   └── TargetTimeout            504
    └── InternalError                500

``HTTP_ERRORS`` is the one table that maps them to an HTTP status and an OpenAI error type.
"""

from __future__ import annotations

__all__ = [
    "HTTP_ERRORS",
    "AuthenticationFailed",
    "BodyTimeout",
    "ClientError",
    "Draining",
    "GatewayError",
    "InternalError",
    "InvalidRequest",
    "MethodNotAllowed",
    "NotFound",
    "NotReady",
    "OverloadError",
    "QueueFull",
    "RequestTooLarge",
    "TargetFailed",
    "TargetTimeout",
    "TargetUnavailable",
    "UnsupportedMediaType",
    "UpstreamError",
]


class GatewayError(Exception):
    """Base of all errors a client can be answered with.

    Args:
        message: one sentence for the client; never holds file paths or tracebacks.
        code: short machine-readable string, e.g. ``context_length_exceeded``.
        param: the request field at fault, as a path (``messages[0].content``), or None.
    """

    default_code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param


class ClientError(GatewayError):
    """The request is at fault."""

    default_code = "invalid_request"


class InvalidRequest(ClientError):
    """A field is missing, of the wrong type or out of range."""

    default_code = "invalid_value"


class AuthenticationFailed(ClientError):
    """No key, or a wrong one."""

    default_code = "invalid_api_key"


class NotFound(ClientError):
    """Unknown model or URL."""

    default_code = "not_found"


class MethodNotAllowed(ClientError):
    """The URL exists, the method doesn't."""

    default_code = "method_not_allowed"


class BodyTimeout(ClientError):
    """The client did not send its body in time."""

    default_code = "body_timeout"


class RequestTooLarge(ClientError):
    """The body is over the configured limit."""

    default_code = "request_too_large"


class UnsupportedMediaType(ClientError):
    """The body is not application/json."""

    default_code = "unsupported_media_type"


class OverloadError(GatewayError):
    """The service can't take the request now; ``retry_after_s`` says when to come back."""

    default_code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class QueueFull(OverloadError):
    """Too many requests are running and waiting."""

    default_code = "queue_full"


class NotReady(OverloadError):
    """The model is still loading."""

    default_code = "not_ready"


class Draining(OverloadError):
    """The service is shutting down and takes no new requests."""

    default_code = "draining"


class UpstreamError(GatewayError):
    """The target is at fault."""

    default_code = "upstream_error"


class TargetFailed(UpstreamError):
    """The target answered this request with an error."""


class TargetUnavailable(UpstreamError):
    """The target's process is gone or not reachable."""

    default_code = "upstream_unavailable"


class TargetTimeout(UpstreamError):
    """The target did not answer in time."""

    default_code = "upstream_timeout"


class InternalError(GatewayError):
    """A bug of ours. The log holds the traceback; the client gets one sentence."""


# Looked up along the class's MRO, so a subclass without a row of its own takes its parent's.
HTTP_ERRORS: dict[type[GatewayError], tuple[int, str]] = {
    InvalidRequest: (400, "invalid_request_error"),
    AuthenticationFailed: (401, "authentication_error"),
    NotFound: (404, "invalid_request_error"),
    MethodNotAllowed: (405, "invalid_request_error"),
    BodyTimeout: (408, "timeout"),
    RequestTooLarge: (413, "invalid_request_error"),
    UnsupportedMediaType: (415, "invalid_request_error"),
    ClientError: (400, "invalid_request_error"),
    QueueFull: (429, "rate_limit_error"),
    NotReady: (503, "overloaded_error"),
    Draining: (503, "overloaded_error"),
    OverloadError: (503, "overloaded_error"),
    TargetFailed: (502, "server_error"),
    TargetUnavailable: (503, "server_error"),
    TargetTimeout: (504, "server_error"),
    UpstreamError: (502, "server_error"),
    InternalError: (500, "server_error"),
    GatewayError: (500, "server_error"),
}
