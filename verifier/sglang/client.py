"""The gateway's end of an SGLang server: verify over stock HTTP. Loads neither torch nor sglang.

Items with drafts, and those whose features are wanted, go into ONE POST of all that wait; each computes only its newest
committed token and its drafts, the rest comes from the engine's prefix cache. Plain items are served from the engine's
own streaming decode, one stream a request, read ahead; an item with drafts ends the stream.

``run`` owns connections and streams; start it in the owner's TaskGroup before ``connect``. The engine may die and come
back at the same address: ``peer_lost`` fails what waits, ``connect`` starts afresh.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from verifier.sglang.capabilities import EngineCapabilities, read_capabilities
from verifier.sglang.config import SGLangConfig
from verifier.sglang.counters import Counters
from verifier.sglang.fast_lane import FastLane
from verifier.sglang.held import HeldRequest
from verifier.sglang.http import EngineHttp
from verifier.sglang.indexing import read_report, report_payload
from verifier.sglang.plugin.announcement import new_rid
from verifier.sglang.plugin.orders import PluginReport
from verifier.sglang.posting import BatchPoster
from verifier.sglang.rounds import RoundRunner
from verifier.sglang.routing import Route, Router, failure
from verifier.sglang.sampling import unverifiable
from verifier.sglang.sources import FeatureSource, SourceOwner
from verifier.sglang.streams import PlainStream
from wire.errors import PeerError, PeerLate, PeerLost, PeerRefused
from wire.messages import PROTOCOL_VERSION, Status, VerifyFailed, VerifyItem, VerifyReply, Welcome
from wire.sampling import SamplingParams

__all__ = ["SGLangVerifierClient"]

log = structlog.get_logger("gateway.verifier")

# Longest wait for an aborted stream's end; a decode step is far shorter on a GPU.
_SWITCH_WAIT_S = 0.25


class SGLangVerifierClient:
    """VerifierPort and PeerClient over HTTP. All methods belong to one event loop.

    Args:
        config: section [sglang].
        ring_path: where features that come as JSON are written; the plugin has a ring of its own.
        ring_slots, ring_slot_rows: size of that ring.
    """

    def __init__(
        self, config: SGLangConfig, *, ring_path: Path, ring_slots: int = 256, ring_slot_rows: int = 64
    ) -> None:
        self.counters = Counters()
        self._config = config
        self._sources = SourceOwner(config, ring_path=ring_path, ring_slots=ring_slots, ring_slot_rows=ring_slot_rows)
        self._source: FeatureSource | None = None
        self._http = EngineHttp(config.url, api_key=config.api_key)
        self._poster = BatchPoster(self._http, self.counters, overload_retries=config.overload_retries)
        self._group: asyncio.TaskGroup | None = None
        self._has_started = asyncio.Event()
        self._engine: EngineCapabilities | None = None
        self._runner: RoundRunner | None = None
        self._router: Router | None = None
        self._weight_version: str | None = None
        self._held: dict[str, HeldRequest] = {}
        self._waiting: set[asyncio.Timeout] = set()
        self._lost_reason: str | None = None
        self._prompts_begun = 0
        self._prompts_running = 0

    async def run(self) -> None:
        """Own connections and streams until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                await self._http.open()
                self._has_started.set()
                await asyncio.Event().wait()
        finally:
            self._group = None
            self.peer_lost("closing")
            self._close_lane()
            self._sources.close()
            await self._http.close()

    async def connect(self, *, timeout_s: float) -> Welcome:
        """Start afresh; the engine may still be loading, or not be there yet.

        Raises:
            PeerLate: ``run`` was not started within ``timeout_s``.
        """
        self.peer_lost("reconnecting")
        self._close_lane()
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_started.wait()
                await self._http.open()
        except TimeoutError:
            raise PeerLate("the client was not started") from None
        self._engine = self._runner = None
        return Welcome(protocol_version=PROTOCOL_VERSION, role="verifier", pid=0, ring_path=self._sources.ring_path)

    async def status(self, *, timeout_s: float) -> Status:
        """Ready once /server_info and /model_info could be read; before that, what is waited for.

        Raises:
            PeerError: the engine was up and does not answer any more.
        """
        if self._engine is None:
            try:
                server_info = await self._http.get("/server_info", timeout_s=timeout_s)
                model_info = await self._http.get("/model_info", timeout_s=timeout_s)
                report = await self._plugin_report(timeout_s)
            except PeerError as error:
                return self._status(f"waiting for SGLang at {self._config.url}: {error}")
            self._start_engine(read_capabilities(self._config, server_info, model_info, report))
        else:
            model_info = await self._http.get("/model_info", timeout_s=timeout_s)
            self._note_weights(model_info.get("weight_version"))
        return self._status("ready")

    async def verify(self, items: Sequence[VerifyItem], *, timeout_s: float) -> VerifyReply:
        """Verify items in one batch and wait until all are answered.

        Returns:
            One result per item, in no particular order. forward_s: the engine's own time for the POST, 0 if there
            was none. num_prefill_rows > 0: a prompt was computed beside it, or a stream opened or ended.

        Raises:
            PeerLost, PeerLate: the engine is gone, or too slow.
        """
        begun, switched = self._prompts_begun, self.counters["streams"] + self.counters["stream_switches"]
        async with self._answered_within(timeout_s):
            runner, router = self._runner, self._router
            if runner is None or router is None:
                raise PeerLost("the engine is not connected")
            routes, failed = self._routes(items, router)
            await self._streams_ended([route for route in routes if route.drops_stream])
            prompt_rows = sum(len(item.token_ids) for item in items if item.start == 0)
            self._prompts_begun += prompt_rows
            self._prompts_running += prompt_rows
            was_running = self._prompts_running
            try:
                results, forward_s = await runner.run(routes)
            finally:
                self._prompts_running -= prompt_rows
        is_clean = (
            self._prompts_begun == begun
            and was_running == 0
            and (switched == self.counters["streams"] + self.counters["stream_switches"])
        )
        return VerifyReply(
            results=(*failed, *results),
            forward_s=forward_s,
            num_rows=sum(len(item.draft_ids) + 1 for item in items),
            num_prefill_rows=0 if is_clean else max(1, prompt_rows),
            num_forwards=self.counters["posts"],
        )

    def close_request(self, request_id: str) -> None:
        """Forget a request and abort what the engine does for it, at once and without waiting."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._drop_stream(held)
            for rid in held.posted_rids:
                self._abort(rid)

    @property
    def mixes_plain_rounds(self) -> bool:
        """Plain rounds come from the engine's own streams; in one batch they would wait for the verify request."""
        return False

    def can_verify(self, sampling: SamplingParams) -> str | None:
        """Why drafts of such a request could never be verified here, for it to run plain and be counted; or None."""
        engine = self._engine
        return unverifiable(
            sampling,
            filters_jointly=engine is None or engine.filters_jointly,
            plugin_draws=engine is not None and engine.draws_target_ids,
        )

    def peer_lost(self, reason: str) -> None:
        """Fail everything that waits: the engine is known to be dead."""
        self._lost_reason = reason
        for waiting in self._waiting:
            if not waiting.expired():
                waiting.reschedule(0.0)
        for held in self._held.values():
            if held.stream is not None:
                held.stream.stop()
        self._held.clear()
        self._engine = self._runner = None

    @asynccontextmanager
    async def _answered_within(self, timeout_s: float) -> AsyncIterator[None]:
        self._lost_reason = None if self._runner is not None else self._lost_reason
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                self._waiting.add(limit)
                try:
                    yield
                except BaseExceptionGroup as group:
                    raise _peer_error(group) from None
        except TimeoutError:
            if self._lost_reason is not None:
                raise PeerLost(self._lost_reason) from None
            raise PeerLate(f"no answer within {timeout_s:g} s") from None
        finally:
            self._waiting.discard(limit)

    def _routes(self, items: Sequence[VerifyItem], router: Router) -> tuple[list[Route], list[VerifyFailed]]:
        routes: list[Route] = []
        failed: list[VerifyFailed] = []
        for item in items:
            held = self._hold(item)
            if held is None or not held.align(item):
                failed.append(failure(item, "unknown_request", "the target holds no such request, or an older one"))
                continue
            problem = router.problem(item, held)
            if problem is not None:
                failed.append(failure(item, *problem))
                continue
            route = router.route(item, held)
            if route.needs_stream and held.streamed() is None:
                self._open_stream(held, route)
            routes.append(route)
        return routes, failed

    def _hold(self, item: VerifyItem) -> HeldRequest | None:
        held = self._held.get(item.request_id)
        if held is None and item.start == 0 and item.sampling is not None:
            reason = self.can_verify(item.sampling)
            if reason is not None:
                self.counters[f"plain_{reason}"] += 1
            held = HeldRequest(
                request_id=item.request_id,
                sampling=item.sampling,
                prompt_len=item.base_len if item.prompt_len is None else item.prompt_len,
                plain_reason=reason,
            )
            self._held[item.request_id] = held
        return held

    def _open_stream(self, held: HeldRequest, route: Route) -> None:
        assert self._group is not None
        assert self._engine is not None
        self._drop_stream(held)
        self.counters["streams"] += 1
        is_tapped_prompt = route.follows_stream and route.item.start == 0
        if is_tapped_prompt:
            held.cache_key = uuid.uuid4().hex  # a namespace of its own: the whole prompt is computed
        room = self._engine.info.context_len - len(held.ids)
        if not held.follows_its_output:
            room = min(room, self._config.stream_tokens)
        held.stream = PlainStream(
            self._http,
            held.ids,
            held.sampling,
            num_top=route.item.num_logprobs,
            max_new_tokens=room,
            cache_key=held.cache_key,
            features_from=route.features_from if is_tapped_prompt else None,
            order=self._engine.order(held, wants_logprobs=False),
        )
        held.stream.task = self._group.create_task(held.stream.read())

    async def _streams_ended(self, routes: list[Route]) -> None:
        """End the streams of requests that go over to drafts, and let the engine keep what they computed.

        It enters the prefix cache when the aborted request ends, within a decode step; a verify that comes before
        would compute the whole plain stretch again.
        """
        streams = [route.held.stream for route in routes if route.held.stream is not None]
        if not streams:
            return
        self.counters["stream_switches"] += len(streams)
        for stream in streams:
            if not stream.is_over:
                self._abort(stream.rid)
        reading = [stream.task for stream in streams if stream.task is not None]
        await asyncio.wait(reading, timeout=_SWITCH_WAIT_S)
        for route in routes:
            self._drop_stream(route.held)

    def _drop_stream(self, held: HeldRequest) -> None:
        stream, held.stream = held.stream, None
        if stream is not None:
            if not stream.is_over:
                self._abort(stream.rid)
            stream.stop()
            if self._source is not None:
                self._source.forget(stream.rid)

    def _abort(self, rid: str) -> None:
        if self._group is not None:
            self.counters["aborts"] += 1
            self._group.create_task(self._send_abort(rid))

    async def _send_abort(self, rid: str) -> None:
        try:
            await self._http.abort(rid)
        except PeerError as error:
            log.debug("abort not sent", rid=rid, error=str(error))

    async def _plugin_report(self, timeout_s: float) -> PluginReport | None:
        """What the plugin in the engine says of itself, by way of a real draw; None if nothing answers."""
        if self._config.target_ids == "off":
            return None
        rid = new_rid(1)
        try:
            async with asyncio.timeout(timeout_s):
                (answer,) = await self._http.generate(report_payload(rid))
        except TimeoutError:
            self._abort(rid)
            raise PeerLate(f"no token within {timeout_s:g} s") from None
        except PeerRefused as error:
            log.warning("the plugin could not be asked", error=str(error))
            return None
        return read_report(answer)

    def _start_engine(self, engine: EngineCapabilities) -> None:
        self._engine, self._weight_version, self._lost_reason = engine, engine.weight_version, None
        for text in engine.missing:
            log.warning("engine", missing=text)
        log.info(
            "engine",
            version=engine.version,
            features=engine.features,
            page_size=engine.page_size,
            draws="plugin" if engine.draws_target_ids else "lists",
            rounds="fast lane" if engine.has_fast_lane else "http",
        )
        self._open_lane(engine)
        self._source = self._sources.open(engine)
        self._router = Router(engine, self._config, self._source)
        self._runner = RoundRunner(
            engine,
            self._config,
            self._poster,
            self._source,
            self.counters,
            abort=self._abort,
            weight_version=lambda: self._weight_version,
        )

    def _open_lane(self, engine: EngineCapabilities) -> None:
        self._close_lane()
        if engine.has_fast_lane and self._group is not None:
            lane = self._poster.lane = FastLane(self._config.lane_endpoint)
            lane.task = self._group.create_task(lane.read())

    def _close_lane(self) -> None:
        lane, self._poster.lane = self._poster.lane, None
        if lane is not None:
            lane.close()

    def _note_weights(self, version: str | None) -> None:
        if version != self._weight_version:
            log.warning("the engine's weights were replaced", old=self._weight_version, new=version)
            self.counters["weight_changes"] += 1
            self._weight_version = version

    def _status(self, phase: str) -> Status:
        engine = self._engine
        return Status(
            request_number=0,
            phase=phase,
            progress=1.0 if engine is not None else 0.0,
            is_ready=engine is not None,
            counters=dict(self.counters),
            verifier=engine.info if engine is not None else None,
            ring_path=self._sources.ring_path,
        )


def _peer_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The PeerError that ended concurrent calls; the group itself if it holds anything else."""
    if group.split(PeerError)[1] is not None:
        return group
    first = group.exceptions[0]
    return _peer_error(first) if isinstance(first, BaseExceptionGroup) else first
