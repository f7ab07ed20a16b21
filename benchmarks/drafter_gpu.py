"""Time of one draft on a GPU: batch, chain length and context, for random heads of two real shapes.

    python -m benchmarks.drafter_gpu --out result.json

A round reads three new slots of every request and drafts K tokens, as after a verify that accepted two. Times are wall
clock around ``DeviceRunner.draft``, copies and the wait included; caches are filled with noise instead of being read.
The floor is the weights' bytes over the bandwidth that ``--gb-per-s`` states: every chain step reads them once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import provenance
from drafter.device.model import DeviceModel
from drafter.device.opening import open_device, weight_bytes
from drafter.device.runner import DeviceRunner
from drafter.head.config import HeadConfig, parse_head_config
from drafter.head.weights import AttentionWeights, GqaWeights, HeadWeights, LayerWeights, MlaWeights
from drafter.ports import DraftWish, Stretch
from wire.sampling import SamplingParams

_COMMON = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_KIMI = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    },
    "kimi-k2.5": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "vocab_size": 163840,
        **_KIMI,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "draft_vocab_size": 256,
    },
}
_ROWS = 3
_LONGEST = 65536


def random_head(name: str, device: torch.device) -> HeadWeights:
    """A head of that shape on ``device``, bfloat16, so scaled that states neither vanish nor grow."""
    config = parse_head_config(SHAPES[name] | _COMMON)

    def weight(*shape: int) -> torch.Tensor:
        scale: float = shape[-1] ** -0.5
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * scale

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.bfloat16)

    hidden, draft_vocab = config.hidden_size, config.draft_vocab_size or config.vocab_size
    layer = LayerWeights(
        input_layernorm=ones(hidden),
        post_attention_layernorm=ones(hidden),
        attention=_random_attention(config, weight, ones),
        gate=weight(config.intermediate_size, hidden),
        up=weight(config.intermediate_size, hidden),
        down=weight(hidden, config.intermediate_size),
    )
    step = config.vocab_size // draft_vocab
    return HeadWeights(
        config=config,
        head_format=name,
        fc=weight(hidden, 3 * hidden),
        fc_norms=(),
        input_norm=None,
        hidden_norm=ones(hidden),
        layers=(layer,),
        norm=ones(hidden),
        lm_head=weight(draft_vocab, hidden),
        embedding=weight(config.vocab_size, hidden),
        target_ids=torch.arange(draft_vocab) * step,
    )


def _random_attention(config: HeadConfig, weight: Any, ones: Any) -> AttentionWeights:
    hidden, heads = config.hidden_size, config.num_heads
    if config.mla is None:
        keys = config.num_kv_heads * config.head_dim
        return GqaWeights(
            q=weight(heads * config.head_dim, 2 * hidden),
            k=weight(keys, 2 * hidden),
            v=weight(keys, 2 * hidden),
            o=weight(hidden, heads * config.head_dim),
            qkv_bias=None,
            o_bias=None,
            q_norm=None,
            k_norm=None,
        )
    mla = config.mla
    return MlaWeights(
        q_a=weight(mla.q_lora_rank, 2 * hidden),
        q_a_norm=ones(mla.q_lora_rank),
        q_b=weight(heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank),
        kv_a=weight(mla.kv_lora_rank + mla.qk_rope_head_dim, 2 * hidden),
        kv_a_norm=ones(mla.kv_lora_rank),
        kv_b=weight(heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        o=weight(hidden, heads * mla.v_head_dim),
    )


def time_drafts(
    runner: DeviceRunner, *, batch: int, num_draft_tokens: int, context: int, temperature: float, repeats: int
) -> dict[str, Any]:
    """Milliseconds of one draft: median, and the tenth and ninetieth percentile."""
    random = np.random.default_rng(batch)
    features = random.standard_normal((_ROWS, runner.feature_size), np.float32)
    caches = [runner.new_cache() for _ in range(batch)]
    for cache in caches:
        cache.reserve(context + 64)
        cache.data.normal_()
    sampling = SamplingParams(temperature=temperature, seed=1)
    wish = DraftWish(num_draft_tokens=num_draft_tokens, position=context + _ROWS, sampling=sampling)
    stretches = [Stretch(cache=cache, features=features, token_ids=(1, 2, 3)) for cache in caches]
    times_ms = []
    for repeat in range(repeats + 5):
        for cache in caches:
            cache.length = context
        started_s = time.perf_counter()
        runner.draft(stretches, [wish] * batch)
        if repeat >= 5:
            times_ms.append(1000 * (time.perf_counter() - started_s))
    deciles = statistics.quantiles(times_ms, n=10)
    return {
        "batch": batch,
        "num_draft_tokens": num_draft_tokens,
        "context": context,
        "temperature": temperature,
        "draft_ms": round(statistics.median(times_ms), 3),
        "p10_ms": round(deciles[0], 3),
        "p90_ms": round(deciles[-1], 3),
    }


def time_prompt(runner: DeviceRunner, num_slots: int, *, piece: int = 1024) -> dict[str, Any]:
    """Milliseconds to read a prompt in pieces; the second of two readings."""
    features = np.random.default_rng(0).standard_normal((piece, runner.feature_size), np.float32)
    ids = [index % runner.vocab_size for index in range(piece)]
    for _ in range(2):
        cache = runner.new_cache()
        _wait(runner)
        started_s = time.perf_counter()
        for _ in range(num_slots // piece):
            runner.read(Stretch(cache=cache, features=features, token_ids=ids))
        _wait(runner)
    return {"prompt": num_slots, "read_ms": round(1000 * (time.perf_counter() - started_s), 1)}


def _wait(runner: DeviceRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize()


def step_bytes(head: HeadWeights) -> int:
    """Weights that one chain step reads: all but the fc and the embedding."""
    rest = (head.fc.numel() + head.embedding.numel()) * 2
    return weight_bytes(head, torch.bfloat16) - rest


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every cell of every shape."""
    # What a round costs without graphs is measured by --no-graphs, in a run of its own.
    device = torch.device("cpu") if arguments.device == "cpu" else open_device(arguments.device)
    results = {}
    with torch.inference_mode():
        for name in arguments.shapes:
            head = random_head(name, device)
            floor_ms = 1000 * step_bytes(head) / (arguments.gb_per_s * 1e9)
            model = DeviceModel(head, device=device, dtype=torch.bfloat16, num_positions=_LONGEST + 64)
            runner = DeviceRunner(model, uses_graphs=not arguments.no_graphs)
            print(
                f"{name}: {weight_bytes(head, torch.bfloat16) / 1e9:.2f} GB, floor {floor_ms:.3f} ms a step", flush=True
            )
            del head
            cells = []
            for temperature in (0.0, 1.0):
                for context in arguments.contexts:
                    for batch in arguments.batches:
                        for count in arguments.num_draft_tokens:
                            cell = time_drafts(
                                runner,
                                batch=batch,
                                num_draft_tokens=count,
                                context=context,
                                temperature=temperature,
                                repeats=arguments.repeats,
                            )
                            cells.append(cell)
                            print(f"  {cell}", flush=True)
            prompts = [time_prompt(runner, length) for length in arguments.prompts]
            print(f"  {prompts}", flush=True)
            peak_gb = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
            results[name] = {"step_floor_ms": floor_ms, "cells": cells, "prompts": prompts, "peak_gb": peak_gb}
            del model, runner
            if device.type == "cuda":
                torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    record = provenance(sys.argv) | {"gpu": gpu, "cuda": torch.version.cuda}
    return {"provenance": record, "rows_per_round": _ROWS, "uses_graphs": not arguments.no_graphs, "results": results}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per cell, then one JSON line; ``--out`` keeps it."""
    parser = argparse.ArgumentParser(description="Time of one draft on a GPU.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b", "kimi-k2.5"], choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--num-draft-tokens", nargs="+", type=int, default=[1, 3, 5])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 32768])
    parser.add_argument("--prompts", nargs="*", type=int, default=[4096, 32768])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--gb-per-s", type=float, default=4800.0, help="the GPU's memory bandwidth")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel from the host")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    text = json.dumps(run(arguments))
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
