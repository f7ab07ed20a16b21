"""The EAGLE-3 drafter: loads a head, keeps one draft state per request, proposes token ids. Its own process, floor 1.

``drafter.client`` and ``drafter.config`` load no torch: the gateway imports them.
"""

__all__: list[str] = []
