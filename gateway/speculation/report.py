"""A bucket as /stats shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gateway.speculation.bucket import Bucket
from gateway.speculation.rate_estimate import log_speedup
from gateway.speculation.records import BucketReport

__all__ = ["bucket_report"]


def bucket_report(bucket: Bucket, expected_tokens: Mapping[int, float]) -> BucketReport:
    """Everything that /stats says of one bucket.

    Args:
        expected_tokens: E(K) by candidate K, over all requests.
    """
    known = bucket.costs.known()
    plain_s = bucket.plain_s
    shown = bucket.chosen or bucket.probe_k
    cost_s = bucket.costs.seconds(shown)
    break_even = {k: cell.seconds / plain_s for k, cell in known.items() if k and cell.seconds and plain_s}
    speedup, speedup_se = _speedup(bucket)
    return BucketReport(
        batch_size=bucket.batch,
        context_class=bucket.context_class,
        state=bucket.gate.state,
        reason=bucket.gate.reason,
        since_s=bucket.gate.since_s,
        num_switches=bucket.gate.num_switches,
        num_suspensions=bucket.num_suspensions,
        num_probes_won=bucket.num_probes_won,
        num_probes_lost=bucket.num_probes_lost,
        num_shadows=bucket.num_shadows,
        num_draft_tokens=bucket.chosen,
        plain_s=plain_s,
        round_costs=known,
        acceptance_length=expected_tokens.get(shown) if cost_s is not None else None,
        break_even_length=cost_s / plain_s if cost_s is not None and plain_s else None,
        break_even_lengths=break_even,
        speedup=speedup,
        speedup_se=speedup_se,
        next_probe_in_tokens=max(0, round(bucket.lookout.probe_in_tokens)) if bucket.gate.state == "OFF" else None,
    )


def _speedup(bucket: Bucket) -> tuple[float | None, float | None]:
    if bucket.gate.state == "OFF" and bucket.plain_s:
        predicted = bucket.lookout.predicted(bucket.plain_s)
        if predicted is not None:
            return _from_log(*predicted)
    return _from_log(*log_speedup(bucket.spec_rate, bucket.plain_rate, batch=bucket.batch))


def _from_log(gain: float, error: float) -> tuple[float | None, float | None]:
    if math.isinf(error):
        return None, None
    return math.exp(gain), math.exp(gain) * error
