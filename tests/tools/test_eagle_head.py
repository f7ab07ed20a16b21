"""The unrolled head equals step-by-step inference, and its files keep their meaning."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tools.eagle.acceptance import accepted_per_slot, argmax_choice, walk
from tools.eagle.head import EagleHead, HeadConfig
from tools.eagle.head_files import load_head, save_head
from tools.eagle.target import apply_rope
from tools.eagle.toy import TOY_CONFIG, toy_target


def toy_head(draft_vocab: int = 128, seed: int = 1) -> EagleHead:
    target = toy_target()
    ids = torch.randperm(TOY_CONFIG.vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort()[0]
    head = EagleHead(HeadConfig.for_target(TOY_CONFIG, draft_vocab), target.embed, ids)
    head.initialise(target.norm, seed)
    return head


class StepByStep:
    """EAGLE-3 inference of one row, one slot at a time, written from the paper's recipe with explicit loops."""

    def __init__(self, head: EagleHead) -> None:
        self.head, self.keys, self.values = head, [], []

    def slot(self, hidden: torch.Tensor, token: int, position: int) -> torch.Tensor:
        layer, c = self.head.midlayer, self.head.config
        x = torch.cat([layer.input_layernorm(self.head.embed[token]), layer.hidden_norm(hidden)])
        cos, sin = self.head.cos[position], self.head.sin[position]
        q = apply_rope(layer.self_attn.q_proj(x).view(-1, c.head_dim), cos, sin)
        self.keys.append(apply_rope(layer.self_attn.k_proj(x).view(-1, c.head_dim), cos, sin))
        self.values.append(layer.self_attn.v_proj(x).view(-1, c.head_dim))
        group = c.num_heads // c.num_kv_heads
        outputs = []
        for n in range(c.num_heads):
            scores = torch.stack([q[n] @ k[n // group] for k in self.keys]) * c.head_dim**-0.5
            outputs.append(sum(w * v[n // group] for w, v in zip(scores.softmax(0), self.values, strict=True)))
        hidden = hidden + layer.self_attn.o_proj(torch.cat(outputs))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def chain(self, aux: torch.Tensor, ids: list[int], num_steps: int) -> list[torch.Tensor]:
        """Pre-norm states of a chain after the stable slots 0..len(ids) - 2, reading the head's own tokens."""
        for i in range(len(ids) - 1):
            hidden = self.slot(self.head.fc(aux[i]), ids[i + 1], i)
        states = [hidden]
        for step in range(1, num_steps):
            token = int(self.head.draft_ids[self.head.logits(states[-1]).argmax()])
            states.append(self.slot(states[-1], token, len(ids) - 2 + step))
        return states


@torch.no_grad()
def test_drafting_from_every_slot_equals_step_by_step_inference() -> None:
    head = toy_head()
    ids = torch.randint(3, 250, (1, 14), generator=torch.Generator().manual_seed(3))
    aux, _ = toy_target().forward(ids)
    drafts = head.unroll(aux, ids, 4, argmax_choice(head))
    for length in (2, 5, 14):
        states = StepByStep(head).chain(aux[0], ids[0, :length].tolist(), 4)
        expected = [int(head.draft_ids[head.logits(state).argmax()]) for state in states]
        assert [int(draft[0, length - 2]) for draft in drafts] == expected


@torch.no_grad()
def test_training_time_test_equals_inference_where_the_chain_was_right() -> None:
    head = toy_head()
    prefix = torch.randint(3, 250, (1, 9), generator=torch.Generator().manual_seed(4))
    aux, _ = toy_target().forward(prefix)
    states = StepByStep(head).chain(aux[0], prefix[0].tolist(), 4)
    chain = [int(head.draft_ids[head.logits(state).argmax()]) for state in states]
    # Let the text continue exactly as drafted: teacher forcing must then reproduce inference's states.
    ids = torch.cat([prefix, torch.tensor([chain])], dim=1)
    unrolled = head.unroll(toy_target().forward(ids)[0], ids, 4)
    for state, batch in zip(states, unrolled, strict=True):
        torch.testing.assert_close(batch[0, 7], state, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_slots_do_not_see_later_tokens_or_padding() -> None:
    head, target = toy_head(), toy_target()
    ids = torch.randint(3, 250, (1, 12), generator=torch.Generator().manual_seed(5))
    longer = F.pad(ids, (0, 5))
    changed = ids.clone()
    changed[0, 9:] = 7
    short, padded, other = (head.unroll(target.forward(x)[0], x, 3) for x in (ids, longer, changed))
    for step in range(3):
        seen = 9 - 1 - step  # slot i of step j reads tokens up to i + 1 + j
        torch.testing.assert_close(short[step][0, :seen], other[step][0, :seen])
        torch.testing.assert_close(short[step][0, : 11 - step], padded[step][0, : 11 - step])


@torch.no_grad()
def test_accepted_per_slot_counts_the_matching_prefix_only() -> None:
    head = toy_head()
    ids = torch.randint(3, 250, (1, 10), generator=torch.Generator().manual_seed(6))
    script = [torch.zeros_like(ids) for _ in range(3)]
    script[0][0, 4], script[1][0, 4], script[2][0, 4] = ids[0, 6], 0, ids[0, 8]  # right, wrong, right
    script[0][0, 5], script[1][0, 5] = ids[0, 7], ids[0, 8]
    accepted = accepted_per_slot(head, torch.zeros(1, 10, 144), ids, 3, lambda _logits, step: script[step])
    assert accepted[0].tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 0]


def test_walk_starts_after_the_prefills_token_and_stops_at_the_end() -> None:
    accepted = torch.tensor([0, 0, 2, 0, 0, 5, 0, 0, 0]).numpy()
    # Answer tokens 3..8, token 3 from the prefill; slot 2 has 2 right -> last is 6; slot 5 has 5 right, 2 are left.
    tally = walk(accepted, 3, 9, 5)
    assert (tally.num_rounds, tally.num_committed_tokens) == (2, 5)
    assert walk(accepted, 3, 9, 1).num_rounds == 3
    assert walk(accepted, 3, 4, 5).num_rounds == 0


@pytest.mark.parametrize("with_lm_head", [True, False])
def test_head_files_round_trip(tmp_path: Path, with_lm_head: bool) -> None:
    head = toy_head()
    save_head(head, tmp_path, with_lm_head=with_lm_head, dtype=torch.float32)
    back = load_head(tmp_path, head.embed)
    assert torch.equal(back.draft_ids, head.draft_ids)
    assert back.config == head.config
    ids = torch.randint(3, 250, (2, 8))
    aux, _ = toy_target().forward(ids)
    torch.testing.assert_close(back.unroll(aux, ids, 2)[1], head.unroll(aux, ids, 2)[1])
    torch.testing.assert_close(back.lm_head.weight, head.lm_head.weight)


def test_large_heads_are_split_under_the_file_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.eagle.head_files.MAX_SHARD_BYTES", 40_000)
    head = toy_head()
    save_head(head, tmp_path, with_lm_head=True)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(load_head(tmp_path, head.embed).t2d, head.t2d)
