"""The self-check finds the convention a head was made with, and says what to set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafter.head.loader import load_head
from drafter.head.weights import HeadWeights
from drafter.selfcheck import AgreementCell, AgreementTable, CheckSample, check_head, judge
from tests.drafter.heads import FEATURES, VOCAB, TinyHead
from tests.drafter.reference import ReferenceHead


def sample_of(reference: ReferenceHead, seed: int, *, true_shift: int = 0, length: int = 40) -> CheckSample:
    """Text of a made-up target that chooses just what the head would guess from features of ``true_shift``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (length,), generator=generator)
    features = {shift: torch.randn(length, FEATURES, generator=generator) for shift in (-1, 0, 1)}
    embedding = reference.tensors["embed_tokens.weight"].float()
    states = reference.states(reference.fuse(features[true_shift][:-1]), embedding[ids[1:]])
    draft = reference.logits(states).argmax(1)
    target_argmax = torch.zeros(length, dtype=torch.int64)
    target_argmax[1:] = draft + reference.tensors["d2t"][draft]
    return CheckSample(token_ids=ids, features=features, target_argmax=target_argmax)


@pytest.fixture
def head(tiny_heads: dict[str, TinyHead]) -> HeadWeights:
    return load_head(tiny_heads["speculators"].head_dir)


def test_a_right_head_is_ok(tiny_heads: dict[str, TinyHead], head: HeadWeights) -> None:
    table = check_head(head, [sample_of(tiny_heads["speculators"].reference, seed) for seed in (1, 2)])
    assert table.configured.agreement == 1.0
    assert table.cells[0] is table.configured
    assert (len(table.cells), table.num_positions, table.coverage) == (6, 78, 1.0)
    assert judge(table).kind == "ok"


def test_shifted_aux_layers_are_found(tiny_heads: dict[str, TinyHead], head: HeadWeights) -> None:
    table = check_head(head, [sample_of(tiny_heads["speculators"].reference, 1, true_shift=-1)])
    verdict = judge(table)
    assert verdict.kind == "other_is_better"
    assert "aux_layer_ids -1 each" in verdict.message


def test_another_residual_and_theta_are_found(tiny_heads: dict[str, TinyHead], head: HeadWeights) -> None:
    tensors = tiny_heads["speculators"].reference.tensors
    fields = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    trained = ReferenceHead(tensors=tensors, norm_before_residual=True, **fields)  # type: ignore[arg-type]
    assert "norm_before_residual = 'yes'" in judge(check_head(head, [sample_of(trained, 1)])).message
    deep = load_head(tiny_heads["speculators, three qwen3 layers"].head_dir)
    tensors = tiny_heads["speculators, three qwen3 layers"].reference.tensors
    trained = ReferenceHead(tensors=tensors, num_layers=3, theta=10_000.0, **fields)  # type: ignore[arg-type]
    table = check_head(deep, [sample_of(trained, seed) for seed in range(6)])
    assert len(table.cells) == 12
    assert table.cells[0].rope_theta == 10_000.0


def test_a_foreign_head_is_refused(tiny_heads: dict[str, TinyHead], head: HeadWeights) -> None:
    other = tiny_heads["specforge, embedding from the target"].reference
    assert judge(check_head(head, [sample_of(other, 1)])).kind == "too_low"


def test_missing_shifts_are_left_out(tiny_heads: dict[str, TinyHead], head: HeadWeights) -> None:
    sample = sample_of(tiny_heads["speculators"].reference, 1)
    only = CheckSample(token_ids=sample.token_ids, features={0: sample.features[0]}, target_argmax=sample.target_argmax)
    assert {cell.aux_shift for cell in check_head(head, [only]).cells} == {0}
    with pytest.raises(ValueError, match="shift 0"):
        check_head(head, [])


@pytest.mark.parametrize(
    ("configured", "other", "num_positions", "kind"),
    [
        (0.6, 0.62, 500, "ok"),  # within noise
        (0.5, 0.62, 500, "other_is_better"),
        (0.5, 0.62, 50, "ok"),  # too few positions to tell
        (0.05, 0.06, 500, "too_low"),
        (0.05, 0.6, 500, "other_is_better"),
    ],
)
def test_verdicts(configured: float, other: float, num_positions: int, kind: str) -> None:
    def cell(agreement: float, *, is_configured: bool) -> AgreementCell:
        return AgreementCell(
            aux_shift=0 if is_configured else 1,
            norm_before_residual=False,
            rope_theta=1e4 if is_configured else 1e6,
            agreement=agreement,
            is_configured=is_configured,
        )

    cells = (cell(other, is_configured=False), cell(configured, is_configured=True))
    verdict = judge(AgreementTable(cells=cells, num_positions=num_positions, coverage=1.0))
    assert verdict.kind == kind
    assert f"{configured:.3f}" in verdict.message


def test_guesses_of_the_prompt_are_not_counted(tiny_heads: dict[str, TinyHead], head: HeadWeights) -> None:
    sample = sample_of(tiny_heads["speculators"].reference, 1)
    wrong_prompt = sample.target_argmax.clone()
    wrong_prompt[:11] = -1  # what the target would have said inside a prompt of 12 tokens
    table = check_head(head, [replace(sample, target_argmax=wrong_prompt, prompt_len=12)])
    assert (table.num_positions, table.configured.agreement, table.coverage) == (39 - 10, 1.0, 1.0)
    assert check_head(head, [replace(sample, target_argmax=wrong_prompt)]).configured.agreement < 1.0
