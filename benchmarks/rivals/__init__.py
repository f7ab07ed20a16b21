"""The same target and prompts through breakeven and through what else can serve them. A process of its own."""

__all__: list[str] = []
