"""The ledger of experiments: SQLite in WAL mode, so that a kill at any point loses and repeats nothing that was done.

A trial's result and its state change in one transaction, an experiment's verdict likewise. An experiment is known by
(setup key, kind of comparison, base, change): the same one is never entered twice.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verifier.tuning.change import Change, change_from_json
from verifier.tuning.errors import LedgerBusy
from verifier.tuning.process_tree import Leader
from verifier.tuning.records import ExperimentRow, Kind, Side, TrialResult, TrialRow, VerdictName

__all__ = ["Ledger"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS setups (
    setup_key TEXT PRIMARY KEY, facts TEXT NOT NULL, first_seen TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS experiments (
    id INTEGER PRIMARY KEY, setup_key TEXT NOT NULL REFERENCES setups, identity TEXT NOT NULL, name TEXT NOT NULL,
    kind TEXT NOT NULL, rank INTEGER NOT NULL, base TEXT NOT NULL, change TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('planned', 'running', 'done')), verdict TEXT, detail TEXT NOT NULL,
    planned_at TEXT NOT NULL, ended_at TEXT, UNIQUE (setup_key, identity));
CREATE TABLE IF NOT EXISTS trials (
    id INTEGER PRIMARY KEY, experiment_id INTEGER NOT NULL REFERENCES experiments, sequence INTEGER NOT NULL,
    side TEXT NOT NULL, state TEXT NOT NULL CHECK (state IN ('planned', 'running', 'done')),
    interruptions INTEGER NOT NULL DEFAULT 0, machine_downs INTEGER NOT NULL DEFAULT 0,
    boot TEXT, pid INTEGER, start_ticks INTEGER, begun_at TEXT, ended_at TEXT, outcome TEXT, result TEXT,
    provenance TEXT, UNIQUE (experiment_id, sequence));
"""
_VERSION = 1


class Ledger:
    """One file, one campaign at a time; close it after use.

    Args:
        path: made if missing.

    Raises:
        LedgerBusy: another process has it open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise LedgerBusy(f"{path} is in use by another campaign") from None
        os.set_inheritable(self._lock.fileno(), False)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA foreign_keys=ON")
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version={_VERSION}")

    def close(self) -> None:
        """Close file and lock."""
        self._db.close()
        self._lock.close()

    # ------------------------------------------------------------ setups and experiments

    def enter_setup(self, setup_key: str, facts: dict[str, Any]) -> None:
        """Remember what a setup key stands for."""
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO setups VALUES (?, ?, ?)", (setup_key, json.dumps(facts, sort_keys=True), _now())
            )

    def plan_experiment(
        self,
        setup_key: str,
        *,
        name: str,
        kind: Kind,
        rank: int,
        base: Sequence[Change],
        change: Sequence[Change],
        sides: Sequence[Side],
    ) -> None:
        """Enter an experiment with its trials, unless this setup has it already."""
        identity = _identity(kind, base, change)
        with self._transaction():
            cursor = self._db.execute(
                "INSERT OR IGNORE INTO experiments (setup_key, identity, name, kind, rank, base, change, state, detail,"
                " planned_at) VALUES (?, ?, ?, ?, ?, ?, ?, 'planned', '{}', ?)",
                (setup_key, identity, name, kind, rank, _dump(base), _dump(change), _now()),
            )
            if cursor.rowcount == 0:
                return
            self._db.executemany(
                "INSERT INTO trials (experiment_id, sequence, side, state) VALUES (?, ?, ?, 'planned')",
                [(cursor.lastrowid, sequence, side) for sequence, side in enumerate(sides)],
            )

    def extend_experiment(self, experiment_id: int, sides: Sequence[Side], *, first: int) -> None:
        """Open a decided experiment again for more trials, numbered from ``first``."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO trials (experiment_id, sequence, side, state) VALUES (?, ?, ?, 'planned')",
                [(experiment_id, first + i, side) for i, side in enumerate(sides)],
            )
            self._db.execute(
                "UPDATE experiments SET state = 'running', verdict = NULL, ended_at = NULL WHERE id = ?",
                (experiment_id,),
            )

    def end_experiment(self, experiment_id: int, verdict: VerdictName, detail: dict[str, Any]) -> None:
        """Close it; what is still planned of it is dropped."""
        with self._transaction():
            self._db.execute("DELETE FROM trials WHERE experiment_id = ? AND state = 'planned'", (experiment_id,))
            self._db.execute(
                "UPDATE experiments SET state = 'done', verdict = ?, detail = ?, ended_at = ? WHERE id = ?",
                (verdict, json.dumps(detail, sort_keys=True), _now(), experiment_id),
            )

    def experiments(self, setup_key: str) -> list[ExperimentRow]:
        """In the order they were entered."""
        rows = self._db.execute(
            "SELECT id, name, kind, rank, base, change, state, verdict, detail FROM experiments"
            " WHERE setup_key = ? ORDER BY id",
            (setup_key,),
        )
        return [
            ExperimentRow(
                experiment_id=row[0],
                name=row[1],
                kind=row[2],
                rank=row[3],
                base=_load(row[4]),
                change=_load(row[5]),
                state=row[6],
                verdict=row[7],
                detail=json.loads(row[8]),
            )
            for row in rows
        ]

    # ------------------------------------------------------------ trials

    def trials(self, setup_key: str) -> list[TrialRow]:
        """All of a setup, in the order they are done."""
        rows = self._db.execute(
            "SELECT t.id, t.experiment_id, t.sequence, t.side, t.state, t.interruptions, t.result, t.provenance"
            " FROM trials t JOIN experiments e ON e.id = t.experiment_id WHERE e.setup_key = ?"
            " ORDER BY t.begun_at IS NULL, t.begun_at, t.experiment_id, t.sequence",
            (setup_key,),
        )
        return [
            TrialRow(
                trial_id=row[0],
                experiment_id=row[1],
                sequence=row[2],
                side=row[3],
                state=row[4],
                interruptions=row[5],
                result=None if row[6] is None else msgspec.json.decode(row[6], type=TrialResult),
                provenance=None if row[7] is None else json.loads(row[7]),
            )
            for row in rows
        ]

    def begin_trial(self, trial_id: int, *, boot: str) -> None:
        """Planned → running."""
        with self._transaction():
            self._db.execute(
                "UPDATE trials SET state = 'running', begun_at = ?, boot = ? WHERE id = ? AND state = 'planned'",
                (_now(), boot, trial_id),
            )
            self._db.execute(
                "UPDATE experiments SET state = 'running' WHERE id = (SELECT experiment_id FROM trials WHERE id = ?)",
                (trial_id,),
            )

    def note_leader(self, trial_id: int, leader: Leader) -> None:
        """Remember a running trial's first process, for cleaning up after a kill."""
        with self._transaction():
            self._db.execute(
                "UPDATE trials SET pid = ?, start_ticks = ?, boot = ? WHERE id = ?",
                (leader.pid, leader.start_ticks, leader.boot, trial_id),
            )

    def end_trial(self, trial_id: int, result: TrialResult, provenance: dict[str, Any]) -> None:
        """Running → done, with everything that was found, in one transaction."""
        with self._transaction():
            self._db.execute(
                "UPDATE trials SET state = 'done', ended_at = ?, outcome = ?, result = ?, provenance = ?"
                " WHERE id = ? AND state = 'running'",
                (_now(), result.outcome, msgspec.json.encode(result).decode(), json.dumps(provenance), trial_id),
            )

    def interrupted(self) -> list[tuple[int, Leader | None, str]]:
        """Trials a killed campaign left running: id, first process if it was noted, and the boot they began under."""
        rows = self._db.execute("SELECT id, pid, start_ticks, boot FROM trials WHERE state = 'running'").fetchall()
        return [
            (row[0], None if row[1] is None else Leader(pid=row[1], start_ticks=row[2], boot=row[3]), row[3])
            for row in rows
        ]

    def replan_trial(self, trial_id: int, *, by_machine: bool) -> int:
        """Running → planned, after what was left of it is gone; returns how often the machine went down under it."""
        with self._transaction():
            self._db.execute(
                "UPDATE trials SET state = 'planned', begun_at = NULL, pid = NULL, start_ticks = NULL, boot = NULL,"
                " interruptions = interruptions + 1, machine_downs = machine_downs + ? WHERE id = ?"
                " AND state = 'running'",
                (int(by_machine), trial_id),
            )
            row = self._db.execute("SELECT machine_downs FROM trials WHERE id = ?", (trial_id,)).fetchone()
        return int(row[0])

    # ------------------------------------------------------------ reading

    def facts(self, setup_key: str) -> dict[str, Any]:
        """What a setup key stands for."""
        row = self._db.execute("SELECT facts FROM setups WHERE setup_key = ?", (setup_key,)).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _identity(kind: Kind, base: Sequence[Change], change: Sequence[Change]) -> str:
    # A combination against its base is the same comparison as a single change against known-good: only a
    # confirmation measures something else with the same settings.
    parts = [kind == "confirmation", _dump(sorted(base, key=repr)), _dump(sorted(change, key=repr))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _dump(changes: Sequence[Change]) -> str:
    return json.dumps([change.as_json() for change in changes])


def _load(text: str) -> tuple[Change, ...]:
    return tuple(change_from_json(each) for each in json.loads(text))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
