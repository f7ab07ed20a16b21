"""Every layout against the plain reference: extend, chain, d2t."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cpukernels.ports import Kernels, ragged_rows
from cpukernels.reference import TorchKernels
from drafter.errors import UnsupportedHead
from drafter.head.loader import load_head
from drafter.model import DraftModel, check_native_shape, suitable_kernels
from tests.drafter.heads import FEATURES, LAYOUTS, VOCAB, TinyHead


def build(tiny: TinyHead, kernels: Kernels) -> DraftModel:
    head = load_head(tiny.head_dir, target_model_dir=tiny.target_dir)
    return DraftModel(head, suitable_kernels(kernels, head, lambda _message: None), num_positions=64)


def example(seed: int, length: int) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
    return torch.randn(length, FEATURES, generator=generator), ids


def draft(
    model: DraftModel, features: torch.Tensor, ids: list[int], num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    cache, slots = model.new_cache(), len(ids) - 1
    hidden, tokens = model.fuse(features[:slots]), torch.tensor(ids[1:])
    drafts: list[int] = []
    steps: list[torch.Tensor] = []
    for _ in range(num_draft_tokens):
        rows = ragged_rows([cache], [len(tokens)])
        states = model.forward(hidden, tokens, rows, rows.positions[-1:] * 0 + len(tokens) - 1)
        cache.length += len(tokens)
        logits, hidden = model.guess(states)
        steps.append(logits[0])
        drafts.append(int(model.target_ids[int(logits[0].argmax())]))
        tokens = torch.tensor(drafts[-1:])
    return drafts, steps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_torch", [False, True], ids=["native", "torch"])
def test_layout_agrees_with_the_reference(
    layout: str, use_torch: bool, tiny_heads: dict[str, TinyHead], kernels: Kernels
) -> None:
    tiny = tiny_heads[layout]
    model = build(tiny, TorchKernels() if use_torch else kernels)
    features, ids = example(7, 21)
    expected_ids, expected = tiny.reference.draft(features, ids, 5)
    found_ids, found = draft(model, features, ids, 5)
    for step, (want, have) in enumerate(zip(expected, found, strict=True)):
        assert torch.allclose(have, want, atol=2e-4, rtol=2e-4), f"step {step}: {(have - want).abs().max()}"
    assert found_ids == expected_ids


def test_extending_in_pieces_is_bit_identical(tiny_heads: dict[str, TinyHead], kernels: Kernels) -> None:
    model = build(tiny_heads["speculators, three qwen3 layers"], kernels)
    if not kernels.is_row_invariant:
        pytest.skip("needs row-invariant kernels")
    features, ids = example(8, 30)
    hidden, tokens = model.fuse(features[:29]), torch.tensor(ids[1:])
    whole, pieces = model.new_cache(), model.new_cache()
    rows = ragged_rows([whole], [29])
    expected = model.forward(hidden, tokens, rows, rows.positions[-1:])
    for begin, end in ((0, 1), (1, 14), (14, 27), (27, 29)):
        rows = ragged_rows([pieces], [end - begin])
        found = model.forward(hidden[begin:end], tokens[begin:end], rows, rows.positions[-1:] - begin)
        pieces.length = end
    assert torch.equal(found, expected)


def test_native_kernels_refuse_sizes_they_cannot_run(tiny_heads: dict[str, TinyHead], kernels: Kernels) -> None:
    tiny = tiny_heads["head_dim 8, torch kernels"]
    head = load_head(tiny.head_dir)
    with pytest.raises(UnsupportedHead, match="head_dim 8"):
        check_native_shape(head)
    warnings: list[str] = []
    assert suitable_kernels(kernels, head, warnings.append).name == "torch"
    assert len(warnings) == (kernels.name == "native")


def test_served_length_is_not_limited_by_the_training_length(tiny_heads: dict[str, TinyHead], kernels: Kernels) -> None:
    """config.json says max_position_embeddings 8; the tables reach num_positions."""
    tiny = tiny_heads["speculators"]
    model = build(tiny, kernels)
    features, ids = example(9, 50)
    assert draft(model, features, ids, 3)[0] == tiny.reference.draft(features, ids, 3)[0]


def test_the_input_is_not_changed(tiny_heads: dict[str, TinyHead], kernels: Kernels) -> None:
    model = build(tiny_heads["speculators"], kernels)
    hidden = torch.randn(3, 32)
    before = hidden.clone()
    rows = ragged_rows([model.new_cache()], [3])
    model.forward(hidden, torch.tensor([1, 2, 3]), rows, rows.positions)
    assert torch.equal(hidden, before)


def test_head_path_may_be_the_weight_file(tmp_path: Path, kernels: Kernels) -> None:
    tiny = LAYOUTS["speculators"](tmp_path)
    head = load_head(tiny.head_dir / "model.safetensors")
    assert head.feature_size == FEATURES
