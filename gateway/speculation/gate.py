"""The states of a bucket: what may follow what, and why it did.

    BASE ──measured──> PROBE            the plain baseline is known, drafts are tried
    BASE ──smaller_loses──> OFF         a smaller batch loses already; shadows and the back-off decide when to try
    PROBE ──won──> ON                   ahead of plain decode by the margin
    PROBE ──lost──> OFF
    ON ──losing──> OFF                  lost more time since its best moment than is allowed
    OFF ──shadow_pays──> PROBE          drafts made beside the plain stream would have paid
    OFF ──probe_due──> PROBE            the back-off ran out, and shadows do not say that it can't pay
    any ──drafter_down──> FAULT
    FAULT ──drafter_up──> PROBE, or BASE where there is no baseline yet
    any ──pinned──> PINNED              the configuration pins on or off

Only PROBE and ON speculate. A tie ends OFF: PROBE needs a margin to win, and ON accumulates no credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["TRANSITIONS", "Gate", "GateEvent", "GateState"]

GateState = Literal["BASE", "PROBE", "ON", "OFF", "PINNED", "FAULT"]
GateEvent = Literal[
    "measured",
    "smaller_loses",
    "won",
    "lost",
    "losing",
    "shadow_pays",
    "probe_due",
    "drafter_down",
    "drafter_up",
    "drafter_up_unmeasured",
    "pinned",
]

TRANSITIONS: Final[dict[tuple[GateState, GateEvent], GateState]] = {
    ("BASE", "measured"): "PROBE",
    ("BASE", "smaller_loses"): "OFF",
    ("PROBE", "won"): "ON",
    ("PROBE", "lost"): "OFF",
    ("ON", "losing"): "OFF",
    ("OFF", "shadow_pays"): "PROBE",
    ("OFF", "probe_due"): "PROBE",
    ("BASE", "drafter_down"): "FAULT",
    ("PROBE", "drafter_down"): "FAULT",
    ("ON", "drafter_down"): "FAULT",
    ("OFF", "drafter_down"): "FAULT",
    ("PINNED", "drafter_down"): "FAULT",
    ("FAULT", "drafter_down"): "FAULT",
    ("FAULT", "drafter_up"): "PROBE",
    ("FAULT", "drafter_up_unmeasured"): "BASE",
    ("BASE", "pinned"): "PINNED",
    ("FAULT", "pinned"): "PINNED",
}


@dataclass(slots=True)
class Gate:
    """State of one bucket with its reason. ``since_s``: time of the last change; ``num_switches``: changes so far."""

    state: GateState = "BASE"
    reason: str = "nothing measured yet"
    since_s: float = 0.0
    num_switches: int = 0

    def apply(self, event: GateEvent, *, reason: str, now_s: float) -> None:
        """Move on.

        Raises:
            KeyError: the table has no such transition: a bug of the caller.
        """
        target = TRANSITIONS[self.state, event]
        if target != self.state:
            self.since_s = now_s
            self.num_switches += 1
        self.state, self.reason = target, reason
