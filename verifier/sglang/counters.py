"""What the client counts; raw sums since its start, shown under the verifier in /stats."""

from __future__ import annotations

import collections

__all__ = ["Counters"]


class Counters(collections.Counter[str]):
    """Names used:

    posts, verify_items, prompt_items, streams, stream_tokens, stream_switches: what was asked of the engine.
    cached_tokens_differ: rounds whose reused prefix was not the committed one less a token.
    batch_splits: batches that were refused as a whole and asked again one by one.
    drawn_ids: ids the plugin drew in posted rounds. cut_rounds: those whose drafts the engine cut into two passes.
    expanded_rounds: those of them that the engine ran as decode rows; only rounds with drafts are told apart.
    overload_retries, widened_positions, aborts, feature_gaps, streamed_feature_gaps, weight_changes.
    plain_<reason>: requests whose drafts can't be verified.
    """
