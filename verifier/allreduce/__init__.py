"""All-reduce on machines without NVLink: what the machine allows, which strategy is fastest there, and our own kernels.

Runs in the target's processes and in ``breakeven tune``; floor 1. The gateway never imports it.
"""

__all__: list[str] = []
