"""Batch expansion: a verify pass runs as a decode step with one row for each token.

SGLang computes a request with a cached prefix by its extend path, which is made for prompts: kernels that tile queries,
attention outside of CUDA graphs, a launch for each operation. The K + 1 tokens of a verify are as well K + 1 rows of a
decode batch: row i has the request's page table, the length committed + i, and its own place for keys and values. Each
layer writes those of all rows before its attention reads them, so row i sees drafts 0 to i - 1. The decode step has a
CUDA graph, with the all-reduce in it, and its kernels are those of plain decode.

vLLM's first scorer of drafts expanded batches too. Attention reads a request's prefix once for each row, which costs
more than an extend kernel only where contexts are long and rows are many.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, Final

from verifier.sglang.plugin.draws import TargetDraws

__all__ = ["BatchExpansion"]

log = logging.getLogger("breakeven.plugin")

# Without a decode graph: more rows are a prompt, for which the extend kernels are made.
_MAX_EAGER_ROWS: Final = 64
# What a decode row can't carry; any of them set leaves the pass as it is.
_FOREIGN: Final = (
    *("spec_info", "input_embeds", "replace_embeds", "encoder_lens", "global_num_tokens_cpu", "token_type_ids"),
    *("mamba_track_indices", "tbo_split_seq_index", "ngram_embedding_info"),
)


class BatchExpansion:
    """One per process; its method is a hook.

    Args:
        draws: knows which requests of a pass have orders, and draws from the logits of all rows.
    """

    def __init__(self, draws: TargetDraws) -> None:
        self._draws = draws
        self._is_broken = False

    def around_model_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND ``ModelRunner.forward``: run a short extend of ordered requests as decode rows."""
        expanded = None
        if not self._is_broken:
            try:
                expanded = self._expanded(runner, forward_batch)
            except Exception:  # noqa: BLE001 - the pass itself must go on
                self._give_up()
        if expanded is None:
            return original(runner, forward_batch, *args, **kwargs)
        try:
            output = original(runner, expanded, *args, **kwargs)
            self._fold(output.logits_output, forward_batch)
        except Exception:  # noqa: BLE001 - as above; running the pass again writes the same keys and values
            self._give_up()
            return original(runner, forward_batch, *args, **kwargs)
        return output

    def _give_up(self) -> None:
        log.exception("breakeven: batch expansion is off")
        self._is_broken = True

    def _expanded(self, runner: Any, batch: Any) -> Any:
        """The pass as decode rows, or None where it can't be one."""
        if batch.forward_mode.name != "EXTEND" or not self._draws.covers(batch.rids):
            return None
        lens, prefix_lens = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        if lens is None or prefix_lens is None or min(prefix_lens) < 1:
            return None
        num_rows = sum(lens)
        if num_rows > _max_rows(runner) or not _is_plain(runner, batch):
            return None
        import torch  # lazy: the plugin's modules load without torch

        seq_lens = [prefix + i + 1 for prefix, length in zip(prefix_lens, lens, strict=True) for i in range(length)]
        expanded = copy.copy(batch)
        expanded.forward_mode = type(batch.forward_mode).DECODE
        expanded.batch_size = num_rows
        expanded.req_pool_indices = torch.repeat_interleave(
            batch.req_pool_indices, batch.extend_seq_lens, output_size=num_rows
        )
        expanded.seq_lens = (batch.positions + 1).to(batch.seq_lens.dtype)
        expanded.seq_lens_cpu = torch.tensor(seq_lens, dtype=torch.int64)
        expanded.seq_lens_sum = sum(seq_lens)
        if batch.orig_seq_lens is not None:
            expanded.orig_seq_lens = expanded.seq_lens.to(batch.orig_seq_lens.dtype)
        expanded.return_logprob = expanded.is_extend_in_batch = False
        expanded.rids = expanded.lora_ids = expanded.mm_inputs = None
        for name in vars(batch):
            if name.startswith("extend_"):
                setattr(expanded, name, None)
        translator = getattr(runner, "kv_index_translator", None)
        if translator is not None:  # since 0.5.22: places to write are bound to the rows that write them
            virtual = getattr(batch, "out_cache_loc_virtual", None)
            expanded.out_cache_loc = batch.out_cache_loc if virtual is None else virtual
            translator.bind_own_plan(expanded)
        return expanded

    def _fold(self, output: Any, batch: Any) -> None:
        """What the extend pass would have said: its drafts drawn, then the logits of each request's last row only."""
        logits = output.next_token_logits
        self._draws.draw_expanded(logits, batch.extend_seq_lens_cpu)
        if batch.return_logprob:
            output.input_token_logprobs = _input_logprobs(logits, batch)
        output.next_token_logits = logits[batch.extend_seq_lens.cumsum(0) - 1]


def _max_rows(runner: Any) -> int:
    """The engine's decode buffers have a row for each request that may run; its graphs may have fewer."""
    graphs = getattr(runner, "decode_cuda_graph_runner", None)
    return min(int(runner.max_running_requests), int(getattr(graphs, "max_bs", _MAX_EAGER_ROWS)))


def _is_plain(runner: Any, batch: Any) -> bool:
    """Text of one model without adapters or recurrent state, and nobody wants lists of logprobs."""
    if any(getattr(batch, name, None) is not None for name in _FOREIGN):
        return False
    if any(found is not None for found in batch.mm_inputs or ()) or not _has_independent_rows(runner):
        return False
    has_lists = any(batch.top_logprobs_nums or ()) or any(ids is not None for ids in batch.token_ids_logprobs or ())
    return not (batch.return_logprob and has_lists)


def _has_independent_rows(runner: Any) -> bool:
    """The engine keeps nothing of a request but keys and values, and runs all rows of a layer before the next one."""
    managers = ("lora_manager", "hisparse_coordinator")
    if any(getattr(runner, name, None) is not None for name in managers) or getattr(runner, "dcp_size", 1) > 1:
        return False
    if getattr(getattr(runner, "server_args", None), "enable_two_batch_overlap", False):
        return False
    # Pools of models with recurrent layers are classes of their own: rows of one request would share its state.
    return type(runner.req_to_token_pool).__name__ == "ReqToTokenPool"


def _input_logprobs(logits: Any, batch: Any) -> Any:
    """[N] log-probabilities of the input ids that were asked for, in the order of the extend path."""
    rows: list[int] = []
    at = 0
    for length, start in zip(batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu, strict=True):
        rows += range(at + start, at + length)
        at += length
    if not rows:
        return None
    from verifier.sglang.plugin.device_rows import pick_rows  # lazy: it loads torch

    wanted = pick_rows(logits, rows)
    ids = batch.extend_input_logprob_token_ids_gpu.long()
    return wanted.float().log_softmax(dim=-1).gather(1, ids[:, None]).squeeze(1)
