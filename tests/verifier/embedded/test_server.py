"""The verifier process's server in this process: it answers while loading, and a broken pass is an answer too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verifier.embedded.test_engine import GREEDY, Client, plain, prompt_of
from tests.verifier.embedded.tiny_models import new_engine
from verifier.embedded.client import EmbeddedVerifierClient
from verifier.embedded.engine import EmbeddedEngine
from verifier.embedded.model import TargetModel
from verifier.embedded.server import LoadedEngine, VerifierServer
from wire.messages import VerifierInfo, VerifyFailed
from wire.tensor_ring import TensorRingWriter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
INFO = VerifierInfo(
    model_dir="tiny",
    model_type="llama",
    context_len=256,
    vocab_size=96,
    hidden_size=64,
    num_layers=7,
    aux_layer_ids=(2, 3, 4),
    is_row_invariant=True,
    kernels="native",
)


class Served:
    """A server with a connected client while the block lasts."""

    def __init__(self, path: Path, load: Callable[..., LoadedEngine]) -> None:
        self.endpoint = f"ipc://{path}/v.sock"
        self.server = VerifierServer(self.endpoint, ring_path="/ring", load=load)
        self.client = EmbeddedVerifierClient(self.endpoint)

    async def __aenter__(self) -> Served:
        self.running = asyncio.create_task(self.server.run())
        self._receiving = asyncio.create_task(self.client.run())
        await self.client.connect(timeout_s=10.0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.running.cancel()
        self._receiving.cancel()
        await asyncio.gather(self.running, self._receiving, return_exceptions=True)
        self.client.close()


def loader(model: TargetModel, ring: TensorRingWriter, **options: Any) -> Callable[..., LoadedEngine]:
    return lambda _progress: LoadedEngine(engine=new_engine(model, ring, **options), info=INFO)


async def ready(client: EmbeddedVerifierClient) -> Any:
    while True:
        status = await client.status(timeout_s=10.0)
        if status.is_ready:
            return status


async def test_a_request_from_start_to_end(llama: TargetModel, ring: TensorRingWriter, tmp_path: Path) -> None:
    async with Served(tmp_path, loader(llama, ring)) as served:
        status = await ready(served.client)
        assert (status.verifier, status.ring_path, status.phase) == (INFO, "/ring", "ready")
        prompt = prompt_of(1, 40)
        request = Client("a", prompt, GREEDY)
        while len(request.output) < 6:
            reply = await served.client.verify([request.item((1, 2))], timeout_s=10.0)
            request.commit(reply.results[0])
        assert request.output == plain(llama, ring, prompt, GREEDY, len(request.output))
        served.client.close_request("a")
        reply = await served.client.verify([request.item()], timeout_s=10.0)
        assert reply.results[0].code == "unknown_request"
        assert (await served.client.status(timeout_s=10.0)).counters["num_forwards"] > 0


async def test_eight_requests_in_one_batch_are_one_forward(
    llama: TargetModel, ring: TensorRingWriter, tmp_path: Path
) -> None:
    async with Served(tmp_path, loader(llama, ring)) as served:
        await ready(served.client)
        requests = [Client(f"r{i}", prompt_of(i, 6), GREEDY) for i in range(8)]
        for _ in range(2):
            before = (await served.client.status(timeout_s=10.0)).counters["num_forwards"]
            reply = await served.client.verify([r.item() for r in requests], timeout_s=10.0)
            for result in reply.results:
                requests[int(result.request_id[1:])].commit(result)
        assert reply.num_forwards == before + 1


async def test_it_answers_while_it_loads_and_serves_what_waited(
    llama: TargetModel, ring: TensorRingWriter, tmp_path: Path
) -> None:
    go_on = threading.Event()

    def load(progress: Callable[[str, float], None]) -> LoadedEngine:
        progress("loading target", 0.25)
        assert go_on.wait(30)
        return loader(llama, ring)(progress)

    async with Served(tmp_path, load) as served:
        while (status := await served.client.status(timeout_s=10.0)).phase != "loading target":
            pass
        assert (status.is_ready, status.progress, status.verifier) == (False, 0.25, None)
        waiting = asyncio.create_task(served.client.verify([Client("a", (1, 2), GREEDY).item()], timeout_s=30.0))
        assert not (await served.client.status(timeout_s=10.0)).is_ready
        go_on.set()
        assert len((await waiting).results) == 1


async def test_a_failed_load_is_reported_then_the_server_ends(tmp_path: Path) -> None:
    def load(_progress: object) -> LoadedEngine:
        raise ValueError("weights are broken")

    async with Served(tmp_path, load) as served:
        while (status := await served.client.status(timeout_s=10.0)).error is None:
            pass
        assert (status.phase, status.error, status.is_ready) == ("failed", "weights are broken", False)
        with pytest.raises(RuntimeError, match="weights are broken"):
            await served.running


async def test_a_pass_that_breaks_is_answered_and_the_next_one_works(
    llama: TargetModel, ring: TensorRingWriter, tmp_path: Path
) -> None:
    class Breaking(EmbeddedEngine):
        breaks = True

        def _choose(self) -> Any:
            if self.breaks:
                self.breaks = False
                raise ZeroDivisionError
            return super()._choose()

    def load(_progress: object) -> LoadedEngine:
        engine = new_engine(llama, ring)
        engine.__class__ = Breaking
        return LoadedEngine(engine=engine, info=INFO)

    async with Served(tmp_path, load) as served:
        await ready(served.client)
        reply = await served.client.verify([Client("a", (1, 2), GREEDY).item()], timeout_s=10.0)
        assert isinstance(reply.results[0], VerifyFailed)
        assert reply.results[0].code == "internal"
        reply = await served.client.verify([Client("a", (1, 2), GREEDY).item()], timeout_s=10.0)
        assert not isinstance(reply.results[0], VerifyFailed)
