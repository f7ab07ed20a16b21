"""The scripted texts are known, reproducible and as easy to draft as they say."""

from __future__ import annotations

import pytest

from benchmarks.controller.scripted_text import AnswerScript, ScriptedText, text_of_prompt

NUM_TOKENS = 12_000


def static_length(text: ScriptedText, begin: int, end: int, k: int = 3) -> float:
    """Mean acceptance length of K drafts a round, from output token ``begin`` to ``end``."""
    position, rounds, first = text.prompt_len + begin, 0, text.prompt_len + begin
    while position < text.prompt_len + end:
        accepted = 0
        for offset, draft in enumerate(text.drafts(position, k)):
            if draft != text.id_at(position + offset):
                break
            accepted += 1
        position += accepted + 1
        rounds += 1
    return (position - first) / rounds


@pytest.mark.parametrize("length", [2.0, 2.46, 3.0])
def test_static_speculation_reaches_the_length(length: float) -> None:
    text = ScriptedText(AnswerScript(seed=1, phases=((NUM_TOKENS, length),)))
    assert static_length(text, 0, NUM_TOKENS) == pytest.approx(length, abs=0.06)


def test_the_length_may_shift_inside_an_answer() -> None:
    text = ScriptedText(AnswerScript(seed=2, phases=((6000, 2.0), (6000, 3.0))))
    assert static_length(text, 0, 6000) == pytest.approx(2.0, abs=0.08)
    assert static_length(text, 6000, 12_000) == pytest.approx(3.0, abs=0.1)


def test_engine_and_drafter_read_the_same_text_from_the_prompt() -> None:
    script = AnswerScript(seed=3, phases=((50, 2.0), (50, 3.0)))
    asked, own = script.prompt_ids(), ScriptedText(script)
    read = text_of_prompt([*asked, *own.answer(7)])
    assert read.prompt_len == len(asked)
    assert read.answer(200) == own.answer(200)
    assert [read.drafts(len(asked) + i, 3) for i in range(100)] == [own.drafts(len(asked) + i, 3) for i in range(100)]
    assert bytes(own.answer(200)).decode().isprintable()


def test_how_much_of_a_sequence_is_true() -> None:
    text = ScriptedText(AnswerScript(seed=4, phases=((50, 2.0),)))
    ids = [*AnswerScript(seed=4, phases=((50, 2.0),)).prompt_ids(), *text.answer(5)]
    assert text.num_true(ids, since=0) == len(ids)
    ids[-2] ^= 1
    assert text.num_true(ids, since=0) == text.num_true(ids, since=text.prompt_len + 1) == len(ids) - 2


def test_ids_that_are_no_script_are_refused() -> None:
    with pytest.raises(ValueError, match="is not in list"):
        text_of_prompt([1, 2, 3])
