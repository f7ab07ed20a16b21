"""Errors of the embedded target.

TargetError
├── ModelNotFound       no such bundled model or directory, or a file of it is missing
├── UnsupportedModel    an architecture or option this engine does not compute exactly
└── ItemRefused         one verify item can't be served; carries a code for the wire
"""

__all__ = ["ItemRefused", "ModelNotFound", "TargetError", "UnsupportedModel"]


class TargetError(Exception):
    """Base of everything verifier.embedded raises."""


class ModelNotFound(TargetError):
    """No such bundled model or directory, or a file of it is missing."""


class UnsupportedModel(TargetError):
    """An architecture or option this engine does not compute exactly."""


class ItemRefused(TargetError):
    """One verify item can't be served; the others of its batch go on.

    Args:
        code: "context_limit", "unknown_request", "invalid_token", "too_many_requests" or "internal".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
