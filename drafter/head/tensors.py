"""Reads tensors from disk: safetensors or pytorch_model.bin, one file or shards with an index."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from drafter.errors import HeadFileError

__all__ = ["read_tensors"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")


def read_tensors(path: Path, *, wanted: Callable[[str], bool] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a model directory or weight file, in the dtype they are stored in.

    Args:
        wanted: names to read; all if None.

    Raises:
        HeadFileError: no weights found, or a file is not readable as what its name says.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(path):
        try:
            tensors.update(_read_file(file, wanted))
        except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise HeadFileError(f"can't read {file}: {error}") from None
    return tensors


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise HeadFileError(f"there is no {path}")
    for name in _INDEXES:
        index = path / name
        if index.is_file():
            return _shards(index)
    for name in _SINGLES:
        if (path / name).is_file():
            return [path / name]
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others
    found = ", ".join(file.name for file in others) or "no weights"
    raise HeadFileError(f"{path} should hold one of {', '.join(_INDEXES + _SINGLES)}; found {found}")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise HeadFileError(f"{index} is no shard index") from None
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise HeadFileError(f"{index} names files outside its directory")
    return [index.parent / name for name in names]


def _read_file(file: Path, wanted: Callable[[str], bool] | None) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if wanted is None or wanted(name)}  # noqa: SIM118 - no dict
    # weights_only: a pickle may otherwise run code.
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise HeadFileError(f"{file} holds no flat table of tensors")
    return {name: value for name, value in loaded.items() if wanted is None or wanted(name)}
