"""Compiles grammars beside the engine's thread, so that one client's schema never holds up other streams.

llguidance compiles without the interpreter lock, in up to half a second for the largest texts that are let in. Its own
limits bound size and work; a time limit bounds what a client waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Protocol

from verifier.embedded.errors import ItemRefused
from verifier.embedded.grammar import GrammarCompiler, GrammarState
from wire.sampling import Grammar

__all__ = ["GrammarQueue", "GrammarSource", "PendingGrammar"]

_NUM_THREADS = 2
_MAX_WAITING = 64


class PendingGrammar(Protocol):
    """A grammar that is being compiled."""

    def poll(self) -> GrammarState | None:
        """A state of its own at the start of the output, or None while it takes.

        Raises:
            ItemRefused: "invalid_grammar": it does not compile, is too complex or takes too long.
        """
        ...


class GrammarSource(Protocol):
    """Where the engine gets its grammars."""

    def begin(self, grammar: Grammar, eos_ids: Sequence[int]) -> PendingGrammar:
        """Begin to compile; a known grammar is there at the first poll.

        Raises:
            ItemRefused: "too_many_requests": too many others wait.
        """
        ...


class _Known:
    """A grammar that was compiled before."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state

    def poll(self) -> GrammarState | None:
        return self._state


class _Compiling:
    """One grammar in the queue; shared by all requests that want it."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._begin_s: float | None = None  # set by the compiling thread
        self.future: Future[GrammarState]

    def compile(self, compiler: GrammarCompiler, grammar: Grammar, eos_ids: tuple[int, ...]) -> GrammarState:
        self._begin_s = self._clock()
        return compiler.compile(grammar, eos_ids)

    def poll(self) -> GrammarState | None:
        if self.future.done():
            return self.future.result().fresh()
        # Waiting for other grammars is no fault of this one.
        if self._begin_s is not None and self._clock() - self._begin_s > self._timeout_s:
            raise ItemRefused("invalid_grammar", f"the grammar takes longer than {self._timeout_s:g} s to compile")
        return None


class GrammarQueue:
    """A ``GrammarSource`` over threads.

    Args:
        timeout_s: longest time one grammar may be compiled.
        clock: monotonic seconds; read from several threads.
        executor: where the work is done; two threads of its own by default.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        executor: Executor | None = None,
    ) -> None:
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._clock = clock
        self._executor = executor or ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._compiling: dict[tuple[Grammar, tuple[int, ...]], _Compiling] = {}

    def begin(self, grammar: Grammar, eos_ids: Sequence[int]) -> PendingGrammar:
        """See GrammarSource.begin."""
        key = (grammar, tuple(sorted(eos_ids)))
        self._compiling = {k: c for k, c in self._compiling.items() if not c.future.done()}
        compiling = self._compiling.get(key)
        if compiling is not None:
            return compiling
        known = self._compiler.known(*key)
        if known is not None:
            return _Known(known)
        if len(self._compiling) >= _MAX_WAITING:
            raise ItemRefused("too_many_requests", f"{_MAX_WAITING} grammars wait to be compiled")
        compiling = self._compiling[key] = _Compiling(self._clock, self._timeout_s)
        compiling.future = self._executor.submit(compiling.compile, self._compiler, *key)
        return compiling
