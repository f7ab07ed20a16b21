from __future__ import annotations

import pytest

from gateway.ports import LoadPhase
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine


@pytest.mark.parametrize(
    ("phase", "status", "word"),
    [
        (LoadPhase(is_ready=True, is_draining=False, phase="serving"), 200, "ready"),
        (LoadPhase(is_ready=False, is_draining=False, phase="loading target", progress=0.4), 503, "loading"),
        (LoadPhase(is_ready=True, is_draining=True, phase="draining"), 503, "draining"),
    ],
)
async def test_ready_tells_the_phase(start_edge: StartEdge, phase: LoadPhase, status: int, word: str) -> None:
    client = await start_edge(FakeEngine(phase=phase))
    response = await client.get("/ready")
    assert response.status == status
    assert await response.json() == {"status": word, "phase": phase.phase, "progress": phase.progress}
    assert ("Retry-After" in response.headers) is (status == 503)


async def test_live_whatever_the_phase(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(phase=LoadPhase(is_ready=False, is_draining=False, phase="loading")))
    for url in ("/health", "/ping"):
        assert await (await client.get(url)).json() == {"status": "ok"}
    assert (await client.head("/health")).status == 200
