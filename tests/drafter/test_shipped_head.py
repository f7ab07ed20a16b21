"""The head in the repository, where it is: loads fast and completely, and drafts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from cpukernels.ports import Kernels, ragged_rows
from drafter.head.config import read_head_config
from drafter.head.loader import load_head
from drafter.head.tensors import read_tensors
from drafter.model import DraftModel
from tests.drafter.heads import write_target

HEAD_DIR = Path(__file__).parents[2] / "drafter" / "heads" / "smollm2-135m-instruct"

pytestmark = pytest.mark.skipif(not (HEAD_DIR / "config.json").exists(), reason="no trained head in the repository yet")


@pytest.mark.slow
def test_it_loads_and_drafts(tmp_path: Path, kernels: Kernels) -> None:
    """With a stand-in for the target's embedding: what is checked is that nothing is missing, unused or misshapen."""
    config = read_head_config(HEAD_DIR)
    target = None
    if "embed_tokens.weight" not in read_tensors(HEAD_DIR):
        embedding = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(0)) / 8
        target = write_target(tmp_path, {"model.embed_tokens.weight": embedding}, num_layers=30)
    started_s = time.perf_counter()
    head = load_head(HEAD_DIR, target_model_dir=target)
    model = DraftModel(head, kernels, num_positions=64)
    assert time.perf_counter() - started_s < 3.0
    assert head.config.aux_layer_ids == (2, 15, 27)
    features = torch.randn(9, model.feature_size, generator=torch.Generator().manual_seed(1))
    rows = ragged_rows([model.new_cache()], [9])
    states = model.forward(model.fuse(features), torch.arange(9), rows, rows.positions[-1:])
    logits, fed_back = model.guess(states)
    assert bool(torch.isfinite(logits).all())
    assert fed_back.shape == (1, config.hidden_size)
