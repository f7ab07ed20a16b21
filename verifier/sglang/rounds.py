"""One verify call: the POST and the streams side by side, and how their answers become results."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from verifier.sglang.answers import Answer
from verifier.sglang.capabilities import EngineCapabilities
from verifier.sglang.choosing import DrawnRound, RoundChooser, RoundIds, padded, position_logprobs
from verifier.sglang.config import SGLangConfig
from verifier.sglang.counters import Counters
from verifier.sglang.held import HeldRequest
from verifier.sglang.indexing import Ask, drawn_ids, output_logprob, position_lists, prompt_lists
from verifier.sglang.plugin.announcement import new_rid
from verifier.sglang.posting import BatchPoster
from verifier.sglang.routing import Route, failure
from verifier.sglang.sampling import num_listed_for
from verifier.sglang.sources import FeatureSource
from wire.errors import PeerRefused
from wire.messages import FeatureSpan, PositionLogprobs, VerifyFailed, VerifyResult

__all__ = ["RoundRunner", "Route", "failure"]

Result = VerifyResult | VerifyFailed


@dataclass(slots=True, kw_only=True)
class _Posted:
    """What the POST says about one item.

    ids: None where they are the stream's, and until they are complete. chooser, open_index: a position of it that needs
    the whole row. is_cut: the plugin saw the drafts in two passes.
    """

    ask: Ask
    answer: Answer
    ids: RoundIds | None = None
    chooser: RoundChooser | None = None
    open_index: int | None = None
    is_cut: bool = False


class RoundRunner:
    """One per life of the engine.

    Args:
        abort: stop an engine request. weight_version: the engine's now.
    """

    def __init__(
        self,
        engine: EngineCapabilities,
        config: SGLangConfig,
        poster: BatchPoster,
        source: FeatureSource | None,
        counters: Counters,
        *,
        abort: Callable[[str], None],
        weight_version: Callable[[], str | None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._poster = poster
        self._source = source
        self._counters = counters
        self._abort = abort
        self._weight_version = weight_version

    async def run(self, routes: list[Route]) -> tuple[list[Result], float]:
        """Answer all; also the engine's own time for the POST in seconds, 0 if there was none.

        Raises:
            PeerLost, or a group of it: the engine is gone.
        """
        posted = [route for route in routes if route.needs_post]
        async with asyncio.TaskGroup() as group:
            post = group.create_task(self._post(posted))
            streams = [group.create_task(self._from_stream(r)) for r in routes if r.needs_stream]
        answers = post.result()
        streamed = {result.request_id: result for result in (task.result() for task in streams)}
        results: list[Result] = []
        for route in routes:
            own = streamed.get(route.item.request_id)
            found = answers.get(route.item.request_id)
            results.append(await self._merge(route, own, found))
        times = [p.answer.meta_info.e2e_latency for p in answers.values() if isinstance(p, _Posted)]
        return results, max(times, default=0.0)

    # ------------------------------------------------------------ the POST

    async def _post(self, routes: list[Route]) -> dict[str, _Posted | PeerRefused]:
        if not routes:
            return {}
        asks = [self._ask(route) for route in routes]
        answers = await self._send(routes, asks)
        found: dict[str, _Posted | PeerRefused] = {}
        for route, ask, answer in zip(routes, asks, answers, strict=True):
            found[route.item.request_id] = self._read(route, ask, answer)
        await self._ask_cut(routes, found)
        await self._widen(routes, found)
        return found

    def _ask(self, route: Route) -> Ask:
        item, held = route.item, route.held
        start = item.base_len - 1
        if route.features_from is not None and item.start == 0:
            held.cache_key = uuid.uuid4().hex
        elif route.features_from is not None:
            start = min(start, route.features_from)
        if item.score_prompt:
            start = 0
        self._counters["prompt_items" if item.start == 0 else "verify_items"] += 1
        order = None if route.needs_stream else self._engine.order(held, wants_logprobs=item.num_logprobs is not None)
        num_top = num_listed_for(
            held.sampling, top_logprobs_num=self._config.top_logprobs_num, num_logprobs=item.num_logprobs
        )
        return Ask(
            rid=new_rid(start if route.features_from is None else route.features_from),
            input_ids=[*held.ids, *item.draft_ids],
            base_len=item.base_len,
            start_len=start,
            num_top=num_top if order is None else item.num_logprobs or 0,
            order=order,
            wants_hidden=route.features_from is not None and self._source is not None and self._source.in_reply,
            cache_key=held.cache_key,
            is_round=item.start > 0,
        )

    async def _send(self, routes: list[Route], asks: list[Ask]) -> list[Answer | PeerRefused]:
        is_answered = False
        rids = [ask.rid for ask in asks]  # asking again gives fresh ones
        for route, rid in zip(routes, rids, strict=True):
            route.held.posted_rids.add(rid)
        try:
            answers = await self._poster.post(asks)
            is_answered = True
            return answers
        finally:
            for route, rid, ask in zip(routes, rids, asks, strict=True):
                if not is_answered and rid in route.held.posted_rids:
                    self._abort(ask.rid)
                route.held.posted_rids.discard(rid)

    def _read(self, route: Route, ask: Ask, answer: Answer | PeerRefused) -> _Posted | PeerRefused:
        if isinstance(answer, PeerRefused):
            return answer
        item, held = route.item, route.held
        if (
            item.start > 0
            and answer.meta_info.cached_tokens != ask.start_len // self._engine.page_size * self._engine.page_size
        ):
            self._counters["cached_tokens_differ"] += 1
        # The fast lane's answers don't name the weights; the last status did.
        changed = self._weights_changed(held, answer.meta_info.weight_version or self._weight_version())
        if changed is not None:
            return changed
        posted = _Posted(ask=ask, answer=answer)
        if not route.needs_stream:
            try:
                self._choose(route, posted)
            except PeerRefused as error:
                return error
        return posted

    def _choose(self, route: Route, posted: _Posted) -> None:
        ask, answer, item = posted.ask, posted.answer, route.item
        if ask.order is None:
            posted.ids = posted.chooser = RoundChooser(
                position_lists(ask, answer),
                route.held.sampling,
                base_len=item.base_len,
                draft_ids=item.draft_ids,
                vocab_size=self._engine.info.vocab_size,
                num_listed=ask.num_top,
            )
            posted.open_index = posted.chooser.advance()
            return
        drawn = drawn_ids(ask, answer)
        if drawn is None:
            posted.is_cut = True
            return
        self._counters["drawn_ids"] += len(drawn.ids)
        self._counters["expanded_rounds"] += drawn.is_expanded
        own: tuple[float, ...] = ()
        if item.num_logprobs is not None:
            own = (*drawn.logprobs, output_logprob(answer))
        lists = position_lists(ask, answer) if ask.num_top else [[] for _ in drawn.ids]
        posted.ids = DrawnRound(drawn.ids, own, lists)

    async def _ask_cut(self, routes: list[Route], found: dict[str, _Posted | PeerRefused]) -> None:
        """Ask once more where a long extend was cut between drafts; now all before them is in the engine's cache."""
        cut = [
            (route, posted)
            for route in routes
            if isinstance(posted := found[route.item.request_id], _Posted) and posted.is_cut
        ]
        if not cut:
            return
        self._counters["cut_rounds"] += len(cut)
        asks = [
            dataclasses.replace(
                posted.ask,
                rid=new_rid(len(posted.ask.input_ids)),
                start_len=route.item.base_len - 1,
                wants_hidden=False,
            )
            for route, posted in cut
        ]
        answers = await self._send([route for route, _ in cut], asks)
        for (route, posted), ask, answer in zip(cut, asks, answers, strict=True):
            again = answer if isinstance(answer, PeerRefused) else self._read(route, ask, answer)
            if isinstance(again, _Posted) and again.ids is None:
                again = PeerRefused("target_error", "the engine cut the drafts into two passes, twice")
            if isinstance(again, PeerRefused):
                found[route.item.request_id] = again
            else:
                posted.ids = again.ids  # features and scores are the first answer's

    async def _widen(self, routes: list[Route], found: dict[str, _Posted | PeerRefused]) -> None:
        """Ask for whole rows, of all requests together, until every position is decided."""
        while True:
            waiting: list[tuple[Route, _Posted]] = []
            asks: list[Ask] = []
            for route in routes:
                posted = found[route.item.request_id]
                if isinstance(posted, _Posted) and posted.open_index is not None:
                    ids = posted.ask.input_ids[: route.item.base_len + posted.open_index]
                    waiting.append((route, posted))
                    asks.append(
                        Ask(
                            rid=new_rid(len(ids)),
                            input_ids=ids,
                            base_len=len(ids),
                            start_len=len(ids) - 1,
                            num_top=self._engine.info.vocab_size,
                            wants_hidden=False,
                            cache_key=route.held.cache_key,
                            is_round=True,
                        )
                    )
            if not asks:
                return
            self._counters["widened_positions"] += len(asks)
            answers = await self._send([route for route, _ in waiting], asks)
            for (route, posted), ask, answer in zip(waiting, asks, answers, strict=True):
                if isinstance(answer, PeerRefused):
                    found[route.item.request_id] = answer
                    continue
                assert posted.chooser is not None
                try:
                    posted.open_index = posted.chooser.advance(position_lists(ask, answer)[0])
                except PeerRefused as error:
                    found[route.item.request_id] = error

    # ------------------------------------------------------------ the stream

    async def _from_stream(self, route: Route) -> Result:
        item, stream = route.item, route.held.stream
        assert stream is not None
        ids: list[int] = []
        entries: list[PositionLogprobs] = []
        try:
            for index in range(len(item.draft_ids) + 1):
                token_id, own, top = await stream.id_at(item.base_len + index)
                ids.append(token_id)
                listed = [(i, logprob) for logprob, i, _ in top if logprob is not None]
                entries.append(position_logprobs(token_id, listed, item.num_logprobs or 0, own[0] if own else None))
                if index < len(item.draft_ids) and token_id != item.draft_ids[index]:
                    break
        except PeerRefused as error:
            return failure(item, error.code, error.message)
        changed = self._weights_changed(route.held, stream.weight_version)
        if changed is not None:
            return failure(item, changed.code, changed.message)
        self._counters["stream_tokens"] += 1
        spans = await self._streamed_spans(route, stream.rid) if route.follows_stream else ()
        length = len(item.draft_ids) + 1
        return VerifyResult(
            request_id=item.request_id,
            round_id=item.round_id,
            base_len=item.base_len,
            target_ids=padded(ids, length),
            spans=spans,
            logprobs=None if item.num_logprobs is None else tuple(entries + [entries[-1]] * (length - len(entries))),
            cached_len=stream.cached_len if item.start == 0 else 0,
        )

    # ------------------------------------------------------------ both

    async def _merge(self, route: Route, streamed: Result | None, posted: _Posted | PeerRefused | None) -> Result:
        item = route.item
        if isinstance(streamed, VerifyFailed):
            return streamed
        if isinstance(posted, PeerRefused):
            # The stream has the id; what the POST should have added was a wish, unless it was the prompt's score.
            if streamed is not None and not item.score_prompt:
                return streamed
            return failure(item, posted.code, posted.message)
        if posted is None:
            assert streamed is not None
            return streamed
        spans = await self._spans(route, posted)
        scored = None
        if item.score_prompt:
            try:
                scored = tuple(
                    position_logprobs(own[0], top, item.num_logprobs or 0, own[1])
                    for own, top in prompt_lists(posted.ask, posted.answer)
                )
            except PeerRefused as error:
                return failure(item, error.code, error.message)
        if streamed is not None:
            ids, logprobs = streamed.target_ids, streamed.logprobs
        else:
            assert posted.ids is not None
            ids = posted.ids.target_ids
            logprobs = None if item.num_logprobs is None else posted.ids.logprobs(item.num_logprobs)
        return VerifyResult(
            request_id=item.request_id,
            round_id=item.round_id,
            base_len=item.base_len,
            target_ids=ids,
            spans=spans,
            logprobs=logprobs,
            prompt_logprobs=scored,
            cached_len=posted.answer.meta_info.cached_tokens if item.start == 0 else 0,
        )

    async def _streamed_spans(self, route: Route, rid: str) -> tuple[FeatureSpan, ...]:
        assert self._source is not None
        assert route.features_from is not None
        spans = await self._source.streamed(rid, first=route.features_from, last=route.item.base_len - 1)
        if spans is None:
            self._counters["streamed_feature_gaps"] += 1
            route.held.num_streamed_gaps += 1
            route.held.streamed_gap_end = route.item.base_len
            return ()
        route.held.num_streamed_gaps = 0
        return spans

    async def _spans(self, route: Route, posted: _Posted) -> tuple[FeatureSpan, ...]:
        if route.features_from is None or self._source is None:
            return ()
        last = len(posted.ask.input_ids) - 1
        try:
            spans = await self._source.spans(posted.ask.rid, posted.answer, first=route.features_from, last=last)
        finally:
            self._source.forget(posted.ask.rid)
        if spans is None:
            # Missing once, they would be missing again: the prompt was longer than one chunk, or the plugin is off.
            self._counters["feature_gaps"] += 1
            route.held.has_lost_features = True
            return ()
        return spans

    def _weights_changed(self, held: HeldRequest, version: str | None) -> PeerRefused | None:
        if held.weight_version is None:
            held.weight_version = version
        if version == held.weight_version:
            return None
        self._counters["weight_changes"] += 1
        return PeerRefused("weights_changed", f"the target's weights changed from {held.weight_version} to {version}")


def _no_features(ask: Ask) -> str:
    return new_rid(len(ask.input_ids))


def _last(route: Route) -> int:
    return route.item.base_len - 1
