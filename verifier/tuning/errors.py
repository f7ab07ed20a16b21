"""What can stop a tuning campaign as a whole; a failing experiment is a result, not an error.

TuningError
  KnownGoodFailed   the profile's own settings do not come up, so nothing can be compared
  NotReverted       an engine's processes can't be removed: later measurements would lie
  LedgerBusy        another campaign works on the same ledger
  Paused            as many trials as were asked for are done; go on with the same command
"""

from __future__ import annotations

__all__ = ["KnownGoodFailed", "LedgerBusy", "NotReverted", "Paused", "TuningError"]


class TuningError(Exception):
    """The campaign can't go on; the ledger holds everything measured so far."""


class KnownGoodFailed(TuningError):
    """The settings everything is compared with do not run."""


class NotReverted(TuningError):
    """Something of an experiment is still there after it was stopped."""


class LedgerBusy(TuningError):
    """The ledger's lock is held by another process."""


class Paused(TuningError):
    """The number of trials asked for is done; not everything is decided."""
