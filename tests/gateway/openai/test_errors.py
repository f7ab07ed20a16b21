from __future__ import annotations

import json

import pytest

from gateway.errors import (
    HTTP_ERRORS,
    AuthenticationFailed,
    GatewayError,
    InvalidRequest,
    OverloadError,
    QueueFull,
    TargetFailed,
)
from gateway.openai.errors import error_body, error_headers, error_status


def test_every_class_has_a_status_and_a_type() -> None:
    for cls in HTTP_ERRORS:
        error = cls("x", retry_after_s=1) if issubclass(cls, OverloadError) else cls("x")
        fields = json.loads(error_body(error))["error"]
        assert set(fields) == {"message", "type", "param", "code"}
        assert isinstance(fields["code"], str)
        assert 400 <= error_status(error) < 600


def test_a_subclass_without_a_row_takes_its_parents() -> None:
    class TargetSulks(TargetFailed):
        pass

    assert error_status(TargetSulks("x")) == 502


def test_text_is_bounded_and_valid_unicode() -> None:
    body = error_body(InvalidRequest("m" * 10_000 + "\ud83d", param="\ud83d" + "p" * 500))
    assert len(body) < 1000
    assert json.loads(body)["error"]["message"].endswith("…")
    assert json.loads(error_body(GatewayError("\ud83d")))["error"]["message"] == "?"


@pytest.mark.parametrize(
    ("wait_s", "header", "header_ms"),
    [(0.0, "1", "0"), (0.25, "1", "250"), (1.2, "2", "1200"), (9999, "120", "120000")],
)
def test_retry_after(wait_s: float, header: str, header_ms: str) -> None:
    headers = error_headers(QueueFull("x", retry_after_s=wait_s))
    assert headers == {"Retry-After": header, "retry-after-ms": header_ms}


def test_how_to_authenticate() -> None:
    assert error_headers(AuthenticationFailed("x")) == {"WWW-Authenticate": "Bearer"}
