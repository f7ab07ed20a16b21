"""The engine with grammars: the same output with any drafts, and a bad grammar hurts nobody else."""

from __future__ import annotations

import re
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.verifier.embedded.test_engine import Client, prompt_of
from tests.verifier.embedded.tiny_models import VOCAB, new_engine
from verifier.embedded.engine import EmbeddedEngine
from verifier.embedded.errors import ItemRefused
from verifier.embedded.grammar import GrammarCompiler
from verifier.embedded.grammar_queue import GrammarQueue
from verifier.embedded.model import TargetModel
from wire.messages import VerifyFailed
from wire.sampling import Grammar, SamplingParams
from wire.tensor_ring import TensorRingWriter

EOS = VOCAB - 1


class Here(Executor):
    """Runs at once, in the caller's thread."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except ItemRefused as error:
            future.set_exception(error)
        return future


PATTERN = "[0-9]{4,9}(-[0-9]{2}){2}"


@pytest.fixture
def engine(llama: TargetModel, ring: TensorRingWriter) -> EmbeddedEngine:
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())[:EOS]  # "!" is 0, digits follow from 15
    vocab = {char: token_id for token_id, char in enumerate(chars)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<eos>": EOS}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    engine = new_engine(llama, ring)
    compiler = GrammarCompiler(tokenizer.to_str(), vocab_size=VOCAB)
    engine._grammars = GrammarQueue(compiler, timeout_s=1.0, clock=float, executor=Here())
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


class Held(Executor):
    """Keeps the work until it is told to do it."""

    def __init__(self) -> None:
        self.works: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.works.append((future, work, args))
        return future

    def run(self) -> None:
        for future, work, args in self.works:
            try:
                future.set_result(work(*args))
            except ItemRefused as error:
                future.set_exception(error)
        self.works.clear()


@pytest.fixture
def held(engine: EmbeddedEngine) -> Held:
    """Grammars of ``engine`` take until the test says so."""
    held = Held()
    engine._grammars._executor = held
    return held


def test_others_go_on_while_a_grammar_is_compiled(engine: EmbeddedEngine, held: Held) -> None:
    slow = Client("slow", prompt_of(1, 7), sampling(0.0))
    twin = Client("twin", prompt_of(1, 7), sampling(0.0))
    plain = Client("plain", prompt_of(1, 7), SamplingParams())
    engine.add([slow.item(), twin.item(), plain.item()])
    assert engine.is_compiling
    reply = engine.step()
    assert reply is not None
    assert [result.request_id for result in reply.results] == ["plain"]
    assert (engine.step(), engine.has_work) == (None, False)
    assert len(held.works) == 1  # equal grammars are compiled once
    held.run()
    reply = engine.step()
    assert reply is not None
    assert [result.request_id for result in reply.results] == ["slow", "twin"]
    assert not engine.is_compiling
    engine.add([Client("known", prompt_of(1, 7), sampling(0.0)).item()])
    assert (held.works, len(engine.step().results)) == ([], 1)


def test_a_grammar_that_takes_too_long_is_refused_alone(engine: EmbeddedEngine, held: Held) -> None:
    now_s = 0.0
    engine._grammars._clock = lambda: now_s
    engine.add([Client("slow", prompt_of(1, 7), sampling(0.0)).item()])
    now_s = 100.0
    assert engine.step() is None  # waiting in the queue is no fault
    held.works[0][1].__self__._begin_s = now_s
    now_s += 1.1
    reply = engine.step()
    assert reply is not None
    (refused,) = reply.results
    assert isinstance(refused, VerifyFailed)
    assert refused.code == "invalid_grammar"
    assert "longer than 1 s" in refused.message
    assert not engine.is_compiling


def test_a_client_that_left_is_not_waited_for(engine: EmbeddedEngine, held: Held) -> None:
    engine.add([Client("gone", prompt_of(1, 7), sampling(0.0)).item()])
    engine.close("gone")
    assert not engine.is_compiling
    held.run()
    assert engine.step() is None


def test_the_queue_of_grammars_is_bounded(engine: EmbeddedEngine, held: Held) -> None:
    engine.add([Client(f"c{i}", prompt_of(1, 7), sampling(0.0, f"a{{{i + 1}}}")).item() for i in range(65)])
    assert len(held.works) == 64
    reply = engine.step()
    assert reply is not None
    assert [result.code for result in reply.results] == ["too_many_requests"]
