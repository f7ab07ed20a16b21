"""Grammars: masks at draft positions are those of plain decoding, and speculation changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from verifier.embedded.errors import ItemRefused
from verifier.embedded.grammar import GrammarCompiler
from verifier.embedded.sampling import TokenSampler
from wire.sampling import Grammar, SamplingParams

EOS = 256
VOCAB = 264  # padded, as real models are
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar(kind="regex", text="(yes|no|maybe)(, (yes|no))?"),
    Grammar(kind="regex", text="[ab]{2,5}c"),
    Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    Grammar(kind="lark", text='start: "<" word ">"\nword: /[a-c]+/'),
]


def byte_tokenizer() -> str:
    """A byte-level tokenizer whose id of a printable ASCII byte is that byte."""
    byte_chars = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (ord(char) > 255, ord(char)))
    taken = {char: ord(char) for char in byte_chars if ord(char) < 256}
    free = iter([value for value in range(256) if value not in taken.values()])
    vocab = {char: taken[char] if char in taken else next(free) for char in byte_chars}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<eos>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), vocab_size=VOCAB)


Logits = Callable[[list[int]], np.ndarray]


def model(seed: int) -> Logits:
    """Logits that depend on the last ids only, so that decoding is repeatable."""

    def logits(ids: list[int]) -> np.ndarray:
        return np.random.default_rng([seed, len(ids), *ids[-2:]]).normal(0, 3, VOCAB).astype(np.float32)

    return logits


def decode(
    compiler: GrammarCompiler, grammar: Grammar, params: SamplingParams, logits: Logits, draft: Callable[[], list[int]]
) -> list[int]:
    """Rounds with whatever is drafted; ends at EOS or 60 tokens."""
    state = compiler.compile(grammar, params.eos_ids)
    sampler = TokenSampler(params, vocab_size=VOCAB, prompt_len=2, grammar=state)
    ids = [1, 2]
    while len(ids) < 62:
        drafts = draft()
        rows = np.stack([logits(ids + drafts[:i]) for i in range(len(drafts) + 1)])
        targets = sampler.choose(rows, ids, tuple(drafts))
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == targets[num_accepted]:
            num_accepted += 1
        for token_id in targets[: num_accepted + 1]:
            ids.append(token_id)
            if token_id == EOS:
                return ids[2:]
    return ids[2:]


@settings(max_examples=60)
@given(
    grammar=st.sampled_from(GRAMMARS),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_speculation_changes_nothing_and_the_text_fits(
    compiler: GrammarCompiler, grammar: Grammar, temperature: float, top_k: int, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed, eos_ids=(EOS,), grammar=grammar)
    plain = decode(compiler, grammar, params, model(seed), list)
    dice = np.random.default_rng(seed)
    oracle = iter([*plain, *[0] * 200])
    position = 0

    def draft() -> list[int]:
        # Mostly right guesses, some wrong, some forbidden, some past the end.
        right = [token_id if dice.random() < 0.8 else int(dice.integers(VOCAB)) for token_id in plain]
        return right[position : position + int(dice.integers(0, 5))] or [next(oracle)]

    assert decode(compiler, grammar, params, model(seed), draft) == plain
    if plain[-1] == EOS:
        text = bytes(plain[:-1]).decode()
        if grammar.kind == "regex":
            assert re.fullmatch(grammar.text, text)
        elif grammar.kind == "json_schema":
            assert json.loads(text).keys() == {"a", "b"}


def test_masks_along_drafts_are_those_of_plain_decoding(compiler: GrammarCompiler) -> None:
    text = list(b'{"a": 12, "b": "yy"}')
    for grammar, ids in ((GRAMMARS[2], text), (GRAMMARS[0], list(b"maybe, no"))):
        state = compiler.compile(grammar, [EOS])
        for split in range(len(ids) + 1):
            walked = state.masks(ids[:split], [*ids[split:], EOS])
            for offset, mask in enumerate(walked):
                fresh = compiler.compile(grammar, [EOS])
                np.testing.assert_array_equal(mask, fresh.masks(ids[: split + offset], [])[0])
            assert walked[len(ids) - split][EOS]


def test_a_forbidden_draft_ends_the_masks(compiler: GrammarCompiler) -> None:
    state = compiler.compile(GRAMMARS[0], [EOS])
    assert len(state.masks([], list(b"yeX..."))) == 3
    assert len(state.masks(list(b"yes"), [EOS, EOS])) >= 1
    assert np.flatnonzero(state.masks(list(b"yes, no"), [])[0]).tolist() == [EOS]
    assert np.flatnonzero(state.masks([*b"yes, no", EOS], [])[0]).tolist() == [EOS]


def test_output_that_was_taken_back_is_followed_anew(compiler: GrammarCompiler) -> None:
    state = compiler.compile(GRAMMARS[0], [EOS])
    state.masks(list(b"yes"), [])
    np.testing.assert_array_equal(
        state.masks(list(b"n"), [])[0], compiler.compile(GRAMMARS[0], [EOS]).masks(list(b"n"), [])[0]
    )


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_schema", text='{"type":"nope"}'),
        Grammar(kind="json_schema", text="no json"),
        Grammar(kind="json_schema", text='{"$ref":"http://example.com/x"}'),
        Grammar(kind="regex", text="(("),
        Grammar(kind="lark", text="start: missing"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with pytest.raises(ItemRefused) as caught:
        compiler.compile(grammar, [EOS])
    assert caught.value.code == "invalid_grammar"
    assert 0 < len(caught.value.message) <= 300
    assert "\n" not in caught.value.message


def test_a_grammar_needs_an_end(compiler: GrammarCompiler) -> None:
    with pytest.raises(ItemRefused, match="end-of-sequence"):
        compiler.compile(GRAMMARS[0], [])


def test_ids_the_tokenizer_does_not_have_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(ItemRefused, match="EOS"):
        compiler.compile(GRAMMARS[0], [VOCAB + 10])


def test_a_tokenizer_that_is_not_understood_refuses_grammars() -> None:
    with pytest.raises(ItemRefused) as caught:
        GrammarCompiler("{}", vocab_size=VOCAB).compile(GRAMMARS[0], [EOS])
    assert caught.value.code == "invalid_grammar"


def test_output_outside_the_grammar_is_an_error_not_a_crash(compiler: GrammarCompiler) -> None:
    state = compiler.compile(GRAMMARS[0], [EOS])
    with pytest.raises(ItemRefused) as caught:
        state.masks(list(b"zzz"), [])
    assert caught.value.code == "grammar_failed"


def test_a_grammar_too_complex_for_its_first_mask_is_refused_when_it_is_compiled() -> None:
    # Long tokens make the lexer go far in one step, as a real vocabulary does.
    dice = np.random.default_rng(1)
    words = ["".join(dice.choice(list("abc"), 40)) for _ in range(400)]
    tokenizer = json.loads(byte_tokenizer())
    tokenizer["model"]["vocab"] |= {word: VOCAB + number for number, word in enumerate(words)}
    compiler = GrammarCompiler(json.dumps(tokenizer), vocab_size=VOCAB + len(words))
    hostile = Grammar(kind="lark", text="start: A\nA: /.*a.{20}/ & /.*b.{19}/ & /.*c.{18}/")
    with pytest.raises(ItemRefused, match="too many expressions") as caught:
        compiler.compile(hostile, [EOS])
    assert caught.value.code == "invalid_grammar"


def test_only_the_last_grammars_are_kept(compiler: GrammarCompiler) -> None:
    grammars = [Grammar(kind="regex", text=f"a{{{number + 1}}}") for number in range(65)]
    for grammar in grammars:
        compiler.compile(grammar, [EOS])
    assert compiler.known(grammars[0], [EOS]) is None
    known = compiler.known(grammars[1], [EOS])
    assert known is not None
    assert np.flatnonzero(known.masks(list(b"aa"), [])[0]).tolist() == [EOS]
