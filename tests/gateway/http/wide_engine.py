from __future__ import annotations

from dataclasses import replace

from gateway.ports import ModelCard
from tests.gateway.fakes import FakeEngine


class WideEngine(FakeEngine):
    """A fake engine with room for a tool prompt in bytes."""

    def model_card(self) -> ModelCard:
        return replace(super().model_card(), context_len=8192)
