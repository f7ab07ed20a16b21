"""The target's ids of one round, position by position, from lists that may have to be widened on the way."""

from __future__ import annotations

from typing import Protocol

from verifier.sglang.indexing import TopList
from verifier.sglang.sampling import Chosen, choose
from wire.messages import PositionLogprobs, TopLogprob
from wire.sampling import SamplingParams

__all__ = ["DrawnRound", "RoundChooser", "RoundIds", "position_logprobs"]


class RoundIds(Protocol):
    """The target's ids of one round."""

    @property
    def target_ids(self) -> tuple[int, ...]:
        """[K+1] ids."""
        ...

    def logprobs(self, num_top: int) -> tuple[PositionLogprobs, ...]:
        """[K+1] entries with the ``num_top`` most likely ids each."""
        ...


class DrawnRound:
    """The ids the plugin drew.

    Args:
        target_ids, own: [K+1] ids and their log-probabilities; own is empty if none were ordered.
        lists: [K+1] most likely ids, empty lists if none were asked for.
    """

    def __init__(self, target_ids: tuple[int, ...], own: tuple[float, ...], lists: list[TopList]) -> None:
        self.target_ids = target_ids
        self._own, self._lists = own, lists

    def logprobs(self, num_top: int) -> tuple[PositionLogprobs, ...]:
        """See RoundIds."""
        return tuple(
            position_logprobs(token_id, listed, num_top, own)
            for token_id, own, listed in zip(self.target_ids, self._own, self._lists, strict=True)
        )


class RoundChooser:
    """Chooses until the first position whose id is not the draft; later ones can never be accepted.

    Args:
        lists: [K+1] most likely ids. num_listed: N asked for. base_len, draft_ids: of the round.
    """

    def __init__(
        self,
        lists: list[TopList],
        params: SamplingParams,
        *,
        base_len: int,
        draft_ids: tuple[int, ...],
        vocab_size: int,
        num_listed: int,
    ) -> None:
        self.draft_ids = draft_ids
        self._lists = lists
        self._params = params
        self._base_len = base_len
        self._vocab_size = vocab_size
        self._num_listed = num_listed
        self._chosen: list[int] = []

    def advance(self, whole_row: TopList | None = None) -> int | None:
        """Choose on. ``whole_row``: the answer to the index returned before.

        Returns:
            None when done, or the index 0 .. K of the position whose whole row is needed.
        """
        if whole_row is not None:
            self._lists[len(self._chosen)] = whole_row
        while len(self._chosen) <= len(self.draft_ids):
            index = len(self._chosen)
            choice = choose(
                self._lists[index],
                self._params,
                position=self._base_len + index,
                vocab_size=self._vocab_size,
                num_listed=self._num_listed,
                is_whole=whole_row is not None,
            )
            if not isinstance(choice, Chosen):
                return index
            whole_row = None
            self._chosen.append(choice.token_id)
            if index < len(self.draft_ids) and choice.token_id != self.draft_ids[index]:
                break
        return None

    @property
    def target_ids(self) -> tuple[int, ...]:
        """[K+1] ids; those after the first that differs from its draft only fill up."""
        return padded(self._chosen, len(self.draft_ids) + 1)

    def logprobs(self, num_top: int) -> tuple[PositionLogprobs, ...]:
        """[K+1] entries; those after the first that differs only fill up."""
        entries = [
            position_logprobs(token_id, self._lists[index], num_top) for index, token_id in enumerate(self._chosen)
        ]
        return tuple(entries + [entries[-1]] * (len(self.draft_ids) + 1 - len(entries)))


def padded(ids: list[int], length: int) -> tuple[int, ...]:
    """``ids`` followed by its last id up to ``length``."""
    return tuple(ids + [ids[-1]] * (length - len(ids)))


def position_logprobs(token_id: int, listed: TopList, num_top: int, own: float | None = None) -> PositionLogprobs:
    """The record of one position; ``own`` is the id's log-probability where it may be missing in the list."""
    if own is None:
        own = next((logprob for listed_id, logprob in listed if listed_id == token_id), float("-inf"))
    return PositionLogprobs(
        token_id=token_id, logprob=own, top=tuple(TopLogprob(i, logprob) for i, logprob in listed[:num_top])
    )
