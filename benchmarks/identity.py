"""Is the text really the same? Every prompt, plain and with every K, greedy and sampled, through the whole gateway.

    python -m benchmarks.identity [--prompts 200] [--tokens 24] [--concurrency 16]

Not a measurement of speed but of losslessness, on more prompts than a test can afford. Prints how many texts differ
from the plain one (the right number is 0) and writes the result with provenance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmarks.provenance import provenance
from benchmarks.served import served

__all__ = ["main", "prompts"]

DRAFTS = (1, 2, 3, 5, 8)
_SUBJECTS = (
    *("the sea", "a bicycle", "photosynthesis", "the moon", "bread", "a good night's sleep", "chess", "volcanoes"),
    *("recursion", "the Roman Empire", "vaccines", "a thunderstorm", "cats", "electric cars", "honey", "glass"),
    *("a sonnet", "gravity", "tea", "mountains"),
)
_ASKS = (
    *("Explain {} to a child.", "Write two sentences about {}.", "Why does {} matter?", "List three facts about {}."),
    *("Tell me a short story about {}.", "What should I know about {}?", "Write a haiku about {}."),
    *("Compare {} with something else.", "Ask me a question about {}.", "Give a definition of {}."),
)
_SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.02, "presence_penalty": 0.3}


def prompts(count: int) -> list[str]:
    """Questions from templates, all different up to 200."""
    every = [ask.format(subject) for subject in _SUBJECTS for ask in _ASKS]
    return [every[index % len(every)] for index in range(count)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write; exit with 1 if any text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/identity.json"))
    options = parser.parse_args(argv)
    rows = asyncio.run(_compare(prompts(options.prompts), options.tokens, options.concurrency))
    for row in rows:
        print(f"T={row['temperature']:<4} {row['variant']:<5} {row['differing']} of {row['texts']} texts differ")
    settings = {"prompts": options.prompts, "tokens": options.tokens, "concurrency": options.concurrency}
    result = {"provenance": provenance(sys.argv), "settings": settings, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if any(row["differing"] for row in rows) else 0)


async def _compare(questions: list[str], num_tokens: int, concurrency: int) -> list[dict[str, Any]]:
    rows = []
    async with served("cpu-tiny", {}) as url, aiohttp.ClientSession() as session:
        for sampling in ({"temperature": 0.0}, _SAMPLED):
            plain: list[str] = []
            for variant in ("off", *(f"K={k}" for k in DRAFTS), "auto"):
                texts = await _texts(session, url, questions, variant, sampling, num_tokens, concurrency)
                plain = plain or texts
                differing = sum(a != b for a, b in zip(plain, texts, strict=True))
                rows.append(
                    {
                        "temperature": sampling["temperature"],
                        "variant": variant,
                        "texts": len(texts),
                        "differing": differing,
                    }
                )
    return rows


async def _texts(
    session: aiohttp.ClientSession,
    url: str,
    questions: list[str],
    variant: str,
    sampling: dict[str, float],
    num_tokens: int,
    concurrency: int,
) -> list[str]:
    speculation: dict[str, Any] = {"mode": variant}
    if variant.startswith("K="):
        speculation = {"mode": "on", "num_draft_tokens": int(variant[2:])}
    room = asyncio.Semaphore(concurrency)
    bar = tqdm(total=len(questions), desc=f"T={sampling['temperature']} {variant}", leave=False)

    async def one(index: int, question: str) -> str:
        body = {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": num_tokens,
            "seed": index,
            "speculation": speculation,
            **sampling,
        }
        async with room, session.post(f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
            bar.update()
            return str(answer["choices"][0]["message"]["content"])

    try:
        return list(await asyncio.gather(*(one(i, question) for i, question in enumerate(questions))))
    finally:
        bar.close()


if __name__ == "__main__":
    main()
