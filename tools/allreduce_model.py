"""Check by exhaustion that the all-reduce's buffers may be used again: every interleaving of a few ranks and calls.

    python -m tools.allreduce_model

The model is the protocol of verifier/allreduce/csrc/protocol.h and collective.h without the arithmetic. A rank's stores
wait in its own queue and become visible in any order, also after the rank's next call has begun (not the one after
that: a kernel that has ended has its stores out, and the model grants it a call more). Only stores to one address keep
their order, and a release becomes visible after everything before it. A datum is the number of the call that wrote it,
so reading anything but the current call's is a fault; so is a state in which nobody can move before the end.

Small numbers stand for large ones: the wire epoch wraps after ``wire_modulus`` calls (2^32 - 1), the sweep comes every
``sweep_period`` (2^24), a wide call uses two words of a lane and a narrow one only the first.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = [
    "BULK",
    "ISLAND",
    "NEGATIVE_CONTROLS",
    "ONE_SHOT",
    "PROTOCOL",
    "TWO_SHOT",
    "Kind",
    "Model",
    "Verdict",
    "check",
]

Shape = Literal["one-shot", "two-shot", "island"]
Location = tuple[int, int, int, str, int]  # holder, buffer, source, phase, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one call does."""

    shape: Shape = "one-shot"
    bulk: bool = False
    wide: bool = False
    pull: bool = False  # readers fetch from the writer's own slab


ONE_SHOT, TWO_SHOT, ISLAND = Kind(), Kind(shape="two-shot"), Kind(shape="island")
BULK = Kind(bulk=True, wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A protocol, possibly a broken one, and the calls that are made."""

    name: str
    calls: tuple[Kind, ...]
    ranks: int = 2
    buffers: int = 3
    wire_modulus: int = 1_000_000
    sweep_period: int | None = None
    has_release: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``fault``: what went wrong, None if nothing can; ``trace``: the steps that lead there."""

    fault: str | None
    num_states: int
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Store:
    call: int
    location: int
    value: tuple[int, int]  # call number, wire epoch
    is_release: bool
    text: str


@dataclass(frozen=True, slots=True)
class _Load:
    location: int
    call: int
    wire: int | None  # wait for this epoch; None = read at once
    text: str


@dataclass(slots=True)
class _Programs:
    """Per rank: loads in program order, and the stores issued before load i (the last entry: after the last load)."""

    loads: list[list[_Load]]
    stores: list[list[list[_Store]]]
    num_locations: int = 0
    _locations: dict[Location, int] = field(default_factory=dict)

    def locate(self, location: Location) -> int:
        return self._locations.setdefault(location, len(self._locations))


def _phases(model: Model, kind: Kind, rank: int) -> Iterator[tuple[str, list[int]]]:
    """(phase, partners): what a rank sends to and awaits from whom, in order."""
    everyone = [peer for peer in range(model.ranks) if peer != rank]
    if kind.shape == "one-shot":
        yield "scatter", everyone
    elif kind.shape == "two-shot":
        yield "scatter", everyone
        yield "gather", everyone
    else:  # two islands
        size = model.ranks // 2
        mine = [peer for peer in everyone if peer // size == rank // size]
        yield "scatter", mine
        yield "cross", [(rank + size) % model.ranks]
        yield "gather", mine


def _compile(model: Model) -> _Programs:
    programs = _Programs(loads=[[] for _ in range(model.ranks)], stores=[[[]] for _ in range(model.ranks)])
    phases_used = sorted({phase for kind in model.calls for phase, _ in _phases(model, kind, 0)})
    words_used = {0} | {1 for kind in model.calls if kind.wide} | {2 for kind in model.calls if kind.bulk}
    for rank in range(model.ranks):
        for number, kind in enumerate(model.calls, start=1):
            _compile_call(model, programs, rank, number, kind, phases_used, sorted(words_used))
    programs.num_locations = len(programs._locations)
    return programs


def _compile_call(
    model: Model,
    programs: _Programs,
    rank: int,
    number: int,
    kind: Kind,
    phases_used: list[str],
    words_used: list[int],
) -> None:
    wire = number % model.wire_modulus + 1
    buffer = number % model.buffers
    out, loads = programs.stores[rank], programs.loads[rank]

    def store(holder: int, buffer: int, phase: str, word: int, value: tuple[int, int], release: bool = False) -> None:
        location = programs.locate((holder, buffer, rank, phase, word))
        text = f"rank {rank} call {number}: {phase} word {word} of rank {holder} = {value}"
        out[-1].append(_Store(number, location, value, release, text))

    def load(holder: int, source: int, phase: str, word: int, expected: int | None) -> None:
        location = programs.locate((holder, buffer, source, phase, word))
        loads.append(_Load(location, number, expected, f"rank {rank} call {number}: {phase} word {word} of {source}"))
        out.append([])

    if model.sweep_period is not None and number % model.sweep_period < 3:
        for holder in range(model.ranks):
            for phase in phases_used:
                for word in words_used:
                    if holder != rank or any(each.pull for each in model.calls):
                        store(holder, (buffer + 1) % model.buffers, phase, word, (0, 0))
    for phase, partners in _phases(model, kind, rank):
        words = (0, 1) if kind.wide else (0,)
        for holder in [rank] if kind.pull else partners:
            for word in words:
                store(holder, buffer, phase, word, (number, 0 if kind.bulk else wire))
            if kind.bulk:  # word 2 is the flag
                store(holder, buffer, phase, 2, (number, wire), release=model.has_release)
        for source in partners:
            holder = source if kind.pull else rank
            if kind.bulk:
                load(holder, source, phase, 2, wire)
            for word in words:
                load(holder, source, phase, word, None if kind.bulk else wire)


# pcs, queues of store numbers per rank, memory
_State = tuple[tuple[int, ...], tuple[tuple[_Store, ...], ...], tuple[tuple[int, int], ...]]


def check(model: Model, *, max_states: int = 5_000_000) -> Verdict:
    """Visit every reachable state, breadth first, so that a fault comes with a shortest trace."""
    programs = _compile(model)
    start: _State = (
        (0,) * model.ranks,
        tuple(tuple(stores[0]) for stores in programs.stores),
        ((0, 0),) * programs.num_locations,
    )
    came_from: dict[_State, tuple[_State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        moved = False
        for following, text, fault in _steps(programs, state):
            moved = True
            if fault is not None:
                return Verdict(fault=fault, num_states=len(came_from), trace=(*_trace(came_from, state), text))
            if following not in came_from:
                came_from[following] = (state, text)
                queue.append(following)
        if not moved and any(pc < len(loads) for pc, loads in zip(state[0], programs.loads, strict=True)):
            return Verdict(fault="nobody can move", num_states=len(came_from), trace=_trace(came_from, state))
        if len(came_from) > max_states:
            raise MemoryError(f"{model.name}: more than {max_states} states")
    return Verdict(fault=None, num_states=len(came_from))


def _steps(programs: _Programs, state: _State) -> Iterator[tuple[_State, str, str | None]]:
    pcs, queues, memory = state
    for rank, queue in enumerate(queues):
        for at, store in enumerate(queue):
            if store.is_release and at > 0:
                continue
            if any(earlier.location == store.location for earlier in queue[:at]):
                continue
            left = (*queues[:rank], queue[:at] + queue[at + 1 :], *queues[rank + 1 :])
            index = store.location
            yield (pcs, left, (*memory[:index], store.value, *memory[index + 1 :])), store.text, None
        pc = pcs[rank]
        if pc == len(programs.loads[rank]):
            continue
        load = programs.loads[rank][pc]
        call, wire = memory[load.location]
        if load.wire is not None and wire != load.wire:
            continue
        if call != load.call:
            yield state, f"{load.text} finds call {call}", f"{load.text} takes call {call} for its own"
            continue
        new = programs.stores[rank][pc + 1]
        if new and any(store.call + 1 < new[-1].call for store in queues[rank]):
            continue
        issued = (*queues[:rank], queue + tuple(new), *queues[rank + 1 :])
        yield ((*pcs[:rank], pc + 1, *pcs[rank + 1 :]), issued, memory), load.text, None


def _trace(came_from: dict[_State, tuple[_State, str] | None], state: _State) -> tuple[str, ...]:
    steps = []
    link = came_from[state]
    while link is not None:
        state, text = link
        steps.append(text)
        link = came_from[state]
    return tuple(reversed(steps))


_WIDE = replace(ONE_SHOT, wide=True)
_PULLED = replace(ONE_SHOT, pull=True)
_MIXED = (ONE_SHOT, BULK, TWO_SHOT, BULK, ONE_SHOT)
# Calls 1 and 10 are wide and have the same epoch: modulus 9, a multiple of 3 like the real one. Narrow calls between.
_WRAPPING = (_WIDE, *(ONE_SHOT,) * 8, _WIDE)

PROTOCOL = (
    Model(name="one-shot, 3 ranks", ranks=3, calls=(ONE_SHOT,) * 5),
    Model(name="two-shot, 3 ranks", ranks=3, calls=(TWO_SHOT,) * 4),
    Model(name="two-shot, 2 ranks", calls=(TWO_SHOT,) * 7),
    Model(name="island, 4 ranks", ranks=4, calls=(ISLAND,) * 4),
    Model(name="fetched instead of pushed, 3 ranks", ranks=3, calls=(_PULLED, _PULLED, ONE_SHOT, _PULLED)),
    Model(name="fetched, swept in every call", calls=(_PULLED,) * 5, sweep_period=1),
    Model(name="bulk, 6 calls", calls=(BULK,) * 6),
    Model(name="families and shapes mixed", calls=_MIXED),
    Model(name="wide and narrow across the wrap, swept", calls=_WRAPPING, wire_modulus=9, sweep_period=4),
    Model(name="sweep in every call", calls=(ONE_SHOT, TWO_SHOT, ONE_SHOT, ONE_SHOT, TWO_SHOT), sweep_period=1),
    Model(name="sweep in every call, bulk", calls=(BULK,) * 4, sweep_period=1),
    Model(name="two buffers, no sweep", calls=(ONE_SHOT,) * 6, buffers=2),
)

NEGATIVE_CONTROLS = (
    Model(name="one buffer", calls=(ONE_SHOT,) * 3, buffers=1),
    Model(name="two buffers under the sweep", calls=(ONE_SHOT,) * 4, buffers=2, sweep_period=1),
    Model(name="no release before the flag", calls=(BULK,), has_release=False),
    Model(name="across the wrap without the sweep", calls=_WRAPPING, wire_modulus=9),
)


def main() -> int:
    """Print a line per model; fail if one behaves otherwise than claimed."""
    as_claimed = True
    for model in (*PROTOCOL, *NEGATIVE_CONTROLS):
        verdict = check(model)
        as_claimed &= (verdict.fault is not None) == (model in NEGATIVE_CONTROLS)
        print(f"{model.name:42} {verdict.num_states:>8} states  {verdict.fault or 'no fault'}")
        for step in verdict.trace if verdict.fault else ():
            print(f"    {step}")
    return 0 if as_claimed else 1


if __name__ == "__main__":
    sys.exit(main())
