"""What the ledger holds: trials, their results, and what an experiment came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from verifier.tuning.change import Change

__all__ = [
    "COMPARED",
    "Diagnosed",
    "ExperimentRow",
    "Kind",
    "Outcome",
    "Series",
    "Side",
    "TrialResult",
    "TrialRow",
    "VerdictName",
]

Kind = Literal["single", "combination", "confirmation"]
Side = Literal["base", "changed"]
# How one engine start ended.
Outcome = Literal["measured", "crashed", "stalled", "late", "hung", "machine_down"]
# What an experiment came to. The first four compare ("undecided": the noise hides more than rules.resolution);
# "wrong_output" and the outcomes above end it at once.
VerdictName = Literal[
    "faster",
    "slower",
    "same",
    "undecided",
    "wrong_output",
    "crashed",
    "stalled",
    "late",
    "hung",
    "machine_down",
    "not_possible",
]


# Verdicts that rest on a comparison.
COMPARED: Final = ("faster", "slower", "same", "undecided")


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one metric in one engine start.

    Fields:
        metric: "plain_tok_per_s" (all streams together) or "verify_ms" (client's round trip of one batch).
        batch_size: B. num_draft_tokens: K, 0 for plain. values: one per window or round.
    """

    metric: Literal["plain_tok_per_s", "verify_ms"]
    batch_size: int
    num_draft_tokens: int
    values: tuple[float, ...]


class Diagnosed(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's diagnosis, as it stood in the log."""

    name: str
    cause: str
    remedy: str
    source: str
    evidence: str


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """One engine start.

    Fields:
        outcome, message: how it ended, in a word and in a sentence. phase: where it stood if it did not serve.
        series: what was measured. answer: [batch-size-1 greedy ids], to notice wrong output.
        load_s: from start to ready. is_reverted: nothing of it was left after it was stopped.
        log_path: all it wrote. log_tail: its last lines, kept for what was not measured.
    """

    outcome: Outcome
    message: str = ""
    phase: str = ""
    diagnosis: Diagnosed | None = None
    series: tuple[Series, ...] = ()
    answer: tuple[int, ...] = ()
    load_s: float = 0.0
    is_reverted: bool = True
    log_path: str = ""
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A trial as the ledger has it. state: planned → running → done; a killed one goes back to planned."""

    trial_id: int
    experiment_id: int
    sequence: int
    side: Side
    state: Literal["planned", "running", "done"]
    interruptions: int
    result: TrialResult | None
    provenance: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRow:
    """An experiment as the ledger has it: ``base`` against ``base`` and ``change``."""

    experiment_id: int
    name: str
    kind: Kind
    rank: int
    base: tuple[Change, ...]
    change: tuple[Change, ...]
    state: Literal["planned", "running", "done"]
    verdict: VerdictName | None
    detail: dict[str, Any]
