"""The HTTP process: OpenAI-style endpoints, one session per request, the break-even controller. Floor 2.

Loads neither torch nor sglang.
"""

__all__: list[str] = []
