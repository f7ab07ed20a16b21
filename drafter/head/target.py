"""The target's own matrices and layer count, for what a head leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from drafter.errors import HeadFileError
from drafter.head.tensors import read_tensors

__all__ = ["TargetFiles"]

_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class TargetFiles:
    """A target's directory in Hugging Face layout, read only as far as asked."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._read: dict[str, torch.Tensor | None] = {}

    def num_layers(self) -> int | None:
        """Decoder layers by config.json, or None if it doesn't say."""
        try:
            raw = json.loads((self.model_dir / "config.json").read_text())
        except (OSError, ValueError):
            return None
        value = raw.get("num_hidden_layers", raw.get("text_config", {}).get("num_hidden_layers"))
        return value if isinstance(value, int) else None

    def embedding(self) -> torch.Tensor:
        """[V, Ht] in its stored dtype.

        Raises:
            HeadFileError: no such tensor.
        """
        found = self._matrix(_EMBEDDING)
        if found is None:
            raise HeadFileError(f"{self.model_dir} holds no {_EMBEDDING}")
        return found

    def lm_head(self) -> torch.Tensor:
        """[V, Ht] in its stored dtype; the embedding where the target ties them.

        Raises:
            HeadFileError: neither tensor.
        """
        found = self._matrix(_LM_HEAD)
        return self.embedding() if found is None else found

    def _matrix(self, suffix: str) -> torch.Tensor | None:
        if suffix in self._read:
            return self._read[suffix]
        # Multimodal checkpoints nest the language model, e.g. "language_model.model.embed_tokens.weight".
        found = read_tensors(self.model_dir, wanted=lambda name: name == suffix or name.endswith("." + suffix))
        if len(found) > 1:
            raise HeadFileError(f"{self.model_dir} holds several {suffix}: {', '.join(sorted(found))}")
        self._read[suffix] = next(iter(found.values()), None)
        return self._read[suffix]
