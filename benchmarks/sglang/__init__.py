"""What one verify round through SGLang costs, and where: engine variants, rounds, a probe inside SGLang. Floor 3."""

__all__: list[str] = []
