"""Which items are posted and which come from a stream."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.sglang.capabilities import EngineCapabilities
from verifier.sglang.config import SGLangConfig
from verifier.sglang.held import HeldRequest
from verifier.sglang.indexing import unsupported_grammar
from verifier.sglang.sources import FeatureSource
from wire.messages import FeatureSpan, VerifyFailed, VerifyItem

__all__ = ["Route", "Router", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one item is answered.

    Fields:
        needs_post, needs_stream: at least one. With both, the ids are the stream's, and the POST fetches the rest.
        drops_stream: the stream that runs ends here.
        features_from: from where features are fetched by the POST, or None.
        spans: features that the stream brought already.
    """

    item: VerifyItem
    held: HeldRequest
    needs_post: bool
    needs_stream: bool
    drops_stream: bool = False
    features_from: int | None = None
    spans: tuple[FeatureSpan, ...] = ()


def failure(item: VerifyItem, code: str, message: str) -> VerifyFailed:
    """This item could not be answered."""
    return VerifyFailed(
        request_id=item.request_id, round_id=item.round_id, base_len=item.base_len, code=code, message=message
    )


class Router:
    """One per life of the engine. ``source`` None: there are no features."""

    def __init__(self, engine: EngineCapabilities, config: SGLangConfig, source: FeatureSource | None) -> None:
        self._engine = engine
        self._config = config
        self._source = source

    def problem(self, item: VerifyItem, held: HeldRequest) -> tuple[str, str] | None:
        """Code and message of what the engine would refuse anyway, and with it the whole batch."""
        info = self._engine.info
        length = item.base_len + len(item.draft_ids)
        if length > self._engine.max_input_len:
            return "context_limit", f"{length} tokens are more than the {self._engine.max_input_len} the target takes"
        if any(not 0 <= token_id < info.vocab_size for token_id in (*item.token_ids, *item.draft_ids)):
            return "invalid_token", f"token ids must be below {info.vocab_size}"
        grammar = unsupported_grammar(held.sampling)
        if grammar is not None:
            return "invalid_grammar", grammar
        if held.follows_its_output and item.start > 0 and held.streamed() is None:
            return "target_error", f"the engine's stream is lost, and with it what {held.plain_reason} depends on"
        return None

    def route(self, item: VerifyItem, held: HeldRequest) -> Route:
        """Post or stream; see the fields of Route."""
        if held.plain_reason is not None:
            # Exact by waiting: the stream's own next ids are the target's ids as long as they equal the drafts.
            return Route(item=item, held=held, needs_post=item.score_prompt, needs_stream=True)
        if item.draft_ids:
            features = item.features_from if self._source is not None else None
            has_stream = held.stream is not None
            return Route(
                item=item,
                held=held,
                needs_post=True,
                needs_stream=False,
                drops_stream=has_stream,
                features_from=features,
            )
        stream = held.streamed()
        features = item.features_from
        spans: tuple[FeatureSpan, ...] = ()
        if self._source is None or held.has_lost_features:
            features = None
        elif features is not None and stream is not None:
            spans = self._source.streamed(stream.rid, first=features, last=item.base_len - 1) or ()
            features = None if spans else features
        posts = features is not None or item.score_prompt
        draws = self._draws_itself(item, held)
        return Route(
            item=item,
            held=held,
            needs_post=posts or draws,
            needs_stream=not draws and (stream is not None or not posts),
            features_from=features,
            spans=spans,
        )

    def _draws_itself(self, item: VerifyItem, held: HeldRequest) -> bool:
        params = held.sampling
        if self._engine.draws_target_ids:
            return False  # the stream's draws are the same, and its logprobs raw
        # Logprobs of a stream are scaled by the temperature, ours are promised raw.
        needs_raw = item.num_logprobs is not None and params.temperature not in (0.0, 1.0)
        return needs_raw or (self._config.plain_sampling == "shared_noise" and not params.is_greedy)
