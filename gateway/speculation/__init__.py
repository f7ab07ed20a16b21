"""The pure core: session state machine, acceptance estimate, cost cells, controller. Part of the gateway, floor 2.

No clock, no I/O, no randomness, no logging: time is an argument.
"""

__all__: list[str] = []
