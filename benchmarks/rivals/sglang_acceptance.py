"""SGLang's own acceptance length: only its /generate tells it, so an ask is put once more, unmeasured."""

from __future__ import annotations

from typing import Any

import aiohttp

from benchmarks.rivals.measure import Ask

__all__ = ["SGLangAcceptance"]


class SGLangAcceptance:
    """Of the engine behind a URL, one ask at a time."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def __call__(self, ask: Ask) -> float | None:
        """Committed tokens a verify step; None where nothing was drafted. The prompt's pass brings the first token.

        Raises:
            RuntimeError: the engine answered with an error.
        """
        sampling = {"temperature": ask.temperature, "max_new_tokens": ask.max_tokens, "ignore_eos": True}
        body = {"text": ask.prompt, "sampling_params": sampling}
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{self._url}: {response.status} {(await response.text())[:200]}")
            info: dict[str, Any] = (await response.json())["meta_info"]
        steps = info.get("spec_verify_ct") or 0
        return (info["completion_tokens"] - 1) / steps if steps else None
