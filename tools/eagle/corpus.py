"""Answered conversations as token ids: storage in shards, loop cutting, length-bucketed training batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LOOP_NGRAM, LOOP_REPEATS = 12, 3

__all__ = ["LOOP_NGRAM", "LOOP_REPEATS", "Conversation", "bucketed_batches", "cut_loop", "load_corpus", "save_corpus"]


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One finished conversation.

    Attributes:
        prompt_id, source, split: As in ``Prompt``; source ``self`` means the target wrote the question too.
        ids: All tokens, prompt and answers.
        spans: Answer tokens as (start, end) index pairs, the closing ``<|im_end|>`` included where there is one.
        temperature: 0 for greedy answers.
        seed: Key of the counter noise the answers were sampled with; 0 where they weren't.
    """

    prompt_id: str
    source: str
    split: str
    ids: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    temperature: float = 0.0
    seed: int = 0

    @property
    def num_answer_tokens(self) -> int:
        """Tokens the target wrote."""
        return sum(end - start for start, end in self.spans)

    def without_loops(self) -> Conversation:
        """Cut at the first answer that loops: at the end of the third repeat of a 12-gram."""
        for index, (start, end) in enumerate(self.spans):
            keep = cut_loop(self.ids[start:end])
            if keep < end - start:
                spans = [*self.spans[:index], (start, start + keep)]
                return Conversation(
                    prompt_id=self.prompt_id, source=self.source, split=self.split, ids=self.ids[: start + keep],
                    spans=spans, temperature=self.temperature, seed=self.seed,
                )  # fmt: skip
        return self


def cut_loop(ids: Sequence[int]) -> int:
    """Length to keep: up to and including the third occurrence of the first 12-gram that occurs three times."""
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    for end in range(LOOP_NGRAM, len(ids) + 1):
        gram = tuple(ids[end - LOOP_NGRAM : end])
        seen[gram] += 1
        if seen[gram] == LOOP_REPEATS:
            return end
    return len(ids)


def save_corpus(conversations: Sequence[Conversation], path: Path) -> None:
    """Writes one compressed shard; token ids must fit uint16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spans = [(row, start, end) for row, c in enumerate(conversations) for start, end in c.spans]
    np.savez_compressed(
        path,
        ids=np.concatenate([np.asarray(c.ids, dtype=np.uint16) for c in conversations]),
        lengths=np.asarray([len(c.ids) for c in conversations], dtype=np.int32),
        spans=np.asarray(spans, dtype=np.int32).reshape(-1, 3),
        temperature=np.asarray([c.temperature for c in conversations], dtype=np.float32),
        seed=np.asarray([c.seed for c in conversations], dtype=np.int64),
        prompt_id=np.asarray([c.prompt_id for c in conversations], dtype=np.str_),
        source=np.asarray([c.source for c in conversations], dtype=np.str_),
        split=np.asarray([c.split for c in conversations], dtype=np.str_),
    )


def load_corpus(paths: Iterable[Path], *, max_tokens: int | None = None) -> list[Conversation]:
    """Reads shards in order, stopping once ``max_tokens`` answer tokens are there."""
    conversations: list[Conversation] = []
    total = 0
    for path in paths:
        with np.load(path) as shard:
            ends = np.cumsum(shard["lengths"])
            flat, starts = shard["ids"].tolist(), ends - shard["lengths"]
            spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for row, start, end in shard["spans"].tolist():
                spans[row].append((start, end))
            columns = [shard[name].tolist() for name in ("prompt_id", "source", "split", "temperature", "seed")]
            bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        for row, ((start, end), values) in enumerate(zip(bounds, zip(*columns, strict=True), strict=True)):
            prompt_id, source, split, temperature, seed = values
            conversation = Conversation(
                prompt_id=prompt_id, source=source, split=split, ids=flat[start:end], spans=spans[row],
                temperature=round(temperature, 3), seed=seed,
            )  # fmt: skip
            conversations.append(conversation)
            total += conversation.num_answer_tokens
            if max_tokens is not None and total >= max_tokens:
                return conversations
    return conversations


def bucketed_batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """One epoch of batches of similar length, in random order, each at most ``batch_tokens`` padded tokens.

    Lengths get up to 8 % of noise before sorting, so that neighbours differ between epochs.

    Yields:
        Row indices of one batch.
    """
    generator = np.random.default_rng(seed)
    real = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(real * generator.uniform(1.0, 1.08, len(real)))
    batches: list[NDArray[np.int64]] = []
    begin, longest = 0, 0
    for at, row in enumerate(order.tolist()):
        longest = max(longest, int(real[row]))
        if at > begin and longest * (at + 1 - begin) > batch_tokens:
            batches.append(order[begin:at])
            begin, longest = at, int(real[row])
    if begin < len(order):
        batches.append(order[begin:])
    for index in generator.permutation(len(batches)).tolist():
        yield batches[index]
