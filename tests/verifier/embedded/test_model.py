"""The forward pass equals transformers' own, for every architecture, in logits and in the drafter's features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cpukernels.native import NativeKernels
from cpukernels.ports import ragged_rows
from cpukernels.reference import TorchKernels
from tests.verifier.embedded.tiny_models import CONFIGS, HIDDEN, VOCAB, load, write_model, write_sharded
from verifier.embedded.errors import ModelNotFound, UnsupportedModel
from verifier.embedded.model import TargetModel

PROMPT_LEN = 75


def _ids(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def _forward(model: TargetModel, ids: np.ndarray, splits: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of all positions, computed in pieces."""
    cache, logits, features = model.new_cache(), [], []
    for part in np.split(ids, splits):
        hidden, own = model.forward(part, ragged_rows([cache], [len(part)]))
        cache.length += len(part)
        logits.append(model.logits(hidden))
        features.append(own)
    return np.concatenate(logits), np.concatenate(features)


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_model(tmp_path_factory.mktemp("model"), make(), seed=seed)
        for seed, (name, make) in enumerate(CONFIGS.items())
    }


@pytest.mark.parametrize("kernel_name", ["native", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers(dirs: dict[str, Path], native: NativeKernels, name: str, kernel_name: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(dirs[name], dtype=torch.float32).eval()
    # Of three layers the default would name one twice.
    aux = (0, 1, 2) if theirs.config.num_hidden_layers == 3 else ()
    ours = load(dirs[name], native if kernel_name == "native" else TorchKernels(), aux_layer_ids=aux)
    ids = _ids(PROMPT_LEN)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)[None], output_hidden_states=True)
    logits, features = _forward(ours, ids, [40, 41, 60])
    np.testing.assert_allclose(logits, expected.logits[0].numpy(), rtol=1e-3, atol=2e-4)
    # transformers' hidden_states[i] is the input of layer i.
    wanted = torch.cat([expected.hidden_states[i][0] for i in ours.aux_layer_ids], dim=1).numpy()
    np.testing.assert_allclose(features, wanted, rtol=1e-3, atol=2e-4)
    assert (logits.argmax(1) == expected.logits[0].argmax(1).numpy()).all()
    # A tolerance means something only against the size of the numbers.
    assert expected.logits[0].std() > 0.3


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_bit_for_bit_the_same_however_they_are_split(
    dirs: dict[str, Path], native: NativeKernels, name: str
) -> None:
    aux = (0, 1, 2)
    model = load(dirs[name], native, aux_layer_ids=aux)
    ids = _ids(PROMPT_LEN)
    one_by_one = _forward(model, ids, list(range(1, PROMPT_LEN)))
    for splits in ([], [1], [13, 26, 39], [64]):
        for got, expected in zip(_forward(model, ids, splits), one_by_one, strict=True):
            assert (got == expected).all()


def test_a_batch_of_requests_equals_each_alone(llama: TargetModel) -> None:
    lengths = [1, 30, 7, 64, 13]
    prompts = [_ids(length, seed=length) for length in lengths]
    caches = [llama.new_cache() for _ in lengths]
    hidden, features = llama.forward(np.concatenate(prompts), ragged_rows(caches, lengths))
    logits, start = llama.logits(hidden), 0
    for prompt in prompts:
        own_logits, own_features = _forward(llama, prompt, [])
        assert (logits[start : start + len(prompt)] == own_logits).all()
        assert (features[start : start + len(prompt)] == own_features).all()
        start += len(prompt)


def test_features_are_not_a_view_of_the_running_hidden_state(llama: TargetModel) -> None:
    ids = _ids(9)
    features = _forward(llama, ids, [])[1]
    assert features.shape == (9, 3 * HIDDEN) == (9, llama.feature_size)
    parts = np.split(features, 3, axis=1)
    assert llama.aux_layer_ids == (2, 3, 4)
    assert not np.allclose(parts[0], parts[1])


def test_shards_give_the_same_model(llama_dir: Path, llama: TargetModel, native: NativeKernels, tmp_path: Path) -> None:
    sharded = load(write_sharded(tmp_path / "shards", llama_dir), native)
    ids = _ids(20)
    assert (_forward(sharded, ids, [])[0] == _forward(llama, ids, [])[0]).all()


def test_half_precision_weights_are_widened(llama_dir: Path, native: NativeKernels, tmp_path: Path) -> None:
    tensors = load_file(llama_dir / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float32):
        target = tmp_path / str(dtype)
        target.mkdir()
        (target / "config.json").write_text((llama_dir / "config.json").read_text())
        save_file({n: t.to(torch.bfloat16).to(dtype) for n, t in tensors.items()}, target / "model.safetensors")
    narrow, wide = (load(tmp_path / str(d), native) for d in (torch.bfloat16, torch.float32))
    ids = _ids(10)
    assert (_forward(narrow, ids, [])[0] == _forward(wide, ids, [])[0]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux_layer_ids": (0, 1, 7)}, "layers of 7"),
        ({"aux_layer_ids": (-1, 1, 2)}, "layers of 7"),
        ({"aux_layer_ids": (1, 1, 2)}, "different"),
        ({"aux_layer_ids": (1, 2, 1), "context_len": 10}, "different"),
        ({"context_len": 257}, "257 is over"),
    ],
)
def test_impossible_options_are_refused(
    llama_dir: Path, native: NativeKernels, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(llama_dir, native, **options)


def test_a_smaller_context_is_taken(llama_dir: Path, native: NativeKernels) -> None:
    assert load(llama_dir, native, context_len=100).context_len == 100
    assert load(llama_dir, native).context_len == 256


@pytest.mark.parametrize("layers", [7, 8, 11])
def test_the_default_aux_layers_are_eagles(tmp_path: Path, native: NativeKernels, layers: int) -> None:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = layers
    model = load(write_model(tmp_path, config), native)
    assert model.aux_layer_ids == (2, layers // 2, layers - 3)


@pytest.mark.parametrize("layers", [3, 4, 5, 6])
def test_shallow_targets_give_first_middle_and_last(tmp_path: Path, native: NativeKernels, layers: int) -> None:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = layers
    write_model(tmp_path, config)
    assert load(tmp_path, native).aux_layer_ids == (0, layers // 2, layers - 1)
    assert load(tmp_path, native, aux_layer_ids=(0, 1, 2)).aux_layer_ids == (0, 1, 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_target_without_three_layers_is_refused(tmp_path: Path, native: NativeKernels, layers: int) -> None:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = layers
    write_model(tmp_path, config)
    with pytest.raises(UnsupportedModel, match=f"three different layers of {layers}"):
        load(tmp_path, native)


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.3.mlp.down_proj.weight"])
def test_a_missing_tensor_is_named(llama_dir: Path, native: NativeKernels, tmp_path: Path, missing: str) -> None:
    tensors = load_file(llama_dir / "model.safetensors")
    tensors.pop(missing)
    (tmp_path / "config.json").write_text((llama_dir / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFound, match=missing):
        load(tmp_path, native)


def test_missing_weights_are_named(llama_dir: Path, native: NativeKernels, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama_dir / "config.json").read_text())
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        load(tmp_path, native)


def test_progress_goes_from_0_to_1(llama_dir: Path, native: NativeKernels) -> None:
    from verifier.embedded.model import load_target

    seen: list[tuple[str, float]] = []
    load_target(llama_dir, kernels=native, progress=lambda *step: seen.append(step))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
