"""The embedded target: a torch process with its own KV cache and ragged batched verification. Floor 1."""

__all__: list[str] = []
