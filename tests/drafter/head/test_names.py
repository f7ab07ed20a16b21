"""Names of every dialect become ours."""

from __future__ import annotations

import pytest

from drafter.errors import TensorMismatch
from drafter.head.names import canonical_names, count_layers


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.fc.weight", "fc.weight"),
        ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("d2t", "d2t"),
    ],
)
def test_spelling(name: str, ours: str) -> None:
    assert canonical_names([name]) == {ours: name}


def test_what_is_no_weight_is_left_out() -> None:
    names = ["midlayer.self_attn.rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight"]
    assert canonical_names(names) == {}


def test_clashes_are_errors() -> None:
    with pytest.raises(TensorMismatch, match=r"model\.fc\.weight"):
        canonical_names(["fc.weight", "model.fc.weight"])


def test_layers_are_counted() -> None:
    assert count_layers([]) == 1
    assert count_layers(["layers.0.x", "layers.2.y", "norm.weight"]) == 3
