"""Every message survives the wire unchanged, is frozen, and every message class belongs to exactly the right unions."""

from __future__ import annotations

import inspect
import typing

import msgspec
import pytest
from hypothesis import given, settings

from tests.wire import message_strategies as strategies
from wire import messages
from wire.codec import DRAFTER_CODEC, GATEWAY_CODEC, VERIFIER_CODEC
from wire.messages import Hello, StatusRequest, ToDrafter, ToGateway, ToVerifier

RECEIVERS = {"verifier": ToVerifier, "drafter": ToDrafter, "gateway": ToGateway}


@given(message=strategies.to_verifier)
def test_round_trip_to_the_verifier(message: msgspec.Struct) -> None:
    assert VERIFIER_CODEC.decode(VERIFIER_CODEC.encode(message)) == message


@given(message=strategies.to_drafter)
def test_round_trip_to_the_drafter(message: msgspec.Struct) -> None:
    assert DRAFTER_CODEC.decode(DRAFTER_CODEC.encode(message)) == message


@given(message=strategies.to_gateway)
def test_round_trip_to_the_gateway(message: msgspec.Struct) -> None:
    assert GATEWAY_CODEC.decode(GATEWAY_CODEC.encode(message)) == message


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_the_strategies_make_every_message_of_a_receiver(receiver: str) -> None:
    # A message added to a union without a strategy would not be tested above.
    made: set[type] = set()

    @settings(max_examples=150)
    @given(message=getattr(strategies, f"to_{receiver}"))
    def collect(message: msgspec.Struct) -> None:
        made.add(type(message))

    collect()
    assert made == set(typing.get_args(RECEIVERS[receiver]))


def _structs() -> list[type[msgspec.Struct]]:
    found = [getattr(messages, name) for name in messages.__all__]
    return [value for value in found if inspect.isclass(value) and issubclass(value, msgspec.Struct)]


@pytest.mark.parametrize("cls", _structs(), ids=lambda cls: cls.__name__)
def test_every_struct_is_frozen_and_documented(cls: type[msgspec.Struct]) -> None:
    assert cls.__struct_config__.frozen
    assert cls.__doc__


@pytest.mark.parametrize("cls", _structs(), ids=lambda cls: cls.__name__)
def test_no_struct_can_hold_a_tensor(cls: type[msgspec.Struct]) -> None:
    assert "array" not in str(typing.get_type_hints(cls)).lower()
    assert "bytes" not in {str(hint) for hint in typing.get_type_hints(cls).values()}


def test_tags_are_unique() -> None:
    tags = [cls.__struct_config__.tag for cls in _structs() if cls.__struct_config__.tag is not None]
    assert len(tags) == len(set(tags))
    assert set(tags) >= {cls.__name__ for union in RECEIVERS.values() for cls in typing.get_args(union)}


def test_only_hello_and_status_have_two_receivers() -> None:
    verifier, drafter, gateway = (set(typing.get_args(union)) for union in RECEIVERS.values())
    assert verifier & drafter == {Hello, StatusRequest}
    assert not gateway & (verifier | drafter)


def test_every_request_bound_message_names_request_round_and_length() -> None:
    for cls in (
        messages.VerifyItem,
        messages.VerifyResult,
        messages.VerifyFailed,
        messages.DraftExtend,
        messages.DraftProposal,
        messages.DraftFailed,
    ):
        assert {"request_id", "round_id", "base_len"} <= set(cls.__struct_fields__), cls


def test_a_frozen_message_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        Hello(protocol_version=1, role="gateway", pid=1).pid = 2
