"""All that runs or reaches the target: the embedded engine, the SGLang backend, acceptance. Floor 1."""

__all__: list[str] = []
