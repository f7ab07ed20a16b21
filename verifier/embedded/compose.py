"""Composition root of the embedded verifier process: the one place that names concrete classes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import torch
from tokenizers import Tokenizer

from cpukernels.choose import choose_kernels
from verifier.embedded.config import VerifierConfig
from verifier.embedded.engine import EmbeddedEngine
from verifier.embedded.grammar import GrammarCompiler
from verifier.embedded.grammar_queue import GrammarQueue
from verifier.embedded.model import load_target
from verifier.embedded.server import LoadedEngine, VerifierServer
from verifier.embedded.weights import resolve_model_dir
from wire.messages import VerifierInfo
from wire.model_files import eos_ids
from wire.tensor_ring import TensorRingWriter

__all__ = ["load_engine", "run"]

log = structlog.get_logger("verifier")


def load_engine(config: VerifierConfig, ring_path: Path, progress: Callable[[str, float], None]) -> LoadedEngine:
    """Weights, kernels and ring of one engine, as the config says."""
    torch.set_num_threads(config.num_threads)
    cache_dir = config.resolved_cache_dir
    progress("compiling kernels", 0.0)
    kernels = choose_kernels(
        config.kernels, cache_dir=cache_dir / "kernels", warn=log.warning, is_compact=config.compact_weights
    )
    model_dir = resolve_model_dir(config.model, cache_dir=cache_dir, progress=progress)
    model = load_target(
        model_dir,
        kernels=kernels,
        aux_layer_ids=config.aux_layer_ids,
        context_len=config.context_len,
        progress=progress,
    )
    ring = TensorRingWriter(
        ring_path, num_slots=config.ring_slots, slot_bytes=config.ring_slot_rows * model.feature_size * 4
    )
    engine = EmbeddedEngine(
        model,
        ring,
        slot_rows=config.ring_slot_rows,
        max_requests=config.max_requests,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        prefix_cache_tokens=config.prefix_cache_tokens,
        clock=time.perf_counter,
        grammars=_grammars(model_dir, model.architecture.vocab_size, config, progress),
    )
    architecture = model.architecture
    info = VerifierInfo(
        model_dir=str(model_dir),
        model_type=architecture.model_type,
        context_len=model.context_len,
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        num_layers=architecture.num_layers,
        aux_layer_ids=model.aux_layer_ids,
        is_row_invariant=kernels.is_row_invariant,
        kernels=kernels.name,
    )
    return LoadedEngine(engine=engine, info=info)


def _grammars(
    model_dir: Path, vocab_size: int, config: VerifierConfig, progress: Callable[[str, float], None]
) -> GrammarQueue:
    progress("preparing grammars", 0.0)
    tokenizer_json = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
    compiler = GrammarCompiler(tokenizer_json, vocab_size=vocab_size)
    compiler.warm_up(sorted(eos_ids(model_dir, Tokenizer.from_str(tokenizer_json).token_to_id)))
    return GrammarQueue(compiler, timeout_s=config.grammar_timeout_s, clock=time.perf_counter)


def run(config: VerifierConfig, *, endpoint: str, ring_path: Path) -> None:
    """Serve until told to stop; ``endpoint`` and ``ring_path`` are the config's with "auto" resolved."""
    server = VerifierServer(
        endpoint, ring_path=str(ring_path), load=lambda progress: load_engine(config, ring_path, progress)
    )
    log.info("starting", pid=os.getpid(), endpoint=endpoint)
    try:
        asyncio.run(server.run())
    finally:
        ring_path.unlink(missing_ok=True)
