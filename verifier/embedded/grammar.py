"""Grammars for constrained output: which ids may come next, at every position of a round.

llguidance does the parsing. A request's ``GrammarState`` follows the committed output; for a round it walks along the
drafts, one mask a position, and rolls back. So a draft is judged by exactly the mask plain decoding would have had
there: speculation stays on and stays exact. Once the grammar is complete, only the end-of-sequence ids are left, so the
target itself ends the output.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from verifier.embedded.errors import ItemRefused
from wire.sampling import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stub only

__all__ = ["GrammarCompiler", "GrammarState", "Mask"]

Mask = npt.NDArray[np.bool_]

# White space between JSON tokens is bounded, because small models otherwise never stop writing it.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A]{1,16}"}
_MAX_GRAMMAR_SIZE = 200_000
_MAX_REASON_CHARS = 300
_CACHED_GRAMMARS = 64


class GrammarCompiler:
    """Compiles grammars for one tokenizer; the last 64 are kept. ``compile`` may run in any thread.

    Args:
        tokenizer_json: content of the model's tokenizer.json.
        vocab_size: V, padding of the model's vocabulary included.
    """

    def __init__(self, tokenizer_json: str, *, vocab_size: int) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._tokenizer = lru_cache(maxsize=4)(self._build_tokenizer)
        self._lock = threading.Lock()
        self._matchers: OrderedDict[tuple[Grammar, tuple[int, ...]], LLMatcher] = OrderedDict()

    def warm_up(self, eos_ids: Sequence[int]) -> None:
        """Build what all grammars with these end ids share: about a second in which Python stands still, so before
        anybody is served."""
        with contextlib.suppress(ItemRefused):
            self.compile(Grammar(kind="regex", text="a"), eos_ids)

    def known(self, grammar: Grammar, eos_ids: Sequence[int]) -> GrammarState | None:
        """A state at the start of the output if this grammar was compiled lately, at once."""
        eos = tuple(sorted(eos_ids))
        matcher = self._kept((grammar, eos))
        return None if matcher is None else self._state(matcher, eos)

    def compile(self, grammar: Grammar, eos_ids: Sequence[int]) -> GrammarState:
        """A state at the start of the output.

        Raises:
            ItemRefused: "invalid_grammar": it does not compile, or is too complex.
        """
        eos = tuple(sorted(eos_ids))
        return self._state(self._matcher(grammar, eos), eos)

    def _state(self, matcher: LLMatcher, eos_ids: tuple[int, ...]) -> GrammarState:
        return GrammarState(matcher.deep_copy(), eos_ids=eos_ids, vocab_size=self._vocab_size)

    def _kept(self, key: tuple[Grammar, tuple[int, ...]]) -> LLMatcher | None:
        with self._lock:
            matcher = self._matchers.get(key)
            if matcher is not None:
                self._matchers.move_to_end(key)
            return matcher

    def _matcher(self, grammar: Grammar, eos_ids: tuple[int, ...]) -> LLMatcher:
        key = (grammar, eos_ids)
        kept = self._kept(key)
        if kept is not None:
            return kept
        matcher = self._build_matcher(grammar, eos_ids)
        with self._lock:
            self._matchers[key] = matcher
            while len(self._matchers) > _CACHED_GRAMMARS:
                self._matchers.popitem(last=False)
        return matcher

    def _build_tokenizer(self, eos_ids: tuple[int, ...]) -> LLTokenizer:
        return LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=list(eos_ids))

    def _build_matcher(self, grammar: Grammar, eos_ids: tuple[int, ...]) -> LLMatcher:
        if not eos_ids:
            raise ItemRefused("invalid_grammar", "a grammar needs an end-of-sequence id that may end the output")
        try:
            matcher = LLMatcher(self._tokenizer(eos_ids), _source(grammar), log_level=0, limits=_limits())
        except (ValueError, RuntimeError) as error:  # also of a tokenizer that llguidance does not understand
            raise ItemRefused("invalid_grammar", _reason(str(error))) from None
        if matcher.is_error():
            raise ItemRefused("invalid_grammar", _reason(matcher.get_error()))
        # The first mask builds most of the lexer; some grammars are too complex for it only here.
        bits = np.zeros((self._vocab_size + 31) // 32, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise ItemRefused("invalid_grammar", _reason(matcher.get_error()))
        return matcher


class GrammarState:
    """Where one request's output stands in its grammar.

    Args:
        matcher: at the start; owned by this state.
        vocab_size: V.
    """

    def __init__(self, matcher: LLMatcher, *, eos_ids: tuple[int, ...], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_ids = list(eos_ids)
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self._vocab_size = vocab_size
        self._committed: list[int] = []

    def fresh(self) -> GrammarState:
        """A state of its own at the same place; only of one that was not used yet."""
        assert not self._committed
        return GrammarState(self._matcher.deep_copy(), eos_ids=tuple(self._eos_ids), vocab_size=self._vocab_size)

    def masks(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> list[Mask]:
        """Which ids may come at each position of a round.

        Args:
            output_ids: the committed output; never contradicts the grammar, because it was chosen under it.
            draft_ids: [K].

        Returns:
            [<= K+1] masks of [V]; mask i is for the position after draft_ids[:i]. Shorter when a draft breaks the
            grammar: it can't be accepted, so nothing after it matters.

        Raises:
            ItemRefused: "grammar_failed": the grammar has become too complex to follow.
        """
        self._follow(output_ids)
        masks = [self._mask()]
        num_walked = 0
        for draft_id in draft_ids:
            if not masks[-1][draft_id] or self._matcher.is_stopped():
                break
            self._consume([draft_id])
            num_walked += 1
            masks.append(self._mask())
        if num_walked and not self._matcher.rollback(num_walked):
            raise self._failed()
        return masks

    def _follow(self, output_ids: Sequence[int]) -> None:
        known = len(self._committed)
        if list(output_ids[:known]) != self._committed:
            if not self._matcher.reset():
                raise self._failed()
            self._committed, known = [], 0
        new = list(output_ids[known:])
        if new:
            self._consume(new)
            self._committed += new

    def _consume(self, token_ids: list[int]) -> None:
        if self._matcher.is_stopped() and all(token_id in self._eos_ids for token_id in token_ids):
            return  # the end of a complete output moves nothing
        if not self._matcher.consume_tokens(token_ids):
            raise self._failed()

    def _mask(self) -> Mask:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            mask = np.zeros(self._vocab_size, dtype=np.bool_)
            mask[self._eos_ids] = True
            return mask
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise self._failed()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

    def _failed(self) -> ItemRefused:
        return ItemRefused("grammar_failed", _reason(self._matcher.get_error() or "the output left the grammar"))


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _limits() -> LLParserLimits:
    # Default fuel, without parser states in error texts: those go to clients.
    return LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False)


def _reason(text: str) -> str:
    # One line: a message for a client, not a parser's report.
    return " ".join(text.split())[:_MAX_REASON_CHARS]
