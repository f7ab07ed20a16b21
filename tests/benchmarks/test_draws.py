"""The measurement of draws finds what differs, and times every kind."""

from __future__ import annotations

import pytest
import torch

from benchmarks import draws
from verifier.sglang.plugin.batched_draws import BatchedDraws

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [*draws.KINDS, "mixed"])
def test_the_batched_draws_are_the_definitions(kind: str) -> None:
    cell = draws.compare(kind, 9, vocab_size=64, device=CPU, calls=1)
    assert cell["differ"] == []
    assert cell["device_ms"] > 0.0


def test_another_id_is_found_and_listed(monkeypatch) -> None:
    class Shifted(BatchedDraws):
        def draw(self, rows, groups):
            return (super().draw(rows, groups) + 1) % rows.shape[1]

    monkeypatch.setattr(draws, "BatchedDraws", Shifted)
    cell = draws.compare("greedy", 3, vocab_size=64, device=CPU, calls=1)
    assert [entry["found"] for entry in cell["differ"]] == [(e["expected"] + 1) % 64 for e in cell["differ"]]
    assert len(cell["differ"]) == 3
