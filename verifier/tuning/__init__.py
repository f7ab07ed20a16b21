"""Launch settings tuned by experiment: one change at a time against known-good, every result in a ledger.

Runs in ``breakeven tune``; floor 1. It starts engines with ``verifier.sglang.launcher`` and measures them with
``verifier.sglang.client``, so what is tuned is what serves. The gateway never imports it.
"""

__all__: list[str] = []
