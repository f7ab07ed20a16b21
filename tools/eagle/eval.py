"""Measures a head folder: acceptance by K and source on held-out texts, and a live loop checked against plain decoding.

    python -m tools.eagle.eval --model SmolLM2.gguf --tokenizer tokenizer.json \\
        --head drafter/heads/smollm2-135m-instruct --eval-tokens data/eval --live 24 --out report.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tools.eagle.chat import Tokenizer
from tools.eagle.corpus import Conversation, load_corpus
from tools.eagle.engine import Engine, Request, SlotPlan
from tools.eagle.head import EagleHead
from tools.eagle.head_files import load_head
from tools.eagle.report import acceptance_report, summary
from tools.eagle.speculate import speculate
from tools.eagle.target import Target
from tools.eagle.toy import add_model_arguments, open_model

__all__ = ["live_check", "main"]


def live_check(
    target: Target, head: EagleHead, tokenizer: Tokenizer, texts: Sequence[Conversation], *, max_new: int,
    num_draft_tokens: int, temperature: float, shared_noise: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Runs the speculative loop and plain decoding on the first turn of ``texts`` and compares the tokens."""
    prompts = [text.ids[: text.spans[0][0]] for text in texts]
    seeds = [text.seed for text in texts]
    plain = _decode_plainly(target, tokenizer, prompts, seeds, max_new=max_new, temperature=temperature)
    spoken = speculate(
        target, head, prompts, max_new, tokenizer.end_id, num_draft_tokens, temperature=temperature, seeds=seeds,
        shared_noise=shared_noise,
    )  # fmt: skip
    rounds, committed = sum(s.num_rounds for s in spoken), sum(len(s.ids) - 1 for s in spoken)
    return {
        "num_draft_tokens": num_draft_tokens,
        "temperature": temperature,
        "shared_noise": shared_noise,
        "num_texts": len(texts),
        "num_identical_texts": sum(s.ids == p for s, p in zip(spoken, plain, strict=True)),
        "num_rounds": rounds,
        "mean_acceptance_length": round(committed / max(1, rounds), 4),
    }


def _decode_plainly(
    target: Target,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    seeds: list[int],
    *,
    max_new: int,
    temperature: float,
) -> list[list[int]]:
    """Plain decoding with a KV cache, one slot a text: shares no code with the loop it checks but the model."""
    greedy = len(prompts) if temperature == 0 else 0
    engine = Engine(
        target,
        SlotPlan(greedy=greedy, sampled=len(prompts) - greedy),
        max_len=max(map(len, prompts)) + max_new,
        end_id=tokenizer.end_id,
        stop_loops=False,
        shared_noise=True,
    )
    waiting = [
        Request(key=key, ids=ids, max_new=max_new, temperature=temperature, seed=seed)
        for key, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    texts: list[list[int]] = [[] for _ in prompts]
    for batch in engine.run(lambda _greedy: waiting.pop() if waiting else None):
        for finished in batch:
            texts[finished.request.key] = finished.new_ids
    return texts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--eval-tokens", type=Path, required=True, help="folder of held-out shards")
    parser.add_argument("--out", type=Path, help="report.json; an existing one with the same arguments is kept")
    parser.add_argument("--live", type=int, default=8, help="texts for the live loop; 0 leaves it out")
    parser.add_argument("--live-new", type=int, default=96)
    parser.add_argument("--live-prompt", type=int, default=1_024, help="longest prompt: the loop keeps no cache")
    parser.add_argument("--live-only", action="store_true", help="skip the replayed measurement")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--minutes", type=float, default=10.0, help="no new live run is started after this")
    args = parser.parse_args()
    if args.smoke:
        args.device, args.live, args.live_new = "cpu", min(args.live, 2), 8
    return args


def main() -> None:
    """Command line."""
    args = _arguments()
    arguments = {name: str(value) for name, value in vars(args).items()}
    if args.out and args.out.exists() and json.loads(args.out.read_text()).get("arguments") == arguments:
        print(f"{args.out} is up to date")
        return
    deadline_s = time.monotonic() + 60.0 * args.minutes
    dtype = torch.float32 if args.smoke or args.dtype == "float32" else torch.bfloat16
    target, tokenizer = open_model(args.model, args.tokenizer, device=args.device, dtype=dtype, smoke=args.smoke)
    shards = sorted(args.eval_tokens.glob("tokens-*.npz"))
    report: dict[str, Any] = {"arguments": arguments, "live": []}
    if not args.live_only:
        report["acceptance"] = acceptance_report(target, args.head, shards)
        print(summary(report["acceptance"], sources=True))
    if args.live:
        head = load_head(args.head, target.embed.float())
        every = (c for c in load_corpus(shards) if c.temperature == 0)
        greedy = [c for c in every if c.spans[0][0] <= args.live_prompt]
        # Spread over the file: shards are in the order in which answers ended, so the first ones are the shortest.
        texts = greedy[:: max(1, len(greedy) // args.live)][: args.live]
        ways = [(2, 0.0, False), (5, 0.0, False), (2, 0.8, False), (2, 0.8, True)]
        for num_draft_tokens, temperature, shared_noise in tqdm(ways, desc="live loop"):
            if time.monotonic() < deadline_s:
                live = live_check(
                    target, head, tokenizer, texts, max_new=args.live_new, num_draft_tokens=num_draft_tokens,
                    temperature=temperature, shared_noise=shared_noise,
                )  # fmt: skip
                report["live"].append(live)
                print(live)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
