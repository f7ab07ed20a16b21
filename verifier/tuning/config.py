"""Settings of ``breakeven tune``, section [tune]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wire.settings import ConfigError, setting

__all__ = ["TuneConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """What is tried, and where results are kept. The engine to tune is section [sglang]."""

    plan: str = setting(
        "auto", "Name in configs/plans or a .toml file; auto = cpu or pcie, by --device in sglang.args."
    )
    state_dir: str = setting("auto", "Ledger, logs, report and best profile; auto = ~/.cache/breakeven/tune.")
    only: tuple[str, ...] = setting((), "Names of the plan's experiments to run; empty = all, then combinations.")
    max_trials: int = setting(0, "Engine starts until it pauses; the same command goes on. 0 = no limit.")
    best_profile: str = setting("auto", "Where the best profile is written; auto = best-PROFILE.toml in state_dir.")

    @property
    def resolved_state_dir(self) -> Path:
        """``state_dir`` with "auto" resolved."""
        return Path.home() / ".cache" / "breakeven" / "tune" if self.state_dir == "auto" else Path(self.state_dir)

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the key and what is allowed.
        """
        if not 0 <= self.max_trials <= 1_000_000:
            raise ConfigError("tune.max_trials", "must be between 0 and a million")
