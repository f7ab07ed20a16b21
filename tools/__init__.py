"""Developer tools that no serving process imports (floor F3, beside tests and benchmarks)."""

__all__: list[str] = []
