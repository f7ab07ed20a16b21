"""Texts that are known beforehand, drafts of a known quality, and the prompt that says both.

Engine and drafter are processes of their own; all they need to know stands in the prompt, whose ids are ASCII bytes:

    {"seed": 7, "phases": [[1500, 2.0], [1500, 3.0]]}\\n

The first 1500 tokens of the answer are drafted so that K = 3 has an acceptance length of 2.0 on average, the rest 3.0.
Length is defined as in the simulator: E(3) = 1 + a + a^2 + a^3 with every draft accepted by its own chance a. Whether
the draft of a position is right is drawn once per text: the text decides it, not the clock, so all modes see the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.controller.workloads import SEED_K, acceptance_for_length

__all__ = ["VOCAB_SIZE", "AnswerScript", "ScriptedText", "text_of_prompt"]

VOCAB_SIZE = 256
_MARK = ord("\n")
_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz    ", np.uint8)
_NUM_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScript:
    """One answer. phases: (tokens, acceptance length at K = 3); the last one goes on for ever."""

    seed: int
    phases: tuple[tuple[int, float], ...]

    def prompt_ids(self) -> list[int]:
        """The prompt that asks for it."""
        body = json.dumps({"seed": self.seed, "phases": [list(phase) for phase in self.phases]})
        return [*body.encode("ascii"), _MARK]

    def acceptance(self, num_tokens: int) -> npt.NDArray[np.float64]:
        """The chance of a right draft at each of the first positions."""
        chances = np.full(num_tokens, acceptance_for_length(self.phases[-1][1], SEED_K))
        begin = 0
        for tokens, length in self.phases:
            chances[begin : begin + tokens] = acceptance_for_length(length, SEED_K)
            begin += tokens
        return chances


class ScriptedText:
    """The answer to one script.

    Attributes:
        prompt_len: tokens of the prompt.
    """

    def __init__(self, script: AnswerScript) -> None:
        self.prompt_len = len(script.prompt_ids())
        rng = np.random.default_rng((script.seed, 1))
        self._ids: list[int] = rng.choice(_ALPHABET, _NUM_TOKENS).tolist()
        hits = np.random.default_rng((script.seed, 2)).random(_NUM_TOKENS) < script.acceptance(_NUM_TOKENS)
        self._is_right: list[bool] = hits.tolist()

    def answer(self, num_tokens: int) -> list[int]:
        """The first ids of the answer."""
        return self._ids[:num_tokens]

    def id_at(self, position: int) -> int:
        """The target's id at a position of prompt + answer, whatever stands before it."""
        return self._ids[position - self.prompt_len]

    def drafts(self, base_len: int, num_draft_tokens: int) -> tuple[int, ...]:
        """What the drafter proposes after ``base_len`` ids of prompt + answer."""
        first = base_len - self.prompt_len
        right = self._ids[first : first + num_draft_tokens]
        hits = self._is_right[first : first + num_draft_tokens]
        return tuple(token if hit else token ^ 1 for token, hit in zip(right, hits, strict=True))

    def num_true(self, ids: Sequence[int], *, since: int) -> int:
        """How many leading ``ids`` are prompt and true answer, of which the first ``since`` are known to be."""
        end = max(since, self.prompt_len)
        while end < len(ids) and ids[end] == self._ids[end - self.prompt_len]:
            end += 1
        return end


def text_of_prompt(ids: Sequence[int]) -> ScriptedText:
    """The text that a prompt, with or without a part of its answer behind it, asks for.

    Raises:
        ValueError: the ids don't begin with a script.
    """
    head = bytes(ids[: ids.index(_MARK)])
    return _text(head)


@functools.lru_cache(maxsize=64)
def _text(head: bytes) -> ScriptedText:
    fields = json.loads(head)
    phases = tuple((int(tokens), float(length)) for tokens, length in fields["phases"])
    return ScriptedText(AnswerScript(seed=fields["seed"], phases=phases))
