"""Reads typed fields out of a parsed JSON object; every error names the field by its path.

A field that is absent and a field that is null mean the same, as in OpenAI's API. Nothing is coerced: "1", 1.0 and true
are not the integer 1 (a float that is a whole number is, because JSON has no integers and some clients send 16.0).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import orjson

from gateway.errors import InvalidRequest

__all__ = ["FieldReader", "describe", "parse_json_object"]

_Default = TypeVar("_Default", int, float, None)

_MAX_SHOWN_CHARS = 60
_JSON_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        InvalidRequest: not JSON (NaN and lone surrogates are not), not an object, or a key is given twice.
    """
    if not body.strip():
        raise InvalidRequest("The request body is empty; a JSON object is expected.", code="invalid_json")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid JSON: {_json_reason(error)}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body must be a JSON object, not {describe(value)}.", code="invalid_json")
    # Parsers keep the last of two equal keys, so the client's first one would be dropped without a word. A key that is
    # written once can't be a duplicate; only bodies where one may be are read a second time.
    if any(body.count(orjson.dumps(key)) > 1 for key in value):
        _refuse_duplicate_keys(body)
    return value


def describe(value: object) -> str:
    """The JSON type of a value, for error messages: "an array", "null"."""
    return "null" if value is None else _JSON_NAMES.get(type(value), "something else")


class FieldReader:
    """Typed reads from one JSON object.

    Args:
        values: the object.
        path: where it stands in the request, "" for the body itself, otherwise e.g. ``messages[0]``.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def path_of(self, name: str) -> str:
        """Full path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        """The raw value; None if absent or null."""
        return self.values.get(name)

    def fail(self, name: str, problem: str, *, code: str = "invalid_value") -> NoReturn:
        """Raise ``InvalidRequest``: "<path> <problem>."."""
        path = self.path_of(name)
        raise InvalidRequest(f"{path} {problem}.", code=code, param=path)

    def require(self, name: str) -> Any:
        """The raw value of a field that must be there and not null."""
        value = self.get(name)
        if value is None:
            self.fail(name, "is required", code="missing_required_parameter")
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._fail_type(name, "a boolean", value)
        return value

    def integer(self, name: str, *, default: _Default, low: int, high: int) -> int | _Default:
        """An integer with low <= value <= high."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            self._fail_type(name, "an integer", value)
        if not low <= value <= high:
            self.fail(name, f"must be between {low} and {high}, not {value}")
        return value

    def number(
        self, name: str, *, default: _Default, low: float, high: float, open_low: bool = False
    ) -> float | _Default:
        """A finite number with low <= value <= high, or low < value if ``open_low``."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._fail_type(name, "a number", value)
        if not low <= value <= high or (open_low and value == low) or not math.isfinite(value):
            above = "above" if open_low else "at least"
            limit = f" and at most {high:g}" if math.isfinite(high) else ""
            self.fail(name, f"must be {above} {low:g}{limit}, not {value:g}")
        return float(value)

    def string(self, name: str, *, max_chars: int | None = None) -> str | None:
        """A string, or None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self._fail_type(name, "a string", value)
        if max_chars is not None and len(value) > max_chars:
            self.fail(name, f"must have at most {max_chars} characters, not {len(value)}")
        return value

    def child(self, name: str) -> FieldReader | None:
        """A nested object, or None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._fail_type(name, "an object", value)
        return FieldReader(value, self.path_of(name))

    def _fail_type(self, name: str, expected: str, value: object) -> NoReturn:
        self.fail(name, f"must be {expected}, not {describe(value)}", code="invalid_type")


def _refuse_duplicate_keys(body: bytes) -> None:
    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                shown = key[:_MAX_SHOWN_CHARS]
                raise InvalidRequest(f"{shown} is given twice.", code="duplicate_field", param=shown)
            seen.add(key)

    try:
        json.loads(body, object_pairs_hook=check)
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from None


def _json_reason(error: orjson.JSONDecodeError) -> str:
    # The parser's text never quotes the body, only a position in it.
    reason = str(error)
    if "surrogate" in reason:
        return f"{reason}; a \\ud800-\\udfff escape must come in pairs (was the text cut inside an emoji?)"
    return reason
