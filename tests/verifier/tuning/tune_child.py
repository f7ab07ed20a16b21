"""``breakeven tune`` as a process that can be killed; arguments as those of the command."""

from __future__ import annotations

import sys

from breakeven.cli import app
from verifier.sglang import launcher
from verifier.tuning import workload

if __name__ == "__main__":
    launcher._LOOK_S = 0.05
    workload._SETTLE_S = 0.05
    app(["tune", *sys.argv[1:]])
