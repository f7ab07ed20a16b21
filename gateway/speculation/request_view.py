"""One request's own history under the bucket's gate."""

from __future__ import annotations

from gateway.speculation.acceptance_estimate import AcceptanceEstimate
from gateway.speculation.bucket import Bucket
from gateway.speculation.lookout import Lookout
from gateway.speculation.loss_meter import LossMeter
from gateway.speculation.records import ControllerLimits

__all__ = ["RequestView"]


class RequestView:
    """Belongs to the request, changed only by the controller.

    Attributes:
        serial: 1, 2, ... in the order of ``new_request``.
        acceptance: of this request's drafts, real and shadow.
        suspended_tick: the controller's tick at which it lost its speculation; 0 = it has it. A bucket that was turned
            on after that tick starts the request afresh.
        shadow_k: the K that the shadow under way is scored for; it may draft more.
        bucket, planned_k, is_gated: of the round under way; gated = planned by the gates, not by a pin or a limit.
    """

    def __init__(self, limits: ControllerLimits, *, serial: int) -> None:
        self.serial = serial
        self.acceptance = AcceptanceEstimate(
            half_life_rounds=limits.request_half_life_rounds, max_draft_tokens=limits.candidates[-1]
        )
        self.meter = LossMeter()
        self.lookout = Lookout(limits, forgiven=1)
        self.suspended_tick = 0
        self.bucket: Bucket | None = None
        self.planned_k = 0
        self.last_k = 0
        self.is_gated = False
        self.shadow_k = 0
        self.shadow_rounds_left = 0
        self.shadow_extra_s = 0.0

    def is_suspended_in(self, bucket: Bucket) -> bool:
        """Whether this request stays plain although ``bucket`` is on."""
        return 0 < bucket.on_tick <= self.suspended_tick
