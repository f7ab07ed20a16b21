"""Does this head draft for this target? Teacher-forced agreement under every convention it may have been trained with.

A wrong convention is never an error, only slow: verification hides it. So the head is run on a few hundred tokens of
the target's own text with the aux layers one lower, as configured and one higher, with both meanings of the residual,
and with its configured RoPE base and 10000. The configured cell should be the best one, and well above nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cpukernels.ports import ragged_rows
from cpukernels.reference import TorchKernels
from drafter.head.weights import HeadWeights
from drafter.model import DraftModel

__all__ = ["AgreementCell", "AgreementTable", "CheckSample", "Verdict", "check_head", "judge"]

_AUX_SHIFTS = (0, -1, 1)
_TRAINER_THETA = 10_000.0  # what the official trainer uses, whatever config.json says
_MIN_AGREEMENT = 0.1
_MIN_LEAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSample:
    """A piece of the target's own text.

    Fields:
        token_ids: [T] int64.
        features: by aux shift -1, 0, +1: [T, F] float32, the inputs of the configured layers plus the shift. A missing
            shift is left out of the table.
        target_argmax: [T] int64; entry i is the target's choice of token i + 1 after token_ids[: i + 1].
        prompt_len: guesses of these first tokens are not counted: a head is trained on what the target wrote.
    """

    token_ids: torch.Tensor
    features: Mapping[int, torch.Tensor]
    target_argmax: torch.Tensor
    prompt_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementCell:
    """One combination of conventions and the share of positions where draft and target agree."""

    aux_shift: int
    norm_before_residual: bool
    rope_theta: float
    agreement: float
    is_configured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementTable:
    """All cells, best first. ``coverage``: share of the target's choices that the draft vocabulary holds at all."""

    cells: tuple[AgreementCell, ...]
    num_positions: int
    coverage: float

    @property
    def configured(self) -> AgreementCell:
        """The cell the drafter would run with."""
        return next(cell for cell in self.cells if cell.is_configured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """kind: "ok", "too_low" (below 0.1) or "other_is_better"; the message says what to set."""

    kind: Literal["ok", "too_low", "other_is_better"]
    message: str


def check_head(head: HeadWeights, samples: Sequence[CheckSample]) -> AgreementTable:
    """Run every combination over the samples; a few seconds for 500 tokens.

    Raises:
        ValueError: no sample has two tokens, or the configured features (shift 0) are missing.
    """
    samples = [sample for sample in samples if len(sample.token_ids) > _first_slot(sample) + 1]
    if not samples or any(0 not in sample.features for sample in samples):
        raise ValueError("need samples of at least two tokens with features at shift 0")
    config = head.config
    num_positions = sum(len(sample.token_ids) - 1 - _first_slot(sample) for sample in samples)
    thetas = dict.fromkeys((config.rope.theta, _TRAINER_THETA))
    cells = []
    for theta in thetas:
        for residual in (config.norm_before_residual, not config.norm_before_residual):
            tried = replace(config, norm_before_residual=residual, rope=replace(config.rope, theta=theta))
            model = _model(replace(head, config=tried), samples)
            for shift in _AUX_SHIFTS:
                if any(shift not in sample.features for sample in samples):
                    continue
                agreed = sum(_count_agreements(model, sample, shift) for sample in samples)
                is_configured = shift == 0 and tried == config
                cells.append(
                    AgreementCell(
                        aux_shift=shift,
                        norm_before_residual=residual,
                        rope_theta=theta,
                        agreement=agreed / num_positions,
                        is_configured=is_configured,
                    )
                )
    cells.sort(key=lambda cell: (-cell.agreement, not cell.is_configured))
    covered = sum(
        int(torch.isin(sample.target_argmax[1 + _first_slot(sample) :], head.target_ids).sum()) for sample in samples
    )
    return AgreementTable(cells=tuple(cells), num_positions=num_positions, coverage=covered / num_positions)


def judge(table: AgreementTable) -> Verdict:
    """Refuse below 0.1, or when another convention leads by more than 0.05 and three standard errors."""
    configured, best = table.configured, table.cells[0]
    error = math.sqrt(max(best.agreement * (1 - best.agreement), 1e-9) / table.num_positions)
    if best.agreement - configured.agreement > max(_MIN_LEAD, 3 * error):
        return Verdict(
            kind="other_is_better",
            message=f"configured conventions agree on {configured.agreement:.3f} of the positions, others on "
            f"{best.agreement:.3f}: {_describe(configured, best)}",
        )
    if configured.agreement < _MIN_AGREEMENT:
        return Verdict(
            kind="too_low",
            message=f"head and target agree on {configured.agreement:.3f} of the positions, less than "
            f"{_MIN_AGREEMENT}: another target, aux layers, vocabulary map or chat template than it was trained with",
        )
    return Verdict(kind="ok", message=f"head and target agree on {configured.agreement:.3f} of the positions")


def _describe(configured: AgreementCell, best: AgreementCell) -> str:
    hints = []
    if best.aux_shift != configured.aux_shift:
        hints.append(f"set drafter.aux_layer_ids {best.aux_shift:+d} each")
    if best.norm_before_residual != configured.norm_before_residual:
        hints.append(f"set drafter.norm_before_residual = {'yes' if best.norm_before_residual else 'no'!r}")
    if best.rope_theta != configured.rope_theta:
        hints.append(f"set drafter.rope_theta = {best.rope_theta:g}")
    return ", ".join(hints)


def _model(head: HeadWeights, samples: Sequence[CheckSample]) -> DraftModel:
    return DraftModel(head, TorchKernels(), num_positions=max(len(sample.token_ids) for sample in samples))


def _count_agreements(model: DraftModel, sample: CheckSample, shift: int) -> int:
    """Slot i (features i, token i + 1) guesses token i + 2, which the target chose after token i + 1."""
    slots = len(sample.token_ids) - 1
    with torch.inference_mode():
        hidden = model.fuse(sample.features[shift][:slots].to(torch.float32))
        rows = ragged_rows([model.new_cache()], [slots])
        logits, _ = model.guess(model.forward(hidden, sample.token_ids[1:], rows, rows.positions))
    guesses = torch.from_numpy(model.target_ids)[logits.argmax(dim=1)]
    return int((guesses == sample.target_argmax[1:])[_first_slot(sample) :].sum())


def _first_slot(sample: CheckSample) -> int:
    """The first slot that guesses a token of the answer, which starts at ``prompt_len``."""
    return max(0, sample.prompt_len - 2)
