"""What the files of a model directory say about its special tokens; gateway and verifier must agree on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["eos_ids", "read_json", "special_tokens"]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def special_tokens(model_dir: Path) -> dict[str, str]:
    """Texts of special tokens by their names, e.g. ``{"eos_token": "</s>"}``."""
    # A token is written either as its text or as an AddedToken object; the first file that names it wins.
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in read_json(model_dir / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found.setdefault(key, text)
    return found


def eos_ids(model_dir: Path, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """All ids that end an answer.

    Args:
        token_to_id: the tokenizer's; None for a text that is no token.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(model_dir / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    text = special_tokens(model_dir).get("eos_token")
    token_id = None if text is None else token_to_id(text)
    ids.update([] if token_id is None else [token_id])
    return frozenset(ids)
