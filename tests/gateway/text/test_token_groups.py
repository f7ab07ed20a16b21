from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ports import GenerationDelta, TokenLogprob
from gateway.text.stream import TextStream
from gateway.text.token_groups import TokenGroups
from tests.gateway.fakes import ByteCodec

CODEC = ByteCodec()


def deltas(text: str, cuts: list[int], stops: tuple[str, ...] = ()) -> list[GenerationDelta]:
    ids = list(text.encode())
    stream = TextStream(CODEC, stop_strings=stops)
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        block = ids[begin:end]
        texts = [stream.push(token_id)[0] for token_id in block]
        logprobs = tuple(TokenLogprob(token_id=token_id, logprob=-1.0) for token_id in block)
        found.append(GenerationDelta(text="".join(texts), token_ids=tuple(block), logprobs=logprobs))
    found.append(GenerationDelta(text=stream.finish(), token_ids=()))
    return found


@given(st.text(max_size=20), st.lists(st.integers(0, 20), max_size=5), st.integers(1, 6))
def test_nothing_is_lost_doubled_or_reordered(text: str, cuts: list[int], size: int) -> None:
    cuts = sorted(min(cut, len(text.encode())) for cut in cuts)
    source = deltas(text, cuts, stops=("never", "ab"[:1] * 3))
    groups = TokenGroups(size, CODEC)
    found = [group for delta in source for group in groups.push(delta)] + groups.finish()
    assert "".join(group.text for group in found) == "".join(delta.text for delta in source)
    ids = [token_id for group in found for token_id in group.token_ids]
    assert ids == list(text.encode())
    assert [entry.token_id for group in found for entry in group.logprobs or ()] == ids
    lens = [len(group.token_ids) for group in found if group.token_ids]
    assert lens[:1] == [1][: len(lens)]
    assert all(length == size for length in lens[1:-1])
    assert all(length <= size for length in lens)


def test_one_token_an_event_hides_the_block() -> None:
    groups = TokenGroups(1, CODEC)
    found = groups.push(GenerationDelta(text="abc", token_ids=(97, 98, 99)))
    assert [group.text for group in found] == ["a", "b", "c"]


@pytest.mark.parametrize("size", [0])
def test_no_interval_passes_on(size: int) -> None:
    delta = GenerationDelta(text="", token_ids=(1,))
    groups = TokenGroups(size, CODEC)
    assert groups.push(delta) == [delta]
    assert groups.finish() == []
