"""config.json in both dialects, and its traps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafter.errors import HeadConfigError, HeadFileError, UnsupportedHead
from drafter.head.config import (
    HeadOverrides,
    apply_overrides,
    default_aux_layer_ids,
    parse_head_config,
    read_head_config,
)
from tests.drafter.heads import MLA, flat_config, speculators_config


def test_nested_aux_layers_are_outputs_and_count_one_more() -> None:
    assert parse_head_config(flat_config()).aux_layer_ids == (2, 5, 8)


def test_top_level_aux_layers_are_inputs_as_they_are() -> None:
    assert parse_head_config(speculators_config()).aux_layer_ids == (2, 5, 8)


def test_no_aux_layers_is_an_empty_list() -> None:
    assert parse_head_config(flat_config(eagle_config=None)).aux_layer_ids == ()
    assert default_aux_layer_ids(30) == (2, 15, 27)


def test_norm_before_residual_defaults_differ_by_dialect() -> None:
    assert not parse_head_config(flat_config()).norm_before_residual
    assert parse_head_config(speculators_config(norm_before_residual=None)).norm_before_residual


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
    ],
)
def test_theta_is_found_wherever_it_stands(changes: dict[str, Any], theta: float) -> None:
    config = flat_config(rope_theta=None) | changes
    assert parse_head_config(config).rope.theta == theta


def test_scaling_is_read_in_both_spellings() -> None:
    old = parse_head_config(flat_config(rope_scaling={"type": "linear", "factor": 2}))
    new = parse_head_config(
        flat_config(rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 10_000})
    )
    assert old.rope == new.rope
    assert old.rope.scaling == {"factor": 2.0}


def test_latent_attention_shape() -> None:
    mla = parse_head_config(flat_config(**MLA, mla_use_nope=True)).mla
    assert mla is not None
    assert (mla.kv_lora_rank, mla.is_rotated) == (16, False)
    assert parse_head_config(flat_config()).mla is None


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (flat_config(hidden_size=None), "hidden_size"),
        (flat_config(hidden_size="32"), "hidden_size"),
        (flat_config(num_attention_heads=0), "num_attention_heads"),
        (flat_config(rms_norm_eps="small"), "rms_norm_eps"),
        (flat_config(fc_norm=1), "fc_norm"),
        (flat_config(eagle_config={"eagle_aux_hidden_state_layer_ids": "1"}), "eagle_config.eagle_aux"),
        (flat_config(rope_scaling=4), "rope_scaling"),
        (flat_config(rope_parameters={"rope_theta": 1.0}), "rope_theta"),
        (speculators_config({"intermediate_size": -1}), "transformer_layer_config.intermediate_size"),
        (speculators_config() | {"transformer_layer_config": []}, "transformer_layer_config"),
    ],
)
def test_errors_name_the_field(config: dict[str, Any], key: str) -> None:
    with pytest.raises(HeadConfigError, match=key):
        parse_head_config(config)


@pytest.mark.parametrize("changes", [{"rope_scaling": {"type": "dynamic"}}, {"partial_rotary_factor": 0.5}])
def test_other_rotations_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedHead):
        parse_head_config(flat_config(**changes))


def test_overrides_win() -> None:
    overrides = HeadOverrides(
        norm_before_residual=True, feeds_back_normed=True, rope_theta=7.0, aux_layer_ids=(1, 2, 3)
    )
    config = apply_overrides(parse_head_config(flat_config()), overrides)
    assert (config.norm_before_residual, config.feeds_back_normed) == (True, True)
    assert (config.rope.theta, config.aux_layer_ids) == (7.0, (1, 2, 3))
    assert apply_overrides(config, HeadOverrides()) == config


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_unreadable_files_are_typed_errors(text: str, tmp_path: Path) -> None:
    with pytest.raises(HeadFileError, match=r"config\.json"):
        read_head_config(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HeadFileError, match=r"config\.json"):
        read_head_config(tmp_path)
