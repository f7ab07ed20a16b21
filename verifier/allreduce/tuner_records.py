"""What the all-reduce tuner tries, measures and decides. Frozen; crosses process borders as JSON."""

from __future__ import annotations

import hashlib

import msgspec

__all__ = ["Candidate", "Decision", "Job", "Measured", "RankReport", "SizeTimes", "Spec"]


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are measured.

    Fields:
        world: ranks. hidden: elements of a row; 7168 bfloat16 are 14 KiB.
        rows: message sizes, in rows. calls: all-reduces in one series, 122 in a Kimi-K2.5 pass.
        replays: how often a series is timed. max_skew_us: ranks arrive so much apart, at random, in the second series.
        timeout_s: a candidate that is not done by then hangs.
    """

    world: int
    hidden: int = 7168
    rows: tuple[int, ...] = (1, 2, 3, 4, 8, 16, 32, 64)
    calls: int = 122
    replays: int = 50
    max_skew_us: float = 20.0
    timeout_s: float = 120.0
    seed: int = 11

    def num_bytes(self, rows: int) -> int:
        """Of a message of so many rows."""
        return rows * self.hidden * 2


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy with its settings.

    Fields:
        backend: "module:class", a Backend. options: handed to it. env: read by the library once, at its start, so
            candidates with different env can't serve together.
    """

    name: str
    backend: str
    options: dict[str, str | int] = {}
    env: tuple[tuple[str, str], ...] = ()


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank process is told on stdin."""

    candidate: Candidate
    spec: Spec


class SizeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One size on one rank: microseconds per call, one entry per replay, what is not the all-reduce subtracted."""

    rows: int
    even_us: tuple[float, ...]
    skewed_us: tuple[float, ...]


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says. problem: "" or why it can't be used; wrong results come here too."""

    rank: int
    problem: str = ""
    times: tuple[SizeTimes, ...] = ()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate at one size: the slowest rank's median and 99th percentile, with and without skew, in us."""

    rows: int
    median_us: float
    p99_us: float
    skewed_median_us: float
    skewed_p99_us: float


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank uses.

    Fields:
        key: of machine, versions and spec it holds for. env: set before the ranks start.
        table: (rows, candidate's name), the strategy up to that many rows, smallest first.
        measured: of the chosen ones, for checking at start. rejected: candidate to why it can't be used.
    """

    key: str
    env: tuple[tuple[str, str], ...]
    table: tuple[tuple[int, str], ...]
    candidates: tuple[Candidate, ...]
    measured: dict[str, tuple[Measured, ...]]
    rejected: dict[str, str]

    @property
    def digest(self) -> str:
        """Equal on all ranks, or they must not start: half a group with another strategy hangs."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()

    def strategy_for(self, rows: int) -> str | None:
        """Name of the candidate for a message of so many rows; None above the table."""
        return next((name for most, name in self.table if rows <= most), None)
