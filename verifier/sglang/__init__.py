"""The SGLang backend: a client that verifies over its HTTP API, a launcher, and a plugin for the engine. Floor 1.

The gateway process runs ``client``; ``breakeven launch`` runs ``launcher``; ``plugin`` runs inside SGLang's own
processes, so nothing here may import the client at package level.
"""

__all__: list[str] = []
