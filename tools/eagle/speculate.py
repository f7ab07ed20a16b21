"""The plain reference of speculative decoding: draft, verify, commit, over a batch of rows, without any cache.

Every round runs both models over the whole committed text, so there is no cache to get wrong. Used to show that the
output equals plain decoding token for token and that ``tools.eagle.acceptance`` counts what a live loop accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tools.eagle.acceptance import argmax_choice, shared_noise_choice
from tools.eagle.head import EagleHead
from tools.eagle.noise import counter_gumbel
from tools.eagle.target import Target

__all__ = ["Spoken", "decode_plainly", "speculate"]


@dataclass(slots=True, kw_only=True)
class Spoken:
    """One row's answer and the rounds it took (the prefill's first token is no round)."""

    ids: list[int]
    num_rounds: int = 0
    num_accepted_tokens: int = 0


def _say(target: Target, final: Tensor, seeds: Tensor, temperature: float, positions: Tensor) -> Tensor:
    """The target's own token after each state: argmax, or its draw with counter noise. final [..., H] -> [...]."""
    logits = target.logits(final).float()
    if temperature == 0:
        return logits.argmax(-1)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    return (logits / temperature + counter_gumbel(seeds[..., None], positions[..., None], token_ids)).argmax(-1)


def _pad(rows: list[list[int]], device: torch.device) -> Tensor:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids.to(device)


@torch.no_grad()
def decode_plainly(
    target: Target, prompts: list[list[int]], max_new: int, end_id: int, *, temperature: float = 0.0,
    seeds: list[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Plain decoding by recomputing the whole text for every token."""
    texts, open_rows = [list(p) for p in prompts], set(range(len(prompts)))
    while open_rows:
        rows = sorted(open_rows)
        _, final = target.forward(_pad([texts[row] for row in rows], target.device))
        lengths = torch.tensor([len(texts[row]) for row in rows], device=target.device)
        last = final[torch.arange(len(rows), device=target.device), lengths - 1]
        row_seeds = torch.tensor([(seeds or [0] * len(prompts))[row] for row in rows], device=target.device)
        for row, token in zip(rows, _say(target, last, row_seeds, temperature, lengths).tolist(), strict=True):
            texts[row].append(token)
            if token == end_id or len(texts[row]) - len(prompts[row]) >= max_new:
                open_rows.remove(row)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@torch.no_grad()
def speculate(
    target: Target, head: EagleHead, prompts: list[list[int]], max_new: int, end_id: int, num_draft_tokens: int, *,
    temperature: float = 0.0, seeds: list[int] | None = None, shared_noise: bool = False,
) -> list[Spoken]:  # fmt: skip
    """Speculative decoding by sample matching: accept drafts while they equal what the target itself says.

    Args:
        target, head: The models; both should be float32 where token identity matters.
        prompts: Token ids of each row.
        max_new: Tokens to write per row.
        end_id: Ends a row.
        num_draft_tokens: K.
        temperature: 0 for argmax; else the target draws with counter noise keyed by ``seeds``.
        shared_noise: Draft with the same noise.
    """
    device, count = target.device, len(prompts)
    all_seeds = torch.tensor(seeds or [0] * count, device=device)
    spoken = [
        Spoken(ids=first) for first in decode_plainly(target, prompts, 1, end_id, temperature=temperature, seeds=seeds)
    ]
    rows = [row for row in range(count) if spoken[row].ids[-1] != end_id and max_new > 1]
    aux = target.forward(_pad([prompts[row] + spoken[row].ids for row in rows], device))[0] if rows else None
    while rows:
        assert aux is not None
        texts = [prompts[row] + spoken[row].ids for row in rows]
        ids, row_seeds = _pad(texts, device), all_seeds[rows]
        # The last token's feature is not known yet and no slot asks for it: a column of zeros stands in its place.
        aux = F.pad(aux, (0, 0, 0, 1))[:, : ids.shape[1]]
        choose = shared_noise_choice(head, row_seeds, temperature) if shared_noise else argmax_choice(head)
        drafts = head.unroll(aux, ids, num_draft_tokens, choose)
        slots = torch.tensor([len(text) - 2 for text in texts], device=device)
        index = torch.arange(len(rows), device=device)
        chains = torch.stack([draft[index, slots] for draft in drafts], dim=1).tolist()  # [rows, K]
        verify = [text + chain for text, chain in zip(texts, chains, strict=True)]
        aux, final = target.forward(_pad(verify, device))
        positions = slots[:, None] + 2 + torch.arange(num_draft_tokens + 1, device=device)
        says = _say(target, final[index[:, None], positions - 1], row_seeds[:, None], temperature, positions).tolist()
        for row, chain, said in zip(rows, chains, says, strict=True):
            _commit(spoken[row], chain, said, max_new, end_id)
        going_on = [spoken[row].ids[-1] != end_id and len(spoken[row].ids) < max_new for row in rows]
        aux = aux[torch.tensor(going_on, device=device)]
        rows = [row for row, goes_on in zip(rows, going_on, strict=True) if goes_on]
    return spoken


def _commit(spoken: Spoken, chain: list[int], said: list[int], max_new: int, end_id: int) -> None:
    accepted = 0
    while accepted < len(chain) and chain[accepted] == said[accepted]:
        accepted += 1
    spoken.num_rounds += 1
    for number, token in enumerate(said[: accepted + 1]):
        spoken.ids.append(token)
        spoken.num_accepted_tokens += number < accepted
        if token == end_id or len(spoken.ids) >= max_new:
            return
