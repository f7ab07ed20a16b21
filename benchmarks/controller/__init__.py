"""Simulator of the break-even controller: workloads, policies side by side, report.

Run ``python -m benchmarks.controller``; ``--smoke`` for a quick check.
"""

__all__: list[str] = []
