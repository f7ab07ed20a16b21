from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.errors import TargetFailed
from gateway.ports import GenerationDelta, GenerationFinished, GenerationRequest, PromptScored
from tests.gateway.fakes import Script
from tests.gateway.http.wide_engine import WideEngine

TEXT = "Hello 🙂 world"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


class PromptedEngine(WideEngine):
    """Answers by what the prompt holds: "weather" is called twice, "break" dies inside, all else is greeted."""

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[PromptScored | GenerationDelta | GenerationFinished, None]:
        prompt = self.codec.decode(request.prompt_ids)
        script = Script(text=TEXT, block_lens=(1, 4, 2))
        if "the weather" in prompt:
            script = Script(text=CALLS, block_lens=(5, 2, 1))
        if "break now" in prompt:
            script = Script(text=TEXT, error=TargetFailed("lost"), error_after=3)
        self.scripts = [script]
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event
