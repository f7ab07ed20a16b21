"""Before the tokenizer is there every call is a 503; afterwards the codec is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import NotReady
from gateway.late_codec import LateCodec
from gateway.ports import ChatMessage, TextCodec
from tests.gateway.fakes import ByteCodec

CALLS: dict[str, Callable[[TextCodec], Any]] = {
    "encode": lambda codec: codec.encode("hi", add_special_tokens=True),
    "decode": lambda codec: codec.decode([104, 257], skip_special_tokens=False),
    "token_bytes": lambda codec: codec.token_bytes(104),
    "render_chat": lambda codec: codec.render_chat(
        [ChatMessage(role="user", content="hi")], add_generation_prompt=False
    ),
    "eos_ids": lambda codec: codec.eos_ids,
    "special_ids": lambda codec: codec.special_ids,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_not_ready_before_and_the_same_after(call: Callable[[TextCodec], Any]) -> None:
    codec = LateCodec()
    with pytest.raises(NotReady) as caught:
        call(codec)
    assert caught.value.retry_after_s > 0
    codec.set(ByteCodec())
    assert call(codec) == call(ByteCodec())
