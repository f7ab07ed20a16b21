"""Which items are posted and which come from a stream."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.sglang.capabilities import EngineCapabilities
from verifier.sglang.config import SGLangConfig
from verifier.sglang.held import HeldRequest
from verifier.sglang.indexing import unsupported_grammar
from verifier.sglang.sources import FeatureSource
from wire.messages import VerifyFailed, VerifyItem

__all__ = ["Route", "Router", "failure"]

# A lost datagram is fetched by a POST once; so many in a row, each waited for in vain, mean that none will come.
_MAX_STREAMED_GAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one item is answered.

    Fields:
        needs_post, needs_stream: at least one. With both, the ids are the stream's, and the POST fetches the rest.
        drops_stream: the stream that runs ends here.
        features_from: from where features are wanted, or None. follows_stream: the stream's own passes bring them.
    """

    item: VerifyItem
    held: HeldRequest
    needs_post: bool
    needs_stream: bool
    drops_stream: bool = False
    features_from: int | None = None
    follows_stream: bool = False


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
        self._was_plain = False  # the newest round of any request that could have drafted

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
        if item.start > 0:
            self._was_plain = not item.draft_ids
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
        features = None if self._source is None or held.has_lost_features else item.features_from
        draws = self._draws_itself(item, held)
        follows = features is not None and not draws and self._stream_brings(features, item, held)
        posts = (features is not None and not follows) or item.score_prompt
        return Route(
            item=item,
            held=held,
            needs_post=posts or draws,
            needs_stream=not draws and (stream is not None or not posts),
            features_from=features,
            follows_stream=follows,
        )

    def _stream_brings(self, features_from: int, item: VerifyItem, held: HeldRequest) -> bool:
        """Whether the stream that runs, or one opened now, computes every wanted position by itself.

        A POST for them would hold up the stream by a pass of its own: 30 ms instead of 12 in the founding case. A
        prompt goes to a stream while rounds are plain; where they draft, the stream would have to end at once.
        """
        if self._source is None or not self._source.follows_streams or held.num_streamed_gaps >= _MAX_STREAMED_GAPS:
            return False
        if item.start == 0:
            return self._was_plain and not item.score_prompt
        stream = held.streamed()
        first = (item.base_len if stream is None else stream.start_len) - 1
        return features_from >= max(first, held.streamed_gap_end)

    def _draws_itself(self, item: VerifyItem, held: HeldRequest) -> bool:
        params = held.sampling
        if self._engine.draws_target_ids:
            return False  # the stream's draws are the same, and its logprobs raw
        # Logprobs of a stream are scaled by the temperature, ours are promised raw.
        needs_raw = item.num_logprobs is not None and params.temperature not in (0.0, 1.0)
        return needs_raw or (self._config.plain_sampling == "shared_noise" and not params.is_greedy)
