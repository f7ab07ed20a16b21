"""The tools' own target equals transformers' Llama, layer inputs included."""

import pytest
import torch

from tools.eagle.decode_attention import decode_attention
from tools.eagle.target import KVCache, Target, TargetConfig
from tools.eagle.toy import toy_target

transformers = pytest.importorskip("transformers")


def llama_pair() -> tuple[torch.nn.Module, Target]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, vocab_size=120, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    mine = TargetConfig(
        hidden_size=48, num_layers=8, num_heads=6, num_kv_heads=2, head_dim=8, intermediate_size=64, vocab_size=120,
        rope_theta=100_000.0, rms_norm_eps=1e-5, max_position_embeddings=64,
    )  # fmt: skip
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return model, Target(mine, weights, device="cpu", dtype=torch.float32)


@torch.no_grad()
def test_features_and_logits_equal_transformers() -> None:
    model, target = llama_pair()
    ids = torch.randint(0, 120, (2, 11))
    reference = model(ids, output_hidden_states=True)
    aux, final = target.forward(ids)
    assert target.config.aux_layers == (2, 4, 5)
    expected = torch.cat([reference.hidden_states[i] for i in (2, 4, 5)], dim=-1)
    torch.testing.assert_close(aux, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(target.logits(final), reference.logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_decoding_with_a_ragged_cache_equals_the_whole_forward() -> None:
    target = toy_target()
    rows = [torch.randint(3, 250, (1, length)) for length in (5, 9)]
    cache = KVCache.empty(target.config, 2, 16, target.embed)
    for row, ids in enumerate(rows):
        target.forward(ids[:, :-1], cache, torch.tensor([row]))
    last = torch.stack([ids[0, -1] for ids in rows])
    hidden = target.decode(last, torch.tensor([4, 8]), cache)
    for row, ids in enumerate(rows):
        torch.testing.assert_close(hidden[row], target.forward(ids)[1][0, -1], rtol=1e-4, atol=1e-5)


def test_decode_attention_ignores_what_lies_beyond_a_rows_length() -> None:
    q, keys, values = torch.randn(2, 6, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    lengths = torch.tensor([3, 7])
    out = decode_attention(q, keys, values, lengths)
    weights = (q[0, 4] @ keys[0, 1, :3].T * 8**-0.5).softmax(0)  # query head 4 of 6 reads key-value head 1 of 2
    torch.testing.assert_close(out[0, 4], weights @ values[0, 1, :3])
    keys[0, :, 3:] = 99.0
    torch.testing.assert_close(decode_attention(q, keys, values, lengths), out)
