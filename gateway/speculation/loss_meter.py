"""How much time speculation has lost against plain decode since its best moment: a one-sided CUSUM.

    gain of a round = tokens * t - round_s          seconds saved against plain decode, t = plain seconds a token
    loss            = max(0, loss - gain)           0 again whenever the losses have been won back

Stopping when the loss reaches L bounds what one ON stretch can lose to L plus one round, whatever changed: the text,
the verifier's speed, the plain baseline. Credit is not kept, so a long good stretch does not delay the alarm.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossMeter"]


@dataclass(slots=True)
class LossMeter:
    """``loss_s``: seconds lost since the best moment. ``gain_s``: net seconds gained since the start, may be < 0."""

    loss_s: float = 0.0
    gain_s: float = 0.0

    def start(self, *, loss_s: float = 0.0) -> None:
        """Begin a stretch. A head start of ``loss_s`` makes a stretch on probation end sooner."""
        self.loss_s, self.gain_s = loss_s, 0.0

    def add(self, gain_s: float) -> None:
        """Count one round."""
        self.gain_s += gain_s
        self.loss_s = max(0.0, self.loss_s - gain_s)
