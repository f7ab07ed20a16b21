"""The engine with grammars: the same output with any drafts, and a bad grammar hurts nobody else."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.verifier.embedded.test_engine import Client, prompt_of
from tests.verifier.embedded.tiny_models import VOCAB, new_engine
from verifier.embedded.engine import EmbeddedEngine
from verifier.embedded.grammar import GrammarCompiler
from verifier.embedded.model import TargetModel
from wire.messages import VerifyFailed
from wire.sampling import Grammar, SamplingParams
from wire.tensor_ring import TensorRingWriter

EOS = VOCAB - 1
PATTERN = "[0-9]{4,9}(-[0-9]{2}){2}"


@pytest.fixture
def engine(llama: TargetModel, ring: TensorRingWriter) -> EmbeddedEngine:
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())[:EOS]  # "!" is 0, digits follow from 15
    vocab = {char: token_id for token_id, char in enumerate(chars)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<eos>": EOS}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    engine = new_engine(llama, ring)
    engine._grammars = GrammarCompiler(tokenizer.to_str(), vocab_size=VOCAB)
    return engine


def sampling(temperature: float, pattern: str = PATTERN) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=3, eos_ids=(EOS,), grammar=Grammar(kind="regex", text=pattern))


def output(engine: EmbeddedEngine, name: str, temperature: float, known: list[int]) -> list[int]:
    client = Client(name, prompt_of(1, 7), sampling(temperature))
    while EOS not in client.output:
        drafts = known[len(client.output) :][:4]
        if len(drafts) > 2:
            drafts[2] = (drafts[2] + 1) % VOCAB  # one of them is wrong, or forbidden
        engine.add([client.item(drafts)])
        reply = engine.step()
        assert reply is not None
        client.commit(reply.results[0])
    return client.output[: client.output.index(EOS) + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(engine: EmbeddedEngine, temperature: float) -> None:
    plain = output(engine, "plain", temperature, [])
    assert re.fullmatch(PATTERN, "".join(chr(ord("!") + token_id) for token_id in plain[:-1]))
    assert output(engine, "drafted", temperature, plain) == plain


def test_a_bad_grammar_is_refused_alone(engine: EmbeddedEngine) -> None:
    good = Client("good", prompt_of(1, 7), sampling(0.0))
    bad = Client("bad", prompt_of(1, 7), sampling(0.0, "(("))
    engine.add([bad.item(), good.item()])
    reply = engine.step()
    assert reply is not None
    refused, result = reply.results
    assert isinstance(refused, VerifyFailed)
    assert refused.code == "invalid_grammar"
    good.commit(result)


def test_without_a_compiler_grammars_are_refused(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring)
    engine.add([Client("a", prompt_of(1, 7), sampling(0.0)).item()])
    reply = engine.step()
    assert reply is not None
    assert isinstance(reply.results[0], VerifyFailed)
