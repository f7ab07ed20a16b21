"""What a round costs as the context grows: nothing of breakeven's own may grow with it, only attention.

    python -m benchmarks.context [--contexts 1000,10000,100000] [--tokens 96]
    python -m benchmarks.context --write-model DIR          a model for the second part: start SGLang with it
    python -m benchmarks.context --sglang-url http://127.0.0.1:30000 --model DIR

Part 1 serves a random tiny model with long positions through the whole product and divides the CPU time of gateway,
verifier and drafter by the rounds. Part 2 sends SGLang the same verify round (3 drafts, the context cached) in two
ways: all ids in every request, as the stock API wants it, and only the new ids, spliced by the engine's session API.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from benchmarks.processor_time import processor_time_s
from benchmarks.provenance import provenance
from benchmarks.served import served
from benchmarks.toy_pair import write_head, write_target

__all__ = ["main"]

_K = 3
_AUX = (1, 2, 3)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1000,10000,100000")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write-model", type=Path)
    parser.add_argument("--sglang-url")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/context.json"))
    options = parser.parse_args(argv)
    contexts = [int(context) for context in options.contexts.split(",")]
    if options.write_model is not None:
        _write_target(options.write_model, contexts)
        return
    if options.sglang_url:
        key, rows = "sglang", asyncio.run(_sglang(options.sglang_url, contexts, repeats=8 * options.repeats))
    else:
        with tempfile.TemporaryDirectory() as directory:
            target = _write_target(Path(directory) / "target", contexts)
            head = write_head(Path(directory) / "head", target, aux=_AUX)
            key, rows = "breakeven", asyncio.run(_breakeven(target, head, contexts, options.tokens, options.repeats))
    for row in rows:
        print(row)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    found[key] = {"provenance": provenance(sys.argv, seed=0), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def _write_target(model_dir: Path, contexts: list[int]) -> Path:
    # One attention head of 16 in four layers: attention over 100,000 positions squared must end on one core.
    return write_target(
        model_dir, max_positions=max(contexts) + 4096, num_layers=max(_AUX) + 1, num_heads=1, num_kv_heads=1
    )


# ---------------------------------------------------------------- part 1


async def _breakeven(
    target: Path, head: Path, contexts: list[int], num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    flags = {
        "verifier.model": str(target),
        "verifier.prefix-cache-tokens": str(2 * sum(contexts)),
        "verifier.prefill-chunk-tokens": "512",
        "verifier.ring-slots": str(max(contexts) // 32),  # twice the longest context
        "verifier.aux-layer-ids": ",".join(map(str, _AUX)),
        "drafter.head-dir": str(head),
        "drafter.max-context-len": str(max(contexts) + 2048),
        "engine.model-name": "toy",
    }
    timeout = aiohttp.ClientTimeout(total=1200.0)
    async with served("cpu-tiny", flags) as url, aiohttp.ClientSession(timeout=timeout) as session:
        pids = await _pids(session, url)
        rows = []
        for context in contexts:
            prompt = [int(i) for i in np.random.default_rng(context).integers(2, 250, context)]
            for mode in ("off", "on"):
                runs = [
                    await _one(session, url, prompt, mode, num_tokens, pids)
                    for _ in range(repeats + 1)  # the first computes the prompt, the others find it cached
                ][1:]
                rows.append(
                    {"context": context, "mode": mode}
                    | {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
                )
        return rows


async def _pids(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    stats = await (await session.get(f"{url}/stats")).json()
    verifier = stats["verifier"]["pid"]
    return {"gateway": int(_stat(verifier)[1]), "verifier": verifier, "drafter": stats["drafter"]["pid"]}


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


async def _one(
    session: aiohttp.ClientSession, url: str, prompt: list[int], mode: str, num_tokens: int, pids: dict[str, int]
) -> dict[str, float]:
    """CPU milliseconds a round of each process, from the first token to the last, and the wall time a round."""
    speculation: dict[str, Any] = {"mode": "off"} if mode == "off" else {"mode": "on", "num_draft_tokens": _K}
    body = {
        "model": "toy",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_stats": True,
        "speculation": speculation,
    }
    first: dict[str, float] | None = None
    begin = end = 0.0
    final: dict[str, Any] = {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            if first is None:
                first = {name: processor_time_s(pid) for name, pid in pids.items()}
                begin = time.perf_counter()
            end = time.perf_counter()
            event = orjson.loads(line[6:])
            final = event if event.get("usage") else final
    assert first is not None
    cached = final["usage"]["prompt_tokens_details"]["cached_tokens"]
    counts = final["metrics"]["speculative_decoding"]
    rounds = counts["num_spec_steps"] + counts["num_plain_steps"]
    spent = {f"{name}_cpu_ms": 1e3 * (processor_time_s(pid) - first[name]) / rounds for name, pid in pids.items()}
    return {**spent, "wall_ms": 1e3 * (end - begin) / rounds, "rounds": rounds, "cached_share": cached / len(prompt)}


# ---------------------------------------------------------------- part 2


async def _sglang(url: str, contexts: list[int], *, repeats: int) -> list[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=1200.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return [row for context in contexts for row in await _ways(session, url, context, repeats)]


async def _ways(session: aiohttp.ClientSession, url: str, context: int, repeats: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(context)
    committed = [int(i) for i in rng.integers(2, 250, context)]
    opened = await session.post(f"{url}/open_session", json={"capacity_of_str_len": 1 << 24})
    session_id = await opened.json()
    # One root request in the session holds the context; every round branches from it.
    root = await _verify(session, url, {"input_ids": committed, "session_params": {"id": session_id}})
    times: dict[str, list[float]] = {"all ids": [], "new ids": []}
    sizes: dict[str, int] = {}
    for _ in range(repeats + 1):
        drafts = [int(i) for i in rng.integers(2, 250, _K)]
        branch = {"id": session_id, "rid": root["meta_info"]["id"], "offset": context, "replace": False}
        bodies: dict[str, dict[str, Any]] = {
            "all ids": {"input_ids": committed + drafts},
            "new ids": {"input_ids": drafts, "session_params": branch},
        }
        for way, body in bodies.items():
            begin = time.perf_counter()
            answer = await _verify(session, url, {**body, "logprob_start_len": context - 1})
            times[way].append(1e3 * (time.perf_counter() - begin))
            sizes[way] = len(orjson.dumps(body))
            assert answer["meta_info"]["cached_tokens"] >= context - 64, answer["meta_info"]
    await session.post(f"{url}/close_session", json={"session_id": session_id})
    encode = statistics.median(_encode_ms(committed) for _ in range(9))
    return [
        {
            "context": context,
            "way": way,
            "ms": round(statistics.median(own[1:]), 2),
            "request_bytes": sizes[way],
            "client_encode_ms": round(encode if way == "all ids" else 0.0, 3),
        }
        for way, own in times.items()
    ]


async def _verify(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    asked = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 1, **body}
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/generate", data=orjson.dumps(asked), headers=headers) as response:
        answer: dict[str, Any] = orjson.loads(await response.read())
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer}")
        return answer


def _encode_ms(ids: list[int]) -> float:
    begin = time.perf_counter()
    orjson.dumps(ids)
    return 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
