"""One request's own history under the bucket's gate."""

from __future__ import annotations

from gateway.speculation.acceptance_pool import AcceptanceBelief
from gateway.speculation.bucket import Bucket
from gateway.speculation.lookout import Lookout
from gateway.speculation.records import ControllerLimits
from gateway.speculation.shadow_pace import ShadowPace

__all__ = ["RequestView"]


class RequestView:
    """Belongs to the request, changed only by the controller.

    Attributes:
        serial: 1, 2, ... in the order of ``new_request``.
        belief: how well this request's drafts, real and shadow, are accepted.
        is_suspended: whether it stays plain although its bucket is on.
        trial_left: rounds that a suspended request speculates although nothing says that it pays.
        bucket, planned_k, is_gated: of the round under way; gated = planned by the gates, not by a pin or a limit.
    """

    def __init__(self, limits: ControllerLimits, belief: AcceptanceBelief, *, serial: int) -> None:
        self.serial = serial
        self.belief = belief
        self.lookout = Lookout(limits)
        self.pace = ShadowPace(limits)
        self.is_suspended = False
        self.trial_left = 0
        self.bucket: Bucket | None = None
        self.planned_k = 0
        self.last_k = 0
        self.is_gated = False
        self.shadow_rounds_left = 0
        self.shadow_extra_s = 0.0
