"""Draws for the rows of one pass: what is asked, and the two ways to do it.

``DrawnByDefinition`` calls the embedded engine's own ``TokenSampler``, row by row in numpy: where logits lie in host
memory anyway. ``batched_draws`` does the same arithmetic for all rows at once on the GPU; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifier.embedded.sampling import TokenSampler
from wire.sampling import SamplingParams

__all__ = ["DrawnByDefinition", "RowDraws", "RowGroup", "RowState"]


@dataclass(slots=True, kw_only=True)
class RowState:
    """What is kept of one engine request between its passes.

    Fields:
        params, prompt_len: see DrawOrder.
        sampler: counts for penalties, made at the first draw. counts: the same on the GPU.
    """

    params: SamplingParams
    prompt_len: int
    sampler: TokenSampler | None = None
    counts: Any = None

    @property
    def has_penalties(self) -> bool:
        """The ids before a position matter, not only how many they are."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Consecutive rows of one request: row i draws the id at ``position`` + i.

    Fields:
        count: number of rows. known_ids: the ids before ``position``, as far as the host knows them; read only where
            there are penalties. drafts: [count - 1] ids that rows 1 .. count-1 follow.
        newest: 0-dim tensor, the id at ``position`` - 1 where the host does not know it yet.
    """

    state: RowState
    position: int
    count: int = 1
    known_ids: Sequence[int] = ()
    drafts: tuple[int, ...] = ()
    newest: Any = field(default=None)


class RowDraws(Protocol):
    """Draws ids for rows of logits."""

    def draw(self, rows: Any, groups: Sequence[RowGroup]) -> Any:
        """Ids of all rows.

        Args:
            rows: [R, V] float32 torch tensor of raw logits; borrowed, not changed.
            groups: their counts add up to R, in the order of the rows.

        Returns:
            [R] int64 torch tensor on the same device.
        """
        ...


class DrawnByDefinition:
    """RowDraws by the definition itself."""

    def draw(self, rows: Any, groups: Sequence[RowGroup]) -> Any:
        """See RowDraws."""
        import torch  # lazy: the plugin's modules load without torch

        values = rows.detach().float().cpu().numpy()
        drawn: list[int] = []
        at = 0
        for group in groups:
            state = group.state
            if state.sampler is None:
                state.sampler = TokenSampler(state.params, vocab_size=values.shape[1], prompt_len=state.prompt_len)
            before: Sequence[int] = range(group.position)
            if state.has_penalties:
                before = [*group.known_ids]
                if len(before) < group.position:
                    before = [*before, int(group.newest)]
            drawn += state.sampler.choose(values[at : at + group.count], before, group.drafts)
            at += group.count
        return torch.tensor(drawn, dtype=torch.int64, device=rows.device)
