"""What runs inside SGLang: a tap of aux hidden states into shared memory. Loaded by SGLang's own plugin mechanism.

Imports nothing of the gateway and no SGLang at module level; ``register`` is the entry point.
"""

__all__: list[str] = []
