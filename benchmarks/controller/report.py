"""Runs every policy on every workload, and writes the table, the JSON and the plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.controller.informed import Informed, regimes_of
from benchmarks.controller.policies import policies
from benchmarks.controller.simulator import Result, simulate
from benchmarks.controller.workloads import SEED_K, Workload
from gateway.speculation.controller import ControllerLimits

__all__ = ["Row", "markdown", "plot", "row_json", "run_workload", "seed_check"]

_NO_RIVALS = ("oracle", "plain", "always", "ours")
STATIC_K = 4  # K of the policies that do not choose one; the workloads' reference K


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload: mean over seeds of each policy, in ms a token of one stream.

    changes_per_200: state changes of our controller in 200 rounds. shift_tokens: mean tokens from the begin of each
    phase until our controller first speculates in it. informed_ms: of the bound on causal policies, where it applies.
    """

    workload: str
    ms_per_token: dict[str, float]
    changes_per_200: float
    shift_tokens: list[float]
    informed_ms: float | None = None

    def regret(self, policy: str) -> float:
        """Time over the oracle's, as a share."""
        return self.ms_per_token[policy] / self.ms_per_token["oracle"] - 1.0

    def informed_regret(self) -> float | None:
        """Of the bound on causal policies; None where it does not apply."""
        return None if self.informed_ms is None else self.informed_ms / self.ms_per_token["oracle"] - 1.0

    def loss_to_plain(self, policy: str) -> float:
        """Time over plain decode's, as a share; < 0 where speculation gains."""
        return self.ms_per_token[policy] / self.ms_per_token["plain"] - 1.0


def run_workload(workload: Workload, limits: ControllerLimits, *, seeds: Sequence[int], has_rivals: bool = True) -> Row:
    """Every policy on one workload; without rivals only the oracle, plain, always and ours."""
    k = SEED_K if workload.name.startswith("seed") else STATIC_K
    ms: dict[str, float] = {}
    ours: list[Result] = []
    for name, make in policies(limits, k).items():
        if not has_rivals and name not in _NO_RIVALS:
            continue
        results = [simulate(workload, make(), seed=seed) for seed in seeds]
        ms[name] = sum(result.ms_per_token for result in results) / len(results)
        ours = results
    rounds = sum(result.num_rounds for result in ours)
    regimes = regimes_of(workload)
    informed_ms = None
    if regimes is not None:
        bound = Informed(regimes, workload.phases[0].costs, limits.candidates, is_per_answer=len(workload.phases) == 1)
        runs = [simulate(workload, bound.fresh(), seed=seed) for seed in seeds]
        informed_ms = sum(run.ms_per_token for run in runs) / len(runs)
    return Row(
        workload=workload.name,
        ms_per_token=ms,
        changes_per_200=200.0 * sum(result.num_switches for result in ours) / rounds,
        shift_tokens=[
            sum(tokens) / len(ours) for tokens in zip(*(result.shift_tokens for result in ours), strict=True)
        ],
        informed_ms=informed_ms,
    )


def seed_check(row: Row) -> dict[str, float]:
    """The founding case's numbers: tokens a second, and ours over the better of plain and static speculation."""
    rate = {name: 1e3 / ms for name, ms in row.ms_per_token.items()}
    return {
        "plain_tok_per_s": rate["plain"],
        "static_tok_per_s": rate["always"],
        "ours_tok_per_s": rate["ours"],
        "over_better_mode": rate["ours"] / max(rate["plain"], rate["always"]),
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table: ms a token, and our regret, loss to plain and state changes."""
    names = list(rows[0].ms_per_token)
    head = ["workload", *names, "regret", "bound", "vs plain", "changes / 200"]
    lines = ["| " + " | ".join(head) + " |", "|" + "--|" * len(head)]
    for row in rows:
        cells = [row.workload, *(f"{row.ms_per_token[name]:.2f}" for name in names)]
        bound = row.informed_regret()
        cells += [f"{row.regret('ours'):+.1%}", "" if bound is None else f"{bound:+.1%}"]
        cells += [f"{row.loss_to_plain('ours'):+.1%}", f"{row.changes_per_200:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def row_json(row: Row) -> dict[str, Any]:
    """A row as plain JSON values."""
    return {
        "workload": row.workload,
        "ms_per_token": {name: round(ms, 4) for name, ms in row.ms_per_token.items()},
        "regret": {name: round(row.regret(name), 5) for name in row.ms_per_token},
        "informed_regret": None
        if row.informed_ms is None
        else round(row.informed_ms / row.ms_per_token["oracle"] - 1, 5),
        "loss_to_plain": round(row.loss_to_plain("ours"), 5),
        "changes_per_200_rounds": round(row.changes_per_200, 4),
        "tokens_until_first_draft_per_phase": [round(tokens, 1) for tokens in row.shift_tokens],
        "seed_check": {name: round(value, 4) for name, value in seed_check(row).items()},
    }


def plot(workload: Workload, limits: ControllerLimits, path: Path, *, seed: int) -> None:
    """State, acceptance and delivered rate over time, for ours beside oracle and plain."""
    # matplotlib takes a second to load and smoke runs do not draw.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    makers = policies(limits, STATIC_K)
    every = max(20, sum(phase.tokens * phase.batch_size for phase in workload.phases) // 300)
    runs = {
        name: simulate(workload, makers[name](), seed=seed, sample_every=every) for name in ("oracle", "plain", "ours")
    }
    figure, axes = pyplot.subplots(3, 1, figsize=(10, 7), sharex=True)
    ours = runs["ours"].samples
    tokens = [sample.token for sample in ours]
    axes[0].step(tokens, [1 if sample.state == "ON" else 0 for sample in ours], where="post", color="tab:blue")
    axes[0].set_yticks([0, 1], ["plain", "speculating"])
    axes[0].set_title(workload.name)
    axes[1].plot(tokens, [sample.acceptance for sample in ours], color="tab:green")
    axes[1].set_ylabel("acceptance rate")
    axes[1].set_ylim(0, 1)
    for name, run in runs.items():
        axes[2].plot([s.token for s in run.samples], [s.tok_per_s for s in run.samples], label=name, linewidth=1)
    axes[2].set_ylabel("delivered tok/s a stream")
    axes[2].set_xlabel("tokens")
    axes[2].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """One result file."""
    path.write_text(json.dumps(facts, indent=1) + "\n")
