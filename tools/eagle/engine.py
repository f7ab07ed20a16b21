"""Continuous batching over a fixed number of slots: the sampler that writes the training data.

Slots are split once into greedy, sampled and nucleus-sampled ranges, so the whole step (decode, sample, bookkeeping)
has fixed shapes and is replayed as one CUDA graph. Every ``sync_every`` steps finished rows are handed back and slots
refilled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.eagle.corpus import LOOP_NGRAM, LOOP_REPEATS
from tools.eagle.noise import counter_gumbel
from tools.eagle.target import KVCache, Target

PREFILL_TOKENS = 32_768  # padded prompt tokens of one prefill pass
NUCLEUS_CANDIDATES = 256  # nucleus sampling looks at this many best tokens only

__all__ = ["Engine", "Finished", "Request", "SlotPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """How many slots each way of sampling gets; they lie in this order."""

    greedy: int
    sampled: int
    nucleus: int = 0
    top_p: float = 0.95

    @property
    def total(self) -> int:
        """All slots."""
        return self.greedy + self.sampled + self.nucleus


@dataclass(slots=True, kw_only=True)
class Request:
    """One text to continue.

    Attributes:
        key: The caller's name for it.
        ids: Prompt, at least one token.
        max_new: Most tokens to write.
        temperature: For sampled slots; greedy slots ignore it.
        seed: Key of the counter noise, used only by an engine that samples with it.
    """

    key: int
    ids: list[int]
    max_new: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Finished:
    """A request and what was written for it (the end token included where it came)."""

    request: Request
    new_ids: list[int]


class Engine:
    """Generates for a stream of requests.

    Args:
        target: The model.
        plan: Slots by way of sampling.
        max_len: Room per slot, prompt and answer.
        end_id: Token that ends an answer.
        stop_loops: End a row at the third occurrence of its last 12 tokens.
        shared_noise: Sample with counter noise (slower, reproducible) instead of the device's generator.
        sync_every: Steps between looks at the finished rows.
    """

    def __init__(
        self, target: Target, plan: SlotPlan, *, max_len: int, end_id: int, stop_loops: bool = True,
        shared_noise: bool = False, sync_every: int = 24,
    ) -> None:  # fmt: skip
        self.target, self.plan, self.max_len, self.end_id = target, plan, max_len, end_id
        self.stop_loops, self.shared_noise, self.sync_every = stop_loops, shared_noise, sync_every
        device, slots = target.device, plan.total
        self.cache = KVCache.empty(target.config, slots, max_len, target.embed)
        self.history = torch.zeros(slots, max_len, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)  # index of the last known token
        self.begins = torch.zeros(slots, dtype=torch.int64, device=device)  # index of the first answer token
        self.limits = torch.zeros(slots, dtype=torch.int64, device=device)  # index of the last allowed token
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.temperatures = torch.ones(slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.requests: list[Request | None] = [None] * slots
        self._graph: torch.cuda.CUDAGraph | None = None

    # -- one step, fixed shapes ------------------------------------------------------------------------------------
    def _sample(self, logits: Tensor) -> Tensor:  # [B, V] -> [B]
        greedy, sampled = self.plan.greedy, self.plan.greedy + self.plan.sampled
        picks = [logits[:greedy].argmax(-1)]
        if self.plan.sampled:
            scaled = logits[greedy:sampled].float() / self.temperatures[greedy:sampled, None]
            picks.append((scaled + self._gumbel(scaled, slice(greedy, sampled))).argmax(-1))
        if self.plan.nucleus:
            scaled = logits[sampled:].float() / self.temperatures[sampled:, None]
            best, ids = scaled.softmax(-1).topk(min(NUCLEUS_CANDIDATES, scaled.shape[-1]), dim=-1)
            outside = best.cumsum(-1) - best >= self.plan.top_p  # the token that crosses top_p still belongs
            noisy = best.log().masked_fill(outside, float("-inf")) + self._gumbel(best, None)
            picks.append(ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0])
        return torch.cat(picks)

    def _gumbel(self, like: Tensor, slots: slice | None) -> Tensor:
        if self.shared_noise and slots is not None:
            token_ids = torch.arange(like.shape[1], device=like.device)
            return counter_gumbel(self.seeds[slots, None], self.positions[slots, None] + 1, token_ids)
        return -torch.empty_like(like).exponential_().log()

    def _step(self) -> None:
        tokens = self.history.gather(1, self.positions[:, None])[:, 0]
        new = self._sample(self.target.logits(self.target.decode(tokens, self.positions, self.cache)))
        active = ~self.done
        following = self.positions + active.long()  # rows that are done write their old token again
        self.history.scatter_(1, following[:, None], torch.where(active, new, tokens)[:, None])
        self.positions.copy_(following)
        self.done |= (active & (new == self.end_id)) | (following >= self.limits)

    def _run_steps(self) -> None:
        if self.target.device.type == "cuda" and self._graph is None:
            self._step()  # warm-up: library handles and the Triton kernel must exist before capture
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        for _ in range(self.sync_every):
            self._graph.replay() if self._graph is not None else self._step()
        if self.stop_loops:
            self.done |= self._looping()

    def _looping(self) -> Tensor:
        """Rows whose last 12 answer tokens occur three times in the answer so far. [B] bool."""
        if self.max_len < LOOP_NGRAM:
            return torch.zeros_like(self.done)
        back = torch.arange(LOOP_NGRAM - 1, -1, -1, device=self.done.device)
        last = self.history.gather(1, (self.positions[:, None] - back).clamp(min=0))  # [B, 12]
        starts = torch.arange(self.max_len - LOOP_NGRAM + 1, device=self.done.device)
        inside = (starts >= self.begins[:, None]) & (starts + LOOP_NGRAM - 1 <= self.positions[:, None])
        for offset in range(LOOP_NGRAM):
            inside &= self.history[:, offset : offset + len(starts)] == last[:, offset, None]
        return inside.sum(1) >= LOOP_REPEATS

    # -- slots -----------------------------------------------------------------------------------------------------
    def _fill(self, placed: list[tuple[int, Request]]) -> None:
        """Puts requests into slots and writes the keys and values of all prompt tokens but the last."""
        device = self.target.device
        placed = sorted(placed, key=lambda item: len(item[1].ids))
        while placed:
            count = 1
            while count < min(len(placed), 256) and (count + 1) * len(placed[count][1].ids) <= PREFILL_TOKENS:
                count += 1
            chunk, placed = placed[:count], placed[count:]
            longest = len(chunk[-1][1].ids)
            padded = torch.zeros(len(chunk), longest, dtype=torch.int64)
            for row, (_, request) in enumerate(chunk):
                padded[row, : len(request.ids)] = torch.tensor(request.ids)
            slots = torch.tensor([slot for slot, _ in chunk], device=device)
            lengths = torch.tensor([len(request.ids) for _, request in chunk])
            room = torch.tensor([request.max_new for _, request in chunk])
            ids = padded.to(device)
            self.target.forward(ids, self.cache, slots)
            self.history[slots, :longest] = ids
            self.positions[slots] = (lengths - 1).to(device)
            self.begins[slots] = lengths.to(device)
            self.limits[slots] = (lengths - 1 + room).clamp(max=self.max_len - 1).to(device)
            temperatures = torch.tensor([request.temperature or 1.0 for _, request in chunk])
            self.temperatures[slots] = temperatures.to(device)
            self.seeds[slots] = torch.tensor([request.seed for _, request in chunk], device=device)
            self.done[slots] = False

    def _collect(self) -> list[Finished]:
        done = self.done.tolist()
        slots = [slot for slot, is_done in enumerate(done) if is_done and self.requests[slot] is not None]
        if not slots:
            return []
        index = torch.tensor(slots, device=self.target.device)
        rows, lasts = self.history[index].cpu(), self.positions[index].tolist()
        finished = []
        for row, slot, last in zip(rows, slots, lasts, strict=True):
            request = self.requests[slot]
            assert request is not None
            self.requests[slot] = None
            finished.append(Finished(request=request, new_ids=row[len(request.ids) : last + 1].tolist()))
        return finished

    @torch.no_grad()
    def run(
        self, take: Callable[[bool], Request | None], keep_going: Callable[[], bool] = lambda: True
    ) -> Iterator[list[Finished]]:
        """Generates until nothing is left, or until ``keep_going`` says no (unfinished rows are then dropped).

        Args:
            take: Next request for a greedy (True) or sampled (False) slot, None if there is none now.
            keep_going: Asked once every ``sync_every`` steps.

        Yields:
            The requests that ended since the last time.
        """
        pending: list[Finished] = []
        while keep_going():
            placed = []
            for slot, holder in enumerate(self.requests):
                if holder is None and (request := take(slot < self.plan.greedy)) is not None:
                    placed.append((slot, request))
                    self.requests[slot] = request
            if placed:
                self._fill(placed)
            if all(holder is None for holder in self.requests):
                if not pending:
                    return
            else:
                self._run_steps()
            # The steps are only queued on the device so far: the caller works on the last batch while they run.
            yield pending
            pending = self._collect()
