"""Which draft tokens stand, in plain Python: the reference every backend is tested against.

Sample-matching: the target's own choice at each position (argmax, or its draw from the fully processed distribution)
is computed first and compared with the draft afterwards. A draft never influences a draw, so the committed ids are
distributed exactly as the target's own, for any drafter: lossless in greedy and in sampled decoding.
"""

from collections.abc import Sequence

__all__ = ["committed_ids", "num_accepted"]


def num_accepted(draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """Length of the longest prefix of ``draft_ids`` that the target chose itself.

    Args:
        draft_ids: [K] proposed ids, K >= 0.
        target_ids: [K+1], target_ids[i] = the target's choice after context + draft_ids[:i].

    Raises:
        ValueError: the lengths don't belong together.
    """
    if len(target_ids) != len(draft_ids) + 1:
        raise ValueError(f"{len(draft_ids)} draft ids need {len(draft_ids) + 1} target ids, got {len(target_ids)}")
    for position, draft_id in enumerate(draft_ids):
        if draft_id != target_ids[position]:
            return position
    return len(draft_ids)


def committed_ids(draft_ids: Sequence[int], target_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids this round commits: the accepted drafts and one more from the target.

    The last one is the recovered token (the target's choice where the draft differed) or the bonus token (all
    accepted). Always at least one id, so every round makes progress.
    """
    return tuple(target_ids[: num_accepted(draft_ids, target_ids) + 1])
