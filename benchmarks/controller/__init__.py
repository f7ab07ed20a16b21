"""The break-even controller, measured in three ways; each takes ``--smoke`` for a quick check.

python -m benchmarks.controller                 a simulator: workloads, policies side by side
python -m benchmarks.controller.seed_replay     the founding case through the whole gateway, over real HTTP
python -m benchmarks.controller.live            the embedded engine with the real model
"""

__all__: list[str] = []
