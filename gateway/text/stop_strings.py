"""Stop strings in a stream: nothing of a stop ever leaves, and nothing else is held back longer than it must be.

All stops are matched at once by an Aho-Corasick automaton over characters. Its state after a character *is* the longest
suffix of the text that is a prefix of any stop, which is exactly what has to be held back, so each character costs O(1)
amortised however many stops there are.

The match is the one that would be found if text came one character at a time: the stop that is complete first, and of
several complete at the same character the longest. So the result does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["StopMatch", "StopStringMatcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """Text released by one push and the stop that ended the answer in it, or None."""

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Cuts the text of one answer at the first stop string.

    Args:
        stop_strings: non-empty strings.
        include_stop: release the matched stop too, instead of cutting it out.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stop_strings):
            raise ValueError("a stop string can't be empty")
        self._include_stop = include_stop
        automaton = _build_automaton(tuple(stop_strings))
        self._children, self._fail = automaton.children, automaton.fail
        self._stop_at, self._depth = automaton.stop_at, automaton.depth
        self._node = 0
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Feed text; get what may be released. After a match, push nothing more."""
        if not self._children[0]:
            return StopMatch(text=text)
        children, fail, node = self._children, self._fail, self._node
        for offset, char in enumerate(text):
            while node and char not in children[node]:
                node = fail[node]
            node = children[node].get(char, 0)
            stop = self._stop_at[node]
            if stop is not None:
                return self._matched(text[: offset + 1], stop)
        self._node = node
        text = self._held + text
        num_released = len(text) - self._depth[node]
        self._held = text[num_released:]
        return StopMatch(text=text[:num_released])

    def finish(self) -> str:
        """The held text, when the answer ends for another reason."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _matched(self, text: str, stop: str) -> StopMatch:
        text = self._held + text
        self._held, self._node = "", 0
        return StopMatch(text=text if self._include_stop else text[: -len(stop)], stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Automaton:
    """Tables by node, never changed after they are built.

    Fields:
        children: next node by character.
        fail: node of the longest proper suffix that is a prefix of a stop.
        stop_at: the longest stop that ends here, or None.
        depth: characters from the root, which is the length to hold back.
    """

    children: list[dict[str, int]]
    fail: list[int]
    stop_at: list[str | None]
    depth: list[int]


@lru_cache(maxsize=16)  # all choices of a request, and most requests of a client, have the same stops
def _build_automaton(stop_strings: tuple[str, ...]) -> _Automaton:
    trie = _build_trie(stop_strings)
    fail = [0] * len(trie.children)
    queue = deque(trie.children[0].values())
    while queue:
        node = queue.popleft()
        for char, child in trie.children[node].items():
            link = fail[node]
            while link and char not in trie.children[link]:
                link = fail[link]
            fail[child] = trie.children[link].get(char, 0)
            # A node's own stop is longer than any that ends at its fail link.
            trie.stop_at[child] = trie.stop_at[child] or trie.stop_at[fail[child]]
            queue.append(child)
    return _Automaton(children=trie.children, fail=fail, stop_at=trie.stop_at, depth=trie.depth)


def _build_trie(stop_strings: tuple[str, ...]) -> _Automaton:
    trie = _Automaton(children=[{}], fail=[], stop_at=[None], depth=[0])
    for stop in stop_strings:
        node = 0
        for char in stop:
            if char not in trie.children[node]:
                trie.children[node][char] = len(trie.children)
                trie.children.append({})
                trie.stop_at.append(None)
                trie.depth.append(trie.depth[node] + 1)
            node = trie.children[node][char]
        trie.stop_at[node] = stop
    return trie
