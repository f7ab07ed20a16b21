"""Which text the engine writes next: prompts, their follow-up turns, and questions the target asks itself."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.eagle.chat import IM_START, Tokenizer, opening, user_turn
from tools.eagle.corpus import Conversation
from tools.eagle.engine import Finished, Request
from tools.eagle.prompts import Prompt, ngrams
from tools.eagle.templates import FOLLOW_UPS, SYSTEM_PROMPTS

__all__ = ["Limits", "Talks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Lengths in tokens."""

    max_new: int = 512
    max_question: int = 160
    max_len: int = 1_024


@dataclass(slots=True)
class _Talk:
    conversation: Conversation
    turns: deque[str]
    greedy: bool
    asks_itself: bool = False


@dataclass(slots=True)
class Talks:
    """All conversations in flight; hands out requests and takes back what was written.

    Args:
        prompts: Read in order, each once greedy and once sampled.
        tokenizer: The target's.
        limits: Lengths.
        self_share: Share of sampled slots' new conversations whose question the target writes itself.
        guarded: 12-grams of held-out prompts; a self-written question with one of them is thrown away.
        temperature: For sampled answers.
        seed: Of every choice made here.
    """

    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    limits: Limits = field(default_factory=Limits)
    self_share: float = 0.0
    guarded: frozenset[int] = frozenset()
    temperature: float = 0.8
    seed: int = 0
    num_answer_tokens: int = 0
    num_refused_questions: int = 0
    _queues: dict[bool, deque[_Talk]] = field(default_factory=lambda: {True: deque(), False: deque()})
    _cursors: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _flying: dict[int, _Talk] = field(default_factory=dict)
    _next_key: int = 1

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311
        # All at once beforehand: encoding one by one while slots wait cost as much as the decoding.
        openings = [opening(prompt.system) + user_turn(prompt.turns[0]) for prompt in self.prompts]
        self._encoded = self.tokenizer.encode_many(openings)
        self._system_ids = {
            system: self.tokenizer.encode(f"{opening(system)}{IM_START}user\n") for system in (None, *SYSTEM_PROMPTS)
        }
        self._answer_ids = self.tokenizer.encode(f"\n{IM_START}assistant\n")

    _random: random.Random = field(init=False)
    _encoded: list[list[int]] = field(init=False)
    _system_ids: dict[str | None, list[int]] = field(init=False)
    _answer_ids: list[int] = field(init=False)

    def take(self, greedy: bool) -> Request | None:
        """The next request for a greedy or a sampled slot."""
        if not greedy and self._random.random() < self.self_share:
            return self._ask_itself()
        queue = self._queues[greedy]
        if queue and (self._random.random() < 0.5 or self._cursors[greedy] >= len(self.prompts)):
            return self._request(queue.popleft())
        if self._cursors[greedy] < len(self.prompts):
            index = self._cursors[greedy]
            self._cursors[greedy] += 1
            return self._start(self.prompts[index], self._encoded[index], greedy)
        return self._ask_itself() if not greedy and self.self_share else None

    def _start(self, prompt: Prompt, ids: list[int], greedy: bool) -> Request | None:
        conversation = Conversation(
            prompt_id=prompt.prompt_id, source=prompt.source, split=prompt.split, ids=ids,
            temperature=0.0 if greedy else self.temperature,
            seed=0 if greedy else int(prompt.prompt_id, 16) % 2**31,
        )  # fmt: skip
        return self._request(_Talk(conversation, deque(prompt.turns[1:]), greedy))

    def _ask_itself(self) -> Request:
        system = self._random.choice(SYSTEM_PROMPTS) if self._random.random() < 0.15 else None
        ids = self._system_ids[system]
        greedy = self._random.random() < 0.5
        turns = deque([self._random.choice(FOLLOW_UPS)] if self._random.random() < 0.15 else [])
        conversation = Conversation(
            prompt_id=f"self-{self._next_key}", source="self", split="train", ids=ids,
            temperature=0.0 if greedy else self.temperature,
        )  # fmt: skip
        talk = _Talk(conversation, turns, greedy, asks_itself=True)
        self._next_key += 1
        self._flying[self._next_key] = talk
        return Request(key=self._next_key, ids=ids, max_new=self.limits.max_question, temperature=0.9)

    def _request(self, talk: _Talk) -> Request | None:
        conversation = talk.conversation
        room = self.limits.max_len - len(conversation.ids)
        if room < 16:
            return None
        self._next_key += 1
        self._flying[self._next_key] = talk
        return Request(
            key=self._next_key, ids=conversation.ids, max_new=min(self.limits.max_new, room),
            temperature=conversation.temperature, seed=conversation.seed,
        )  # fmt: skip

    def give(self, finished: Finished) -> Conversation | None:
        """Takes back a written text; returns the conversation if that was its last answer."""
        talk = self._flying.pop(finished.request.key)
        conversation = talk.conversation
        ended = bool(finished.new_ids) and finished.new_ids[-1] == self.tokenizer.end_id
        if talk.asks_itself:
            self._answer_itself(talk, finished.new_ids, ended)
            return None
        start = len(conversation.ids)
        conversation.ids = conversation.ids + finished.new_ids
        conversation.spans.append((start, len(conversation.ids)))
        self.num_answer_tokens += len(finished.new_ids)
        if talk.turns and ended:
            following = conversation.ids + self.tokenizer.encode("\n" + user_turn(talk.turns.popleft()))
            if len(following) <= self.limits.max_len - 64:
                conversation.ids = following
                self._queues[talk.greedy].append(talk)
                return None
        return conversation

    def _answer_itself(self, talk: _Talk, question: list[int], ended: bool) -> None:
        text = self.tokenizer.decode(question)
        if not ended or len(text.split()) < 3 or ngrams(text) & self.guarded:
            self.num_refused_questions += 1
            return
        talk.asks_itself = False
        talk.conversation.ids = talk.conversation.ids + question + self._answer_ids
        self._queues[talk.greedy].append(talk)
