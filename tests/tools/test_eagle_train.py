"""Training learns, resumes where it stopped, and the replayed acceptance equals a live speculative loop."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tools.eagle import eval as eval_cli
from tools.eagle import generate, train
from tools.eagle.acceptance import measure
from tools.eagle.corpus import Conversation, load_corpus, save_corpus
from tools.eagle.head import EagleHead, HeadConfig
from tools.eagle.head_files import load_head, save_head
from tools.eagle.speculate import decode_plainly, speculate
from tools.eagle.toy import TOY_CONFIG, toy_target


def call(monkeypatch: pytest.MonkeyPatch, module: object, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["prog", "--smoke", *arguments])
    module.main()


def random_head() -> EagleHead:
    target = toy_target()
    head = EagleHead(HeadConfig.for_target(TOY_CONFIG, 259), target.embed, torch.arange(259))
    head.initialise(target.norm, 0)
    return head


def test_soft_cross_entropy_and_its_gradient_equal_torchs() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    teacher = torch.randn(4, 6).softmax(-1)
    losses = train._SoftCrossEntropy.apply(logits, teacher)
    expected = F.cross_entropy(logits, teacher, reduction="none")
    torch.testing.assert_close(losses, expected)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5])
    (got,) = torch.autograd.grad((losses * weights).sum(), logits)
    (want,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(got, want)


def test_training_learns_resumes_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for i in range(16):  # every answer counts upwards: learnable from the embedding alone
        start = int(generator.integers(3, 30))
        rows.append(
            Conversation(
                prompt_id=str(i), source="toy", split="train", ids=list(range(start, start + 24)), spans=[(2, 24)]
            )
        )
    save_corpus(rows, tmp_path / "data" / "tokens-000.npz")
    arguments = ["--tokens", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--ttt", "3", "--lr", "3e-3"]
    call(monkeypatch, train, *arguments, "--steps", "4")
    first = json.loads((tmp_path / "run" / "report.json").read_text())
    call(monkeypatch, train, *arguments, "--steps", "9")
    second = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (first["steps"], second["steps"]) == (4, 9)
    assert second["log"][:4] == first["log"]
    assert second["log"][-1]["loss"] < first["log"][0]["loss"] * 0.9
    assert set(second["acceptance"]["greedy"]["toy"]) == {str(k) for k in range(1, 8)}


def tuned_head(texts: list[Conversation]) -> EagleHead:
    """A head that has seen the texts, so that some of its drafts are right and some are not."""
    target, head = toy_target(), random_head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(15):
        for text in texts:
            ids = torch.tensor([text.ids])
            states = head.unroll(target.forward(ids)[0], ids, 3)
            loss = sum(
                F.cross_entropy(head.logits(state[0, : -2 - step]), ids[0, 2 + step :])
                for step, state in enumerate(states)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return head


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replayed_acceptance_equals_a_live_loop_and_the_text_is_the_targets(temperature: float) -> None:
    target = toy_target()
    prompts, seeds = [[5, 9, 30], [77, 3], [8] * 6], [3, 4, 5]
    plain = decode_plainly(target, prompts, 20, 2, temperature=temperature, seeds=seeds)
    texts = [
        Conversation(
            prompt_id="p", source="s", split="heldout", ids=prompt + text, spans=[(len(prompt), len(prompt + text))],
            temperature=temperature, seed=seed,
        )
        for prompt, text, seed in zip(prompts, plain, seeds, strict=True)
    ]  # fmt: skip
    head = tuned_head(texts)
    for shared in {False, temperature > 0}:
        spoken = speculate(target, head, prompts, 20, 2, 3, temperature=temperature, seeds=seeds, shared_noise=shared)
        assert [s.ids for s in spoken] == plain
        tally = measure(target, head, texts, max_draft_tokens=3, shared_noise=shared)["s"][3]
        assert tally.num_rounds == sum(s.num_rounds for s in spoken)
        assert tally.num_committed_tokens == sum(len(s.ids) - 1 for s in spoken)
        if not shared:
            assert 1.2 < tally.mean_acceptance_length < 4.0


def test_generate_and_eval_smoke_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "texts"
    call(monkeypatch, generate, "--out", str(out), "--split", "heldout", "--keep-loops", "--shared-noise")
    texts = load_corpus(sorted(out.glob("tokens-*.npz")))
    assert {text.split for text in texts} == {"heldout"}
    assert {text.temperature for text in texts} == {0.0, 0.8}
    before = len(texts)
    call(monkeypatch, generate, "--out", str(out), "--split", "heldout", "--keep-loops", "--shared-noise")
    assert len(load_corpus(sorted(out.glob("tokens-*.npz")))) == before  # nothing is answered twice
    save_head(random_head(), tmp_path / "head", with_lm_head=True)
    call(
        monkeypatch, eval_cli, "--head", str(tmp_path / "head"), "--eval-tokens", str(out), "--out",
        str(tmp_path / "report.json"),
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(live["num_identical_texts"] == live["num_texts"] for live in report["live"])
    assert "split:heldout" in report["acceptance"]["sampled, shared noise"]


def test_a_scaled_fc_is_folded_when_saved(tmp_path: Path) -> None:
    head, target = random_head(), toy_target()
    head.initialise(target.norm, 0, torch.rand(144) + 0.5)
    ids = torch.randint(3, 250, (1, 7))
    aux, _ = target.forward(ids)
    save_head(head, tmp_path, with_lm_head=False, dtype=torch.float32)
    back = load_head(tmp_path, head.embed)
    torch.testing.assert_close(back.unroll(aux, ids, 2)[1], head.unroll(aux, ids, 2)[1], rtol=1e-4, atol=1e-5)
    again = random_head()
    again.aux_scale.copy_(head.aux_scale)
    again.copy_weights(back)
    torch.testing.assert_close(again.fc.weight, head.fc.weight)
