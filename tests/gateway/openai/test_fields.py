from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.openai.fields import FieldReader, describe, parse_json_object


@given(st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text()))
def test_any_object_comes_through(values: dict[str, object]) -> None:
    assert parse_json_object(json.dumps(values, ensure_ascii=True).encode("utf-8", "replace")) == values or any(
        0xD800 <= ord(char) <= 0xDFFF for char in str(values)
    )


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_a_client_error(raw: bytes) -> None:
    try:
        value = parse_json_object(raw)
    except InvalidRequest:
        return
    assert isinstance(value, dict)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"  \n", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'{"a":1,"b":2,"a":1}', "duplicate_field"),
        (b'{"a":{"x":1,"x":2},"x":3}', "duplicate_field"),
    ],
)
def test_refused(raw: bytes, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json_object(raw)
    assert caught.value.code == code


def test_a_key_that_is_also_a_value_is_no_duplicate() -> None:
    assert parse_json_object(b'{"user":"user","role":["user"]}') == {"user": "user", "role": ["user"]}


def test_a_cut_emoji_is_explained() -> None:
    with pytest.raises(InvalidRequest, match="pairs"):
        parse_json_object(b'{"a":"\\ud83d"}')


def test_null_means_absent() -> None:
    reader = FieldReader({"a": None})
    assert reader.boolean("a", default=True)
    assert reader.integer("a", default=3, low=0, high=9) == 3
    assert reader.number("a", default=None, low=0, high=9) is None
    assert reader.string("a") is None
    assert reader.child("a") is None


def test_numbers_are_not_coerced() -> None:
    reader = FieldReader({"whole": 16.0, "part": 1.5, "yes": True, "text": "1", "big": 2.0**60})
    assert reader.integer("whole", default=0, low=0, high=99) == 16
    for name in ("part", "yes", "text", "big"):
        with pytest.raises(InvalidRequest) as caught:
            reader.integer(name, default=0, low=0, high=2**62)
        assert caught.value.code == "invalid_type"
    for name in ("yes", "text"):
        with pytest.raises(InvalidRequest):
            reader.number(name, default=0.0, low=0, high=9)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_an_open_lower_limit(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"above 0"):
        FieldReader({"x": value}).number("x", default=1.0, low=0.0, high=float("inf"), open_low=True)


def test_paths_are_nested() -> None:
    child = FieldReader({"a": {"b": "x"}}).child("a")
    assert child is not None
    with pytest.raises(InvalidRequest, match=r"a\.b must be a boolean, not a string"):
        child.boolean("b")


def test_types_are_named() -> None:
    assert [describe(value) for value in (None, True, 1, 1.5, "x", [], {})] == [
        "null",
        "a boolean",
        "an integer",
        "a number",
        "a string",
        "an array",
        "an object",
    ]
