"""The target's ids, drawn inside the engine: at every draft position of a verify, and for every output token.

Three hooks: around a pass (which requests it holds, and what goes back), around the logits of input positions (rows of
drafts), and around the sampler (the row of the output token, in verify, prompt and plain decode alike). All ranks draw
the same output ids from the same logits; the first rank's answer is the one that is sent.

Nothing here may fail a pass: an error is logged and ends the capability. The gateway does not mistake that for draws,
for each output token that was drawn carries a mark in the reply.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from verifier.sglang.plugin.orders import ORDER_NAME, Drawn, DrawOrder, PluginReport, read_order
from verifier.sglang.plugin.row_draws import DrawnByDefinition, RowDraws, RowGroup, RowState

__all__ = ["TargetDraws"]

log = logging.getLogger("breakeven.plugin")

# The mark of an output token that was drawn, in a pass with nothing else to say.
_DRAWN = 1


@dataclass(slots=True, kw_only=True, eq=False)
class _Ordered:
    """One request with an order. ``order`` None: it has none, which is remembered too."""

    order: DrawOrder | None
    state: RowState | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """One request's part of a pass.

    Fields:
        end: position after its last input of this pass. last_drawn: its output token was drawn by us.
        drafts: what was drawn at draft positions: (position of the first, ids, logprobs) on the device.
        is_expanded: the pass ran as decode rows.
    """

    row: int
    rid: str
    request: Any
    ordered: _Ordered
    end: int
    last_drawn: bool = False
    drafts: tuple[int, Any, Any] | None = None
    is_expanded: bool = False

    @property
    def draws_output(self) -> bool:
        """Its output token counts: the middle chunks of a long prompt make one too."""
        order = self.ordered.order
        return order is not None and self.end >= order.base_len

    def ids(self, start: int, stop: int) -> list[int]:
        """The ids of positions ``start`` .. ``stop`` - 1, as far as the host knows them."""
        inputs, outputs = self.request.origin_input_ids, self.request.output_ids
        since = len(inputs)
        return [*inputs[start:stop], *outputs[max(0, start - since) : max(0, stop - since)]]


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Output tokens drawn: whose, their rows in the engine's tensors, raw logits [R, V], ids [R]."""

    turns: list[_Turn]
    index: list[int]
    rows: Any
    ids: Any


class _Answer:
    """What is said of one request's pass, looked at when SGLang processes it: it copies each entry then.

    By then ids have come from the GPU, and an output token whose sampling was put off has been sampled.
    """

    def __init__(self, turn: _Turn, report: PluginReport | None) -> None:
        self._turn, self._report, self._event = turn, report, None
        self._first, ids, logprobs = turn.drafts or (0, None, None)
        self._ids, self._logprobs = _to_host(ids), _to_host(logprobs)
        if ids is not None and ids.is_cuda:
            import torch  # lazy: the plugin's modules load without torch

            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def copy(self) -> Any:
        """The entry as plain values; None if the output token was not drawn by us."""
        if not self._turn.last_drawn:
            return None
        if self._ids is None:
            return _DRAWN if self._report is None else _plain(Drawn(report=self._report))
        if self._event is not None:
            self._event.synchronize()
        logprobs = () if self._logprobs is None else tuple(self._logprobs.tolist())
        ids = tuple(self._ids.tolist())
        drawn = Drawn(
            first=self._first,
            ids=ids,
            logprobs=logprobs,
            is_expanded=self._turn.is_expanded,
            report=self._report,
        )
        return _plain(drawn)


class TargetDraws:
    """One per process; its methods are hooks.

    Args:
        report: what the plugin says of itself when asked.
    """

    def __init__(self, report: Callable[[], PluginReport], *, draws: RowDraws | None = None) -> None:
        self._report = report
        self._draws = draws
        self._is_broken = False
        self._ordered: weakref.WeakKeyDictionary[Any, _Ordered] = weakref.WeakKeyDictionary()
        self._turns: list[_Turn] = []
        self._extend_lens: list[int] = []

    # ------------------------------------------------------------ hooks

    def around_forward(
        self, original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """A pass: note its requests, run it, add the answers."""
        turns = self._guarded(self._begin, batch) or []
        result = original(worker, batch, *args, **kwargs)
        output = getattr(result, "logits_output", None)
        if output is not None and (turns or getattr(output, "customized_info", None)):
            self._guarded(self._answer, output, turns, batch)
        return result

    def around_input_logprobs(
        self,
        original: Callable[..., Any],
        processor: Any,
        pruned_states: Any,
        sample_indices: Any,
        input_logprob_indices: Any,
        token_to_seq_idx: list[int],
        lm_head: Any,
        get_logits_fn: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Logits of input positions: keep the rows of drafts on their way, and draw from them."""
        wanted = self._guarded(self._draft_rows, token_to_seq_idx) or []
        given = (pruned_states, sample_indices, input_logprob_indices, token_to_seq_idx, lm_head)
        if not wanted:
            return original(processor, *given, get_logits_fn, *args, **kwargs)
        rows = [row for _, _, own in wanted for row in own]
        kept: list[Any] = []
        at = 0

        def get_logits(*a: Any, **k: Any) -> Any:
            nonlocal at
            logits = get_logits_fn(*a, **k)
            inside = [row - at for row in rows if at <= row < at + logits.shape[0]]
            if inside:
                kept.append(_picked(logits, inside).clone())  # its buffer may be the next chunk's
            at += logits.shape[0]
            return logits

        result = original(processor, *given, get_logits, *args, **kwargs)
        self._guarded(self._draw_drafts, wanted, kept)
        return result

    def around_sample(
        self, original: Callable[..., Any], runner: Any, logits_output: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        """The sampler: its own draws are made, and ours put in their place."""
        drawn = self._guarded(self._draw_outputs, logits_output, forward_batch)
        ids = original(runner, logits_output, forward_batch, *args, **kw)
        if drawn is not None:
            self._guarded(self._put, ids, logits_output, drawn)
        return ids

    # ------------------------------------------------------------ for passes that ran as decode rows

    def covers(self, rids: list[str]) -> bool:
        """These are the requests of the pass that runs, each has an order, and orders are followed."""
        return not self._is_broken and [turn.rid for turn in self._turns] == rids

    def draw_expanded(self, logits: Any, lens: list[int]) -> None:
        """Draw at draft positions where the logits of all inputs are there at once.

        Args:
            logits: [sum(lens), V] of the pass's requests, one after the other; borrowed.
            lens: number of inputs of each.
        """
        for turn in self._turns:
            turn.is_expanded = True
        sequences = [index for index, length in enumerate(lens) for _ in range(length)]
        wanted = self._guarded(self._draft_rows, sequences)
        if wanted:
            self._guarded(self._draw_drafts, wanted, [_picked(logits, [row for _, _, own in wanted for row in own])])

    # ------------------------------------------------------------ parts

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._is_broken:
            return None
        try:
            return function(*args)
        except Exception:  # draws that fail must never fail the engine's pass
            log.exception("breakeven: target ids are off")
            self._is_broken, self._turns = True, []
            return None

    def _begin(self, batch: Any) -> list[_Turn]:
        self._turns, self._extend_lens = [], []
        if batch is None:
            return self._turns
        is_extend = batch.forward_mode.is_extend()
        if not is_extend and not batch.forward_mode.is_decode():
            return self._turns
        self._extend_lens = [int(n) for n in batch.extend_lens] if is_extend else []
        for row, request in enumerate(batch.reqs):
            ordered = self._order_of(request)
            if ordered.order is None:
                continue
            end = int(batch.prefix_lens[row]) + self._extend_lens[row] if is_extend else int(batch.seq_lens_cpu[row])
            self._turns.append(_Turn(row=row, rid=request.rid, request=request, ordered=ordered, end=end))
        return self._turns

    def _order_of(self, request: Any) -> _Ordered:
        known = self._ordered.get(request)
        if known is None:
            order = None
            try:
                order = read_order(getattr(request.sampling_params, "custom_params", None))
            except msgspec.MsgspecError as error:
                log.warning("breakeven: an order to draw can't be read: %s", error)
            known = _Ordered(order=order)
            if order is not None:
                known.state = RowState(params=order.sampling, prompt_len=order.prompt_len)
            self._ordered[request] = known
        return known

    def _draft_rows(self, token_to_seq_idx: list[int]) -> list[tuple[_Turn, int, list[int]]]:
        """(turn, position drawn by its first row, its rows) of the rows that draw at draft positions."""
        wanted = []
        for turn in self._turns:
            order = turn.ordered.order
            assert order is not None
            # Row r of a request's n computes the input at position end - n + r, and so draws at the one after.
            rows = [i for i, sequence in enumerate(token_to_seq_idx) if sequence == turn.row]
            first = turn.end - len(rows) + 1
            skipped = max(0, order.base_len - first)
            own = rows[skipped:-1]  # the last row is the sampler's
            if own:
                wanted.append((turn, first + skipped, own))
        return wanted

    def _draw_drafts(self, wanted: list[tuple[_Turn, int, list[int]]], kept: list[Any]) -> None:
        import torch  # lazy, as above

        rows = kept[0] if len(kept) == 1 else torch.cat(kept)
        groups = []
        for turn, first, own in wanted:
            assert turn.ordered.state is not None
            groups.append(
                RowGroup(
                    state=turn.ordered.state,
                    position=first,
                    count=len(own),
                    known_ids=turn.ids(0, first) if turn.ordered.state.has_penalties else (),
                    drafts=tuple(turn.ids(first, first + len(own) - 1)),
                )
            )
        ids = self._draws_for(rows).draw(rows, groups)
        at = 0
        for turn, first, own in wanted:
            part = slice(at, at + len(own))
            assert turn.ordered.order is not None
            logprobs = _logprobs(rows[part], ids[part]) if turn.ordered.order.wants_logprobs else None
            turn.drafts = (first, ids[part], logprobs)
            at += len(own)

    def _draw_outputs(self, logits_output: Any, forward_batch: Any) -> _Outputs | None:
        logits = logits_output.next_token_logits
        if logits is None or not self._turns:
            return None
        # Sampling may come later than its pass: the rids say whose rows these are.
        places = {rid: row for row, rid in enumerate(forward_batch.rids or ())}
        turns = [turn for turn in self._turns if turn.rid in places and turn.draws_output]
        if not turns:
            return None
        is_decode = forward_batch.forward_mode.is_decode()
        groups = []
        for turn in turns:
            assert turn.ordered.state is not None
            penalised = turn.ordered.state.has_penalties
            groups.append(
                RowGroup(
                    state=turn.ordered.state,
                    position=turn.end,
                    known_ids=turn.ids(0, turn.end) if penalised else (),
                    newest=forward_batch.input_ids[places[turn.rid]] if penalised and is_decode else None,
                )
            )
        index = [places[turn.rid] for turn in turns]
        rows = _picked(logits, index).clone()  # the sampler turns its own into probabilities
        return _Outputs(turns, index, rows, self._draws_for(rows).draw(rows, groups))

    def _put(self, ids: Any, logits_output: Any, drawn: _Outputs) -> None:
        from verifier.sglang.plugin.device_rows import put_rows  # lazy: it loads torch

        put_rows(ids, drawn.index, drawn.ids)
        logprobs = getattr(logits_output, "next_token_logprobs", None)
        if logprobs is not None:
            put_rows(logprobs, drawn.index, _logprobs(drawn.rows, drawn.ids))
        for turn in drawn.turns:
            turn.last_drawn = True

    def _draws_for(self, rows: Any) -> RowDraws:
        if self._draws is None:
            if rows.is_cuda:
                from verifier.sglang.plugin.batched_draws import BatchedDraws  # lazy: it loads torch

                self._draws = BatchedDraws()
            else:
                self._draws = DrawnByDefinition()
        return self._draws

    def _answer(self, output: Any, turns: list[_Turn], batch: Any) -> None:
        others = {k: v for k, v in (getattr(output, "customized_info", None) or {}).items() if k != ORDER_NAME}
        entries: list[Any] = [None] * len(batch.reqs) if batch is not None else []
        for turn in turns:
            order = turn.ordered.order
            wants_report = order is not None and order.wants_report
            entries[turn.row] = _Answer(turn, self._report() if wants_report else None)
        if turns:
            others[ORDER_NAME] = entries
        output.customized_info = others or None


def _picked(rows: Any, index: list[int]) -> Any:
    from verifier.sglang.plugin.device_rows import pick_rows  # lazy: it loads torch

    return pick_rows(rows, index)


def _logprobs(rows: Any, ids: Any) -> Any:
    """[R] float32 log-softmax of raw logits at the given ids; finite, as JSON knows no infinity."""
    import torch  # lazy, as above

    values = rows.float().log_softmax(dim=-1).gather(1, ids[:, None]).squeeze(1)
    return values.clamp(min=torch.finfo(torch.float32).min)


def _to_host(tensor: Any) -> Any:
    if tensor is None or not tensor.is_cuda:
        return tensor
    import torch  # lazy, as above

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _plain(drawn: Drawn) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(drawn)
    return plain
