"""Files: what is read, and typed errors for what can't be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter.errors import HeadFileError
from drafter.head.tensors import read_tensors


def test_one_file_of_another_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert set(read_tensors(tmp_path)) == {"a"}


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    assert set(read_tensors(tmp_path, wanted=lambda name: name == "b")) == {"b"}


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(HeadFileError, match="no weights"):
        read_tensors(tmp_path)
    with pytest.raises(HeadFileError, match="there is no"):
        read_tensors(tmp_path / "nowhere")
    for name in ("a", "b"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(HeadFileError, match=r"a\.safetensors, b\.safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x00" * 64])
def test_broken_files(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadFileError, match=name):
        read_tensors(tmp_path)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"a": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadFileError):
        read_tensors(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadFileError, match="flat table"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", json.dumps({"weight_map": {"a": "../../secret"}}), json.dumps({"weight_map": {"a": "x"}})]
)
def test_broken_indexes(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(HeadFileError):
        read_tensors(tmp_path)
