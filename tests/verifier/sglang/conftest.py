"""A fake engine with a connected client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.verifier.sglang.fake_engine import FakeEngine
from verifier.sglang.client import SGLangVerifierClient
from verifier.sglang.config import SGLangConfig
from wire.messages import VerifyFailed, VerifyItem, VerifyResult
from wire.sampling import SamplingParams


class Rig:
    """Plays the gateway's Session: keeps committed ids, numbers rounds."""

    def __init__(self, engine: FakeEngine, client: SGLangVerifierClient, ring_path: Path) -> None:
        self.engine = engine
        self.client = client
        self.ring_path = ring_path
        self.ids: dict[str, list[int]] = {}
        self._told: dict[str, int] = {}
        self._sampling: dict[str, SamplingParams] = {}
        self._round_id = 0

    def open(self, request_id: str, prompt: list[int], sampling: SamplingParams | None = None) -> None:
        self.ids[request_id] = list(prompt)
        self._told[request_id] = 0
        self._sampling[request_id] = sampling or SamplingParams(temperature=0.0)

    def item(self, request_id: str, draft_ids: list[int] | tuple[int, ...] = (), **fields: Any) -> VerifyItem:
        start, ids = self._told[request_id], self.ids[request_id]
        self._told[request_id] = len(ids)
        self._round_id += 1
        return VerifyItem(
            request_id=request_id,
            round_id=self._round_id,
            base_len=len(ids),
            start=start,
            token_ids=tuple(ids[start:]),
            draft_ids=tuple(draft_ids),
            sampling=self._sampling[request_id] if start == 0 else None,
            prompt_len=len(ids) if start == 0 else None,
            **fields,
        )

    async def verify(self, *items: VerifyItem, timeout_s: float = 5.0) -> list[VerifyResult | VerifyFailed]:
        reply = await self.client.verify(items, timeout_s=timeout_s)
        by_id = {result.request_id: result for result in reply.results}
        return [by_id[item.request_id] for item in items]

    async def one(self, request_id: str, draft_ids: list[int] | tuple[int, ...] = (), **fields: Any) -> VerifyResult:
        """One round of one request, committed."""
        (result,) = await self.verify(self.item(request_id, draft_ids, **fields))
        assert isinstance(result, VerifyResult), result
        self.commit(result, draft_ids)
        return result

    def commit(self, result: VerifyResult, draft_ids: list[int] | tuple[int, ...] = ()) -> list[int]:
        assert len(result.target_ids) == len(draft_ids) + 1
        accepted = 0
        while accepted < len(draft_ids) and draft_ids[accepted] == result.target_ids[accepted]:
            accepted += 1
        block = list(result.target_ids[: accepted + 1])
        self.ids[result.request_id].extend(block)
        return block


@asynccontextmanager
async def running_client(config: SGLangConfig, ring_path: Path) -> AsyncIterator[SGLangVerifierClient]:
    client = SGLangVerifierClient(config, ring_path=ring_path, ring_slots=64, ring_slot_rows=4)
    task = asyncio.create_task(client.run())
    try:
        await client.connect(timeout_s=2.0)
        yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[Any]:
    """Call it with FakeEngine knobs and ``sglang=`` settings."""
    async with asyncio.timeout(20):
        stack: list[Any] = []

        async def make(sglang: dict[str, Any] | None = None, **knobs: Any) -> Rig:
            engine = FakeEngine(**knobs)
            await engine.start(tmp_path)
            config = SGLangConfig(url=engine.url, **(sglang or {}))
            manager = running_client(config, tmp_path / "ring")
            client = await manager.__aenter__()
            stack.append((manager, engine))
            status = await client.status(timeout_s=2.0)
            assert status.is_ready, status
            engine.posts.clear()  # the question to the plugin
            return Rig(engine, client, tmp_path / "ring")

        yield make
        for manager, engine in stack:
            await manager.__aexit__(None, None, None)
            await engine.stop()
