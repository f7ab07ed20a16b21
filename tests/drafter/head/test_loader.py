"""A head that is not complete, or holds more than we would run, is an error that names the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.errors import (
    HeadConfigError,
    HeadError,
    HeadFileError,
    MissingTensor,
    TensorMismatch,
    UnusedTensors,
)
from drafter.head.config import HeadOverrides
from drafter.head.loader import load_head
from tests.drafter.heads import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYOUTS,
    VOCAB,
    Tensors,
    flat_config,
    random_tensors,
    speculators_config,
    to_midlayer,
    without,
    write_head,
    write_target,
)


def write(path: Path, tensors: Tensors, **config: object) -> Path:
    return write_head(path / "head", flat_config(**config), tensors)


@pytest.mark.parametrize("name", sorted(set(random_tensors(1)) - {"t2d"}))
def test_each_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingTensor) as caught:
        load_head(write(tmp_path, to_midlayer(without(random_tensors(1), name))))
    assert caught.value.name == name


@pytest.mark.parametrize("layout", ["speculators, three qwen3 layers", "attention biases", "latent attention"])
def test_each_missing_tensor_of_a_special_layout_is_an_error(layout: str, tmp_path: Path) -> None:
    file = LAYOUTS[layout](tmp_path).head_dir / "model.safetensors"
    tensors = load_file(file)
    optional = {"t2d", "layers.0.self_attn.o_proj.bias"}
    for name in sorted(set(tensors) - optional):
        save_file(without(tensors, name), file)
        with pytest.raises(HeadError):
            load_head(file.parent)
    save_file(tensors, file)
    load_head(file.parent)


@pytest.mark.parametrize("name", ["midlayer.self_attn.k_proj.weight_scale", "layers.1.mlp.gate_proj.weight", "extra"])
def test_unused_tensors_are_named(name: str, tmp_path: Path) -> None:
    tensors = to_midlayer(random_tensors(1)) | {name: torch.zeros(2)}
    with pytest.raises((UnusedTensors, MissingTensor), match=r"weight_scale|layers\.1|extra"):
        load_head(write(tmp_path, tensors))


def test_shapes_are_checked_against_the_config(tmp_path: Path) -> None:
    with pytest.raises(TensorMismatch, match=r"q_proj.*\[32, 64\].*\[64, 64\]"):
        load_head(write(tmp_path, random_tensors(1), num_attention_heads=4))


def test_two_names_for_one_weight(tmp_path: Path) -> None:
    with pytest.raises(TensorMismatch, match="same weight"):
        load_head(write(tmp_path, random_tensors(1) | {"model.fc.weight": torch.zeros(2, 2)}))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(1)
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    with pytest.raises(TensorMismatch, match="int8"):
        load_head(write(tmp_path, tensors))


# ---------------------------------------------------------------- d2t and t2d


def test_absolute_ids_instead_of_offsets(tmp_path: Path) -> None:
    tensors = random_tensors(1)
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    with pytest.raises(TensorMismatch, match="d2t"):
        load_head(write(tmp_path, tensors))


def test_d2t_and_t2d_of_different_heads(tmp_path: Path) -> None:
    tensors = random_tensors(1) | {"t2d": random_tensors(2)["t2d"]}
    with pytest.raises(TensorMismatch, match="t2d"):
        load_head(write(tmp_path, tensors))


def test_float_d2t_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(1)
    tensors["d2t"] = tensors["d2t"].bfloat16()
    with pytest.raises(TensorMismatch, match="bfloat16"):
        load_head(write(tmp_path, tensors))


def test_doubled_target_ids(tmp_path: Path) -> None:
    tensors = without(random_tensors(1), "t2d")
    tensors["d2t"] = -torch.arange(DRAFT_VOCAB)
    with pytest.raises(TensorMismatch, match="same target id"):
        load_head(write(tmp_path, tensors))


def test_t2d_may_be_absent_and_config_may_leave_out_the_draft_vocabulary(tmp_path: Path) -> None:
    tensors = without(random_tensors(1), "t2d")
    head = load_head(write(tmp_path, tensors, draft_vocab_size=None))
    assert torch.equal(head.target_ids, tensors["d2t"] + torch.arange(DRAFT_VOCAB))


# ---------------------------------------------------------------- what comes from the target


def test_target_of_another_width(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", {"model.embed_tokens.weight": torch.zeros(VOCAB, 2 * HIDDEN)})
    head = write(tmp_path, without(random_tensors(1), "embed_tokens.weight"))
    with pytest.raises(MissingTensor, match="width 64"):
        load_head(head, target_model_dir=target)
    head = write(tmp_path, without(random_tensors(1), "lm_head.weight"))
    with pytest.raises(MissingTensor, match="width 64"):
        load_head(head, target_model_dir=target)


def test_target_with_a_smaller_vocabulary(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", {"model.embed_tokens.weight": torch.zeros(10, HIDDEN)})
    head = write(tmp_path, without(random_tensors(1), "lm_head.weight"))
    with pytest.raises(TensorMismatch, match="10 rows"):
        load_head(head, target_model_dir=target)


def test_target_without_an_embedding(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", {"model.other.weight": torch.zeros(10, HIDDEN)})
    head = write(tmp_path, without(random_tensors(1), "embed_tokens.weight"))
    with pytest.raises(HeadFileError, match="embed_tokens"):
        load_head(head, target_model_dir=target)


def test_target_with_two_embeddings(tmp_path: Path) -> None:
    tensors = {f"{part}.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN) for part in ("text", "audio")}
    head = write(tmp_path, without(random_tensors(1), "embed_tokens.weight"))
    with pytest.raises(HeadFileError, match="several"):
        load_head(head, target_model_dir=write_target(tmp_path / "target", tensors))


def test_default_aux_layers_come_from_the_targets_depth(tmp_path: Path) -> None:
    head_dir = write(tmp_path, random_tensors(1), eagle_config=None)
    target = write_target(tmp_path / "target", {"unused": torch.zeros(1)}, num_layers=30)
    assert load_head(head_dir, target_model_dir=target).config.aux_layer_ids == (2, 15, 27)
    assert load_head(head_dir).config.aux_layer_ids == ()
    assert load_head(head_dir, target_model_dir=tmp_path / "nowhere").config.aux_layer_ids == ()


# ---------------------------------------------------------------- conventions and files


def test_declared_norms_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(MissingTensor, match="fc_norm"):
        load_head(write(tmp_path, random_tensors(1), fc_norm=True))
    with pytest.raises(MissingTensor, match="input_norm"):
        load_head(write_head(tmp_path / "head", speculators_config(norm_before_fc=True), random_tensors(1)))
    with pytest.raises(MissingTensor, match="q_norm"):
        load_head(write(tmp_path, random_tensors(1), model_type="qwen3"))
    with pytest.raises(MissingTensor, match=r"q_proj\.bias"):
        load_head(write(tmp_path, random_tensors(1), attention_bias=True))


def test_latent_tensors_need_a_latent_config(tmp_path: Path) -> None:
    tensors = random_tensors(1, is_mla=True)
    with pytest.raises(HeadConfigError, match="kv_lora_rank"):
        load_head(write(tmp_path, tensors))


def test_fc_norms_that_do_not_divide_the_features(tmp_path: Path) -> None:
    norms = {f"fc_norm.{index}.weight": torch.ones(HIDDEN) for index in range(5)}
    with pytest.raises(TensorMismatch, match="multiple of 5"):
        load_head(write(tmp_path, random_tensors(1) | norms))


def test_overrides_reach_the_head(tmp_path: Path) -> None:
    head = load_head(write(tmp_path, random_tensors(1)), overrides=HeadOverrides(rope_theta=5.0))
    assert head.config.rope.theta == 5.0


def test_head_format_says_what_it_was(tmp_path: Path) -> None:
    assert load_head(write(tmp_path, random_tensors(1))).head_format == "flat, llama, 1 layer"
    deep = write_head(tmp_path / "deep", speculators_config(), random_tensors(1, num_layers=2))
    assert load_head(deep).head_format == "speculators, llama, 2 layers"
