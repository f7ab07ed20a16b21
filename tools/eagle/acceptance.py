"""How many drafts the target would accept, measured by real chain drafting over texts the target wrote.

Verification is lossless, so a speculative run writes exactly the text the target writes alone. From that text the run
can be replayed: at every slot the head drafts a chain from true features and its OWN tokens (``EagleHead.unroll`` with
``choose``), the chain is compared with what the target wrote, and the rounds are walked from the first answer token.
The numbers equal those of a live loop (``tools.eagle.speculate``; a test compares them) at a thousandth of the cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.eagle.corpus import Conversation, bucketed_batches
from tools.eagle.head import Choose, EagleHead
from tools.eagle.noise import counter_gumbel
from tools.eagle.target import Target

__all__ = ["Tally", "accepted_per_slot", "argmax_choice", "measure", "shared_noise_choice", "walk"]


@dataclass(slots=True)
class Tally:
    """Sums over rounds; ratios are left to the reader.

    Attributes:
        num_rounds: Draft-verify rounds.
        num_committed_tokens: Accepted drafts plus the recovered or bonus token, cut at the end of the text.
    """

    num_rounds: int = 0
    num_committed_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens a round, the bonus token included."""
        return self.num_committed_tokens / max(1, self.num_rounds)


def argmax_choice(head: EagleHead) -> Choose:
    """Drafts the head's most likely token."""
    return lambda logits, _step: head.draft_ids[logits.argmax(-1)]


def shared_noise_choice(head: EagleHead, seeds: Tensor, temperature: float) -> Choose:
    """Drafts with the noise the target will sample with. seeds [B] int64."""

    def choose(logits: Tensor, step: int) -> Tensor:
        picks = []
        for slot in range(0, logits.shape[1], 64):  # the noise is [B, 64, K] int64 at a time
            part = logits[:, slot : slot + 64].float()
            positions = torch.arange(slot, slot + part.shape[1], device=logits.device) + 2 + step
            noise = counter_gumbel(seeds[:, None, None], positions[None, :, None], head.draft_ids)
            picks.append((part / temperature + noise).argmax(-1))
        return head.draft_ids[torch.cat(picks, dim=1)]

    return choose


@torch.no_grad()
def accepted_per_slot(head: EagleHead, aux: Tensor, ids: Tensor, num_steps: int, choose: Choose) -> Tensor:
    """[B, T] drafts of a ``num_steps`` chain from each slot that match the text ``ids`` [B, T]."""
    drafts = head.unroll(aux, ids, num_steps, choose)
    matches = []
    for step, draft in enumerate(drafts):
        true = torch.full_like(ids, -1)
        true[:, : -2 - step or None] = ids[:, 2 + step :]
        matches.append(draft == true)
    return torch.stack(matches).long().cumprod(0).sum(0)


def walk(accepted: NDArray[np.int64], start: int, end: int, num_draft_tokens: int) -> Tally:
    """Replays the rounds of one answer ``[start, end)``; its first token comes from the prefill."""
    tally, last = Tally(), start
    while last < end - 1:
        committed = min(int(accepted[last - 1]), num_draft_tokens) + 1
        committed = min(committed, end - 1 - last)
        last += committed
        tally.num_rounds += 1
        tally.num_committed_tokens += committed
    return tally


@torch.no_grad()
def measure(
    target: Target, head: EagleHead, conversations: Sequence[Conversation], *, max_draft_tokens: int,
    shared_noise: bool = False, batch_tokens: int = 16_384,
) -> dict[str, dict[int, Tally]]:  # fmt: skip
    """Acceptance by source (and ``split:NAME`` sums) for every number of draft tokens up to ``max_draft_tokens``."""
    tallies: dict[str, dict[int, Tally]] = defaultdict(lambda: defaultdict(Tally))
    for index in bucketed_batches([len(c.ids) for c in conversations], batch_tokens, seed=0):
        batch = [conversations[i] for i in index.tolist()]
        ids = torch.zeros(len(batch), max(len(c.ids) for c in batch), dtype=torch.int64)
        for row, conversation in enumerate(batch):
            ids[row, : len(conversation.ids)] = torch.tensor(conversation.ids)
        ids = ids.to(target.device)
        choose = argmax_choice(head)
        if shared_noise:
            seeds = torch.tensor([c.seed for c in batch], device=target.device)
            choose = shared_noise_choice(head, seeds, batch[0].temperature)
        aux = target.forward(ids)[0].to(head.fc.weight.dtype)
        accepted = accepted_per_slot(head, aux, ids, max_draft_tokens, choose).cpu().numpy()
        for row, conversation in enumerate(batch):
            for (start, end), count in ((s, k) for s in conversation.spans for k in range(1, max_draft_tokens + 1)):
                one = walk(accepted[row], start, end, count)
                for name in (conversation.source, f"split:{conversation.split}"):
                    tallies[name][count].num_rounds += one.num_rounds
                    tallies[name][count].num_committed_tokens += one.num_committed_tokens
    return {name: dict(by_count) for name, by_count in tallies.items()}
