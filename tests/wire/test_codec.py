"""The codec decodes exactly its receiver's messages and turns everything else into one typed error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire import message_strategies as strategies
from wire.codec import DRAFTER_CODEC, GATEWAY_CODEC, VERIFIER_CODEC, Codec
from wire.errors import CodecError, WireError
from wire.messages import Hello, StatusRequest

CODECS = {"verifier": VERIFIER_CODEC, "drafter": DRAFTER_CODEC, "gateway": GATEWAY_CODEC}
ALL_MESSAGES = strategies.to_verifier | strategies.to_drafter | strategies.to_gateway

# Building a whole random message costs a few milliseconds.
few = settings(max_examples=40)

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize("name", CODECS)
@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=b"\xc1")
@example(data=b"\xdf\xff\xff\xff\xff")
@example(data=b"\xdd\xff\xff\xff\xff")
def test_random_bytes_are_a_codec_error(name: str, data: bytes) -> None:
    with pytest.raises(CodecError):
        CODECS[name].decode(data)


@pytest.mark.parametrize("name", CODECS)
@given(value=json_like)
def test_well_formed_data_that_is_no_message_is_a_codec_error(name: str, value: Any) -> None:
    with pytest.raises(CodecError):
        CODECS[name].decode(_pack(value))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("tag", ["Nonsense", "", "hello", "VerifyItem", 7, None, ["Hello"]])
def test_unknown_tags_are_refused(name: str, tag: Any) -> None:
    with pytest.raises(CodecError):
        CODECS[name].decode(_pack({"type": tag, "protocol_version": 1, "role": "gateway", "pid": 1}))


@pytest.mark.parametrize(
    ("codec", "foreign"),
    [
        (VERIFIER_CODEC, strategies.to_drafter | strategies.to_gateway),
        (DRAFTER_CODEC, strategies.to_verifier | strategies.to_gateway),
        (GATEWAY_CODEC, strategies.to_verifier | strategies.to_drafter),
    ],
    ids=CODECS,
)
def test_other_receivers_messages_are_refused(codec: Codec[Any], foreign: st.SearchStrategy) -> None:
    shared = () if codec is GATEWAY_CODEC else (Hello, StatusRequest)

    @few
    @given(message=foreign)
    def check(message: msgspec.Struct) -> None:
        data = codec.encode(message)
        if isinstance(message, shared):
            assert codec.decode(data) == message
        else:
            with pytest.raises(CodecError):
                codec.decode(data)

    check()


def _codec_of(message: msgspec.Struct) -> Codec[Any]:
    for codec in CODECS.values():
        try:
            codec.decode(codec.encode(message))
        except CodecError:
            continue
        return codec
    raise AssertionError(f"no codec takes {message}")


@few
@given(message=ALL_MESSAGES)
def test_a_missing_field_is_refused(message: msgspec.Struct) -> None:
    codec = _codec_of(message)
    fields = msgspec.msgpack.decode(codec.encode(message))
    defaults = dict(zip(reversed(message.__struct_fields__), reversed(message.__struct_defaults__), strict=False))
    required = {name for name in message.__struct_fields__ if name not in defaults}
    required |= {name for name in message.__struct_fields__ if defaults.get(name) is msgspec.NODEFAULT} | {"type"}
    for name in required:
        with pytest.raises(CodecError):
            codec.decode(_pack({key: value for key, value in fields.items() if key != name}))


@few
@given(message=ALL_MESSAGES, wrong=st.sampled_from([b"\x00", [[[]]]]))
def test_a_field_of_the_wrong_type_is_refused(message: msgspec.Struct, wrong: Any) -> None:
    codec = _codec_of(message)
    fields = msgspec.msgpack.decode(codec.encode(message))
    for name in fields:
        with pytest.raises(CodecError):
            codec.decode(_pack({**fields, name: wrong}))


@few
@given(message=ALL_MESSAGES, cut=st.integers(1, 20))
def test_a_truncated_message_is_refused(message: msgspec.Struct, cut: int) -> None:
    codec = _codec_of(message)
    data = codec.encode(message)
    with pytest.raises(CodecError):
        codec.decode(data[: max(0, len(data) - cut)])


@few
@given(message=ALL_MESSAGES)
def test_trailing_bytes_are_refused(message: msgspec.Struct) -> None:
    codec = _codec_of(message)
    with pytest.raises(CodecError):
        codec.decode(codec.encode(message) + b"\x00")


@few
@given(message=strategies.to_gateway)
def test_fields_of_a_newer_sender_are_ignored(message: msgspec.Struct) -> None:
    fields = msgspec.msgpack.decode(GATEWAY_CODEC.encode(message))
    assert GATEWAY_CODEC.decode(_pack({**fields, "added_later": [1, 2]})) == message


def test_a_memoryview_is_decoded_too() -> None:
    message = Hello(protocol_version=1, role="gateway", pid=7)
    assert VERIFIER_CODEC.decode(memoryview(VERIFIER_CODEC.encode(message))) == message


def test_the_error_names_the_field_and_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="pid"):
        VERIFIER_CODEC.decode(_pack({"type": "Hello", "protocol_version": 1, "role": "gateway", "pid": "x"}))
