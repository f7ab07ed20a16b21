"""What comes next, from the ledger's rows alone."""

from __future__ import annotations

from verifier.tuning.change import Change
from verifier.tuning.records import ExperimentRow, Kind, VerdictName
from verifier.tuning.schedule import best_changes, next_combination, order_of_sides


def change(key: str, value: str = "1") -> Change:
    return Change(kind="arg", key=key, values=(value,))


A, B, C = change("--a"), change("--b"), change("--c")


def row(
    name: str,
    changes: tuple[Change, ...],
    verdict: VerdictName | None,
    gain: float = 0.0,
    *,
    kind: Kind = "single",
    base: tuple[Change, ...] = (),
) -> ExperimentRow:
    return ExperimentRow(
        experiment_id=0,
        name=name,
        kind=kind,
        rank=0,
        base=base,
        change=changes,
        state="planned" if verdict is None else "done",
        verdict=verdict,
        detail={"gain": gain},
    )


def test_sides_alternate_and_neighbours_are_pairs() -> None:
    assert order_of_sides(3) == ("base", "changed", "changed", "base", "base", "changed")


def test_nothing_won_nothing_to_combine() -> None:
    rows = [row("a", (A,), "slower"), row("b", (B,), "crashed"), row("c", (C,), "same")]
    assert next_combination(rows) is None
    assert best_changes(rows) == ()


def test_one_winner_is_the_best() -> None:
    rows = [row("a", (A,), "faster", 0.1), row("b", (B,), "same")]
    assert next_combination(rows) is None
    assert best_changes(rows) == (A,)


def test_winners_are_added_one_at_a_time_and_the_sum_is_confirmed() -> None:
    rows = [row("a", (A,), "faster", 0.05), row("b", (B,), "faster", 0.20), row("c", (C,), "faster", 0.10)]
    first = next_combination(rows)
    assert first is not None
    assert (first.kind, first.base, first.change) == ("combination", (B,), (C,))
    rows.append(row(first.name, first.change, "same", kind="combination", base=first.base))
    second = next_combination(rows)
    assert second is not None
    assert (second.base, second.change) == ((B,), (A,))  # C brought nothing on top
    rows.append(row(second.name, second.change, "faster", 0.04, kind="combination", base=second.base))
    confirmation = next_combination(rows)
    assert confirmation is not None
    assert (confirmation.kind, confirmation.base, confirmation.change) == ("confirmation", (), (B, A))
    assert best_changes(rows) == (B,)  # not confirmed yet
    rows.append(row("all", (B, A), "faster", 0.24, kind="confirmation"))
    assert next_combination(rows) is None
    assert best_changes(rows) == (B, A)


def test_a_sum_that_is_not_confirmed_leaves_the_best_single_one() -> None:
    rows = [
        row("a", (A,), "faster", 0.2),
        row("b", (B,), "faster", 0.1),
        row("b on a", (B,), "faster", 0.1, kind="combination", base=(A,)),
        row("all", (A, B), "same", kind="confirmation"),
    ]
    assert next_combination(rows) is None
    assert best_changes(rows) == (A,)


def test_two_values_of_one_setting_are_not_combined() -> None:
    rows = [row("a1", (A,), "faster", 0.1), row("a2", (change("--a", "2"),), "faster", 0.2)]
    assert next_combination(rows) is None
    assert best_changes(rows) == (change("--a", "2"),)


def test_an_unfinished_combination_is_asked_for_again() -> None:
    rows = [row("a", (A,), "faster", 0.2), row("b", (B,), "faster", 0.1)]
    rows.append(row("b on a", (B,), None, kind="combination", base=(A,)))
    again = next_combination(rows)
    assert again is not None
    assert (again.base, again.change) == ((A,), (B,))
