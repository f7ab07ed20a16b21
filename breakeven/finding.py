"""One result of ``breakeven doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: what was looked at, how it stands, and the remedy where it is not "ok"."""

    subject: str
    verdict: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str = ""
