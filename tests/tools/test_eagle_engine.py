"""Continuous batching writes what decoding one row at a time writes, and the noise is what it says."""

import torch

from tools.eagle.chat import ByteTokenizer, opening, user_turn
from tools.eagle.engine import Engine, Finished, Request, SlotPlan
from tools.eagle.noise import counter_gumbel
from tools.eagle.prompts import Prompt
from tools.eagle.speculate import decode_plainly
from tools.eagle.talk import Limits, Talks
from tools.eagle.toy import toy_target

PROMPTS = [[5, 9, 30], [77, 3], [8] * 9, [60, 61, 62, 63, 64], [4, 250]]


def run_all(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    waiting = list(requests)
    written = {}
    for batch in engine.run(lambda _greedy: waiting.pop() if waiting else None):
        written |= {finished.request.key: finished.new_ids for finished in batch}
    return written


def test_ragged_slots_write_what_single_rows_write() -> None:
    target = toy_target()
    engine = Engine(target, SlotPlan(greedy=2, sampled=0), max_len=40, end_id=2, stop_loops=False, sync_every=5)
    requests = [Request(key=i, ids=ids, max_new=8 + i) for i, ids in enumerate(PROMPTS)]
    written = run_all(engine, requests)
    for i, ids in enumerate(PROMPTS):
        assert written[i] == decode_plainly(target, [ids], 8 + i, 2)[0]


def test_counter_noise_gives_the_same_text_in_any_slot() -> None:
    target = toy_target()
    seeds = [11, 12, 13, 14, 15]
    expected = decode_plainly(target, PROMPTS, 10, 2, temperature=0.8, seeds=seeds)
    for slots in (1, 3):
        engine = Engine(target, SlotPlan(greedy=0, sampled=slots), max_len=40, end_id=2, shared_noise=True)
        requests = [
            Request(key=i, ids=ids, max_new=10, temperature=0.8, seed=seeds[i]) for i, ids in enumerate(PROMPTS)
        ]
        written = run_all(engine, requests)
        assert [written[i] for i in range(5)] == expected


def test_looping_rows_are_stopped() -> None:
    engine = Engine(toy_target(), SlotPlan(greedy=1, sampled=0), max_len=128, end_id=2)
    engine.history[0, :50] = torch.tensor([3, 4] + [10, 11, 12, 13] * 12)
    engine.begins[0], engine.positions[0] = 2, 2 + 4 * 4 - 1
    assert not engine._looping()[0]  # sixteen tokens: the last 12-gram has occurred twice
    engine.positions[0] = 2 + 4 * 5 - 1
    assert engine._looping()[0]


def test_counter_noise_is_gumbel_and_keyed_by_all_three() -> None:
    draws = counter_gumbel(torch.tensor(7), torch.arange(200)[:, None], torch.arange(300)[None, :])
    assert abs(draws.mean().item() - 0.5772) < 0.02
    assert abs(draws.std().item() - 1.2825) < 0.02
    one = counter_gumbel(torch.tensor(7), torch.tensor(5), torch.tensor(9))
    assert one == draws[5, 9]
    assert one != counter_gumbel(torch.tensor(8), torch.tensor(5), torch.tensor(9))


def prompt(turns: tuple[str, ...]) -> Prompt:
    return Prompt(prompt_id="0000000000aa", source="x", split="train", system=None, turns=turns)


def test_follow_up_turns_continue_the_conversation() -> None:
    tokenizer = ByteTokenizer()
    talks = Talks(prompts=[prompt(("Hi", "Why?"))], tokenizer=tokenizer, limits=Limits(max_len=400))
    first = talks.take(True)
    assert first is not None
    assert first.ids == tokenizer.encode(opening(None) + user_turn("Hi"))
    assert talks.give(Finished(request=first, new_ids=[40, 41, 2])) is None
    second = talks.take(True)
    assert second is not None
    assert second.ids == [*first.ids, 40, 41, 2, *tokenizer.encode("\n" + user_turn("Why?"))]
    done = talks.give(Finished(request=second, new_ids=[42, 2]))
    assert done is not None
    assert [done.ids[start:end] for start, end in done.spans] == [[40, 41, 2], [42, 2]]
    assert talks.take(True) is None


def test_self_written_questions_near_held_out_prompts_are_refused() -> None:
    tokenizer = ByteTokenizer()
    from tools.eagle.prompts import ngrams

    talks = Talks(prompts=[], tokenizer=tokenizer, self_share=1.0, guarded=frozenset(ngrams("what is green tea")))
    for text, refused in (("What is green tea?", 1), ("What is black tea?", 1), ("Hm", 2)):
        request = talks.take(False)
        assert request is not None
        assert talks.give(Finished(request=request, new_ids=[*tokenizer.encode(text), 2])) is None
        assert talks.num_refused_questions == refused
