"""Writes a profile with the settings that won, as TOML that ``breakeven launch`` and ``serve`` read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verifier.sglang.config import SGLangConfig
from verifier.tuning.change import Change, apply_changes, settings_of

__all__ = ["best_profile"]


def best_profile(
    tables: Mapping[str, Mapping[str, Any]],
    config: SGLangConfig,
    changes: Sequence[Change],
    *,
    comments: Sequence[str],
    num_draft_tokens: int,
) -> str:
    """The profile's own tables with ``changes`` made; what changed is said in comments above.

    Args:
        tables: the profile as read. config: its section [sglang], resolved. num_draft_tokens: best K, 0 keeps the
            profile's: the controller turns drafting off by itself.
    """
    changed = apply_changes(config, changes)
    out = {name: dict(table) for name, table in tables.items()}
    sglang = out.setdefault("sglang", {})
    if changes:
        sglang["args"], sglang["env"] = list(changed.args), list(changed.env)
    speculation = out.get("speculation", {})
    if num_draft_tokens and num_draft_tokens in speculation.get("candidates", []):
        speculation["num_draft_tokens"] = num_draft_tokens
    lines = [f"# {comment}" for comment in comments]
    for change in changes:
        before = settings_of(config, change)
        lines.append(f"# {change.text} (before: {'nothing' if before is None else ' '.join(before) or 'set'})")
    for name, table in out.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        inner = ",\n  ".join(_value(each) for each in value)
        return f"[\n  {inner},\n]" if len(value) > 3 else f"[{', '.join(_value(each) for each in value)}]"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value)
