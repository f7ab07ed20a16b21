"""Passes of the toy model in the shape SGLang runs them, under the plugin's own hooks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.verifier.sglang import toy_model
from verifier.sglang.plugin.draws import TargetDraws
from verifier.sglang.plugin.orders import ORDER_NAME, DrawOrder, custom_params


class ToyRequest:
    """SGLang's Req, as far as the plugin looks at it."""

    def __init__(self, rid: str, input_ids: list[int], params: Any = None) -> None:
        self.rid = rid
        self.origin_input_ids = array("q", input_ids)
        self.output_ids = array("q")
        self.sampling_params = SimpleNamespace(custom_params=params)


def ordered(rid: str, input_ids: list[int], order: DrawOrder) -> ToyRequest:
    return ToyRequest(rid, input_ids, custom_params(order))


@dataclass
class Made:
    """A pass's reply: output ids and logprobs by row, the plugin's entries by rid."""

    ids: list[int]
    logprobs: list[float]
    entries: dict[str, Any] = field(default_factory=dict)


class ToyPasses:
    """Runs passes. ``logprob_chunk``: rows whose logits are computed at once. ``delays``: sampling is put off."""

    def __init__(self, draws: TargetDraws, *, logprob_chunk: int = 1 << 20, delays: bool = False) -> None:
        self.draws, self.logprob_chunk, self.delays = draws, logprob_chunk, delays

    def extend(self, *parts: tuple[ToyRequest, int, int, int]) -> Made:
        """Each part: request, first and one-past-last computed position, first position whose logits are wanted."""
        batch = SimpleNamespace(
            reqs=[request for request, *_ in parts],
            forward_mode=mode("extend"),
            prefix_lens=[start for _, start, _, _ in parts],
            extend_lens=[stop - start for _, start, stop, _ in parts],
        )

        def model(output: Any) -> None:
            rows, sequences = [], []
            for index, (request, start, stop, logits_from) in enumerate(parts):
                for position in range(min(max(start, logits_from), stop - 1), stop):
                    rows.append(toy_model.logits(list(request.origin_input_ids[: position + 1])))
                    sequences.append(index)
            states = torch.from_numpy(np.stack(rows))
            kept = []

            def original(processor: Any, pruned: Any, _a: Any, _b: Any, _c: Any, _d: Any, get: Any, meta: Any) -> None:
                for at in range(0, len(pruned), self.logprob_chunk):
                    kept.append(get(pruned[at : at + self.logprob_chunk], None, meta, use_logits_buffer=False).clone())

            self.draws.around_input_logprobs(
                original, None, states, None, None, sequences, None, lambda states, *a, **k: states, None
            )
            last = [len(sequences) - 1 - sequences[::-1].index(i) for i in range(len(parts))]
            output.next_token_logits = torch.cat(kept)[last]

        return self._run(batch, model, torch.zeros(sum(batch.extend_lens), dtype=torch.int64))

    def decode(self, *requests: ToyRequest, newest_is_known: bool = True) -> Made:
        """One more token each. The newest id may be on the device only, as under the overlap scheduler."""
        ids = [[*request.origin_input_ids, *request.output_ids] for request in requests]
        batch = SimpleNamespace(
            reqs=list(requests), forward_mode=mode("decode"), seq_lens_cpu=torch.tensor([len(i) for i in ids])
        )
        newest = torch.tensor([i[-1] for i in ids])
        hidden = [] if newest_is_known else [request.output_ids.pop() for request in requests]

        def model(output: Any) -> None:
            output.next_token_logits = torch.from_numpy(np.stack([toy_model.logits(i) for i in ids]))

        made = self._run(batch, model, newest)
        for request, token_id in zip(requests, hidden, strict=False):
            request.output_ids.append(token_id)
        return made

    def _run(self, batch: Any, model: Any, input_ids: torch.Tensor) -> Made:
        output = SimpleNamespace(next_token_logits=None, next_token_logprobs=None, customized_info=None)
        forward = SimpleNamespace(
            rids=[request.rid for request in batch.reqs], forward_mode=batch.forward_mode, input_ids=input_ids
        )
        found: list[torch.Tensor] = []

        def sampler(runner: Any, output: Any, forward_batch: Any) -> torch.Tensor:
            logprobs = output.next_token_logits.log_softmax(-1)
            output.next_token_logits[:] = logprobs.exp()  # as SGLang does: its input is gone afterwards
            ids = logprobs.argmax(-1).to(torch.int32)
            output.next_token_logprobs = logprobs.gather(1, ids[:, None].long())[:, 0].clone()
            return ids

        def sample() -> None:
            found.append(self.draws.around_sample(sampler, None, output, forward))

        def original(worker: Any, batch: Any) -> Any:
            model(output)
            if not self.delays:
                sample()
            return SimpleNamespace(logits_output=output)

        self.draws.around_forward(original, None, batch)
        if self.delays:
            sample()
        entries = (output.customized_info or {}).get(ORDER_NAME, [None] * len(batch.reqs))
        copied = [entry.copy() if hasattr(entry, "copy") else entry for entry in entries]
        (ids,) = found
        return Made(
            ids=ids.tolist(),
            logprobs=output.next_token_logprobs.tolist(),
            entries=dict(zip(forward.rids, copied, strict=True)),
        )


def mode(name: str) -> Any:
    return SimpleNamespace(is_extend=lambda: name == "extend", is_decode=lambda: name == "decode")
