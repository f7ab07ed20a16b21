"""OpenAI request and response formats: JSON at the edge, typed records below it. Part of the gateway, floor 2."""

__all__: list[str] = []
