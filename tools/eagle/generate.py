"""Lets the target answer the prompts and writes the answers as token shards.

    python -m tools.eagle.generate --model SmolLM2.gguf --tokenizer tokenizer.json --prompts data/prompts.jsonl.gz \\
        --split train --self-share 0.35 --minutes 4 --out data/train
    python -m tools.eagle.generate ... --split heldout,ood --per-source 24 --keep-loops --shared-noise --out data/eval

Resumable: shards already in --out are kept, their prompts are not answered again in the same way.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from tools.eagle.corpus import Conversation, load_corpus, save_corpus
from tools.eagle.engine import Engine, SlotPlan
from tools.eagle.prompts import Prompt, build_prompts, ngrams, read_prompts
from tools.eagle.talk import Limits, Talks
from tools.eagle.templates import template_prompts
from tools.eagle.toy import add_model_arguments, open_model

__all__ = ["main", "pick_prompts"]


def pick_prompts(prompts: list[Prompt], splits: set[str], per_source: int | None, seed: int) -> list[Prompt]:
    """The prompts of ``splits`` in random order, at most ``per_source`` of each source."""
    order = [prompt for prompt in prompts if prompt.split in splits]
    random.Random(seed).shuffle(order)  # noqa: S311
    taken: Counter[str] = Counter()
    picked = []
    for prompt in order:
        taken[prompt.source] += 1
        if per_source is None or taken[prompt.source] <= per_source:
            picked.append(prompt)
    return picked


class _Shards:
    """Collects conversations and writes full shards in a thread, so that the device never waits for zlib."""

    def __init__(self, folder: Path, first: int, tokens_per_shard: int) -> None:
        self.folder, self.next, self.tokens_per_shard = folder, first, tokens_per_shard
        self.held: list[Conversation] = []
        self.held_tokens = 0
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._writes: list[Future[None]] = []

    def add(self, conversation: Conversation) -> None:
        self.held.append(conversation)
        self.held_tokens += len(conversation.ids)
        if self.held_tokens >= self.tokens_per_shard:
            self.flush()

    def flush(self) -> None:
        if self.held:
            path = self.folder / f"tokens-{self.next:03d}.npz"
            self._writes.append(self._pool.submit(save_corpus, self.held, path))
            self.next, self.held, self.held_tokens = self.next + 1, [], 0

    def close(self) -> None:
        self.flush()
        for write in self._writes:
            write.result()
        self._pool.shutdown()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for tokens-NNN.npz")
    parser.add_argument("--split", default="train", help="comma-separated: train, heldout, ood")
    parser.add_argument("--per-source", type=int, help="at most this many prompts of each source")
    parser.add_argument("--slots", type=int, default=3_072)
    parser.add_argument("--greedy-share", type=float, default=0.5)
    parser.add_argument("--nucleus-share", type=float, default=0.1, help="share of the slots that sample at top_p .95")
    parser.add_argument("--self-share", type=float, default=0.0, help="share of questions the target writes itself")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-new", type=int, default=512)
    parser.add_argument("--max-len", type=int, default=1_024)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--tokens-per-shard", type=int, default=8_000_000)
    parser.add_argument("--keep-loops", action="store_true", help="let looping answers run on (for eval)")
    parser.add_argument("--shared-noise", action="store_true", help="sample with counter noise (for eval); no nucleus")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.smoke:
        args.slots, args.max_new, args.max_len, args.device, args.minutes = 8, 24, 256, "cpu", min(args.minutes, 0.1)
        args.per_source = min(args.per_source or 4, 4)
    return args


def _plan(args: argparse.Namespace) -> SlotPlan:
    greedy = round(args.slots * args.greedy_share)
    nucleus = 0 if args.shared_noise else round(args.slots * args.nucleus_share)
    return SlotPlan(greedy=greedy, sampled=args.slots - greedy - nucleus, nucleus=nucleus)


def main() -> None:
    """Command line."""
    args = _arguments()
    dtype = torch.float32 if args.smoke or args.dtype == "float32" else torch.bfloat16
    target, tokenizer = open_model(args.model, args.tokenizer, device=args.device, dtype=dtype, smoke=args.smoke)
    if args.prompts:
        every = read_prompts(args.prompts)
    else:
        every = build_prompts((source, text, False) for source, text in template_prompts())
    existing = sorted(args.out.glob("tokens-*.npz"))
    torch.manual_seed(args.seed + len(existing))
    old = {(c.prompt_id, c.temperature > 0) for c in load_corpus(existing)}
    splits = set(args.split.split(","))
    guarded = frozenset().union(*(ngrams(p.turns[0]) for p in every if p.split != "train"))
    prompts = pick_prompts(every, splits, args.per_source, args.seed)
    fresh = [p for p in prompts if not {(p.prompt_id, False), (p.prompt_id, True)} <= old]
    talks = Talks(
        prompts=fresh, tokenizer=tokenizer, limits=Limits(max_new=args.max_new, max_len=args.max_len),
        self_share=args.self_share, guarded=guarded, temperature=args.temperature, seed=args.seed + len(existing),
    )  # fmt: skip
    engine = Engine(
        target, _plan(args), max_len=args.max_len, end_id=tokenizer.end_id, stop_loops=not args.keep_loops,
        shared_noise=args.shared_noise,
    )  # fmt: skip
    _generate(args, engine, talks, _Shards(args.out, len(existing), args.tokens_per_shard))


def _generate(args: argparse.Namespace, engine: Engine, talks: Talks, shards: _Shards) -> None:
    deadline_s = time.monotonic() + 60.0 * args.minutes
    counts: dict[tuple[str, str], int] = defaultdict(int)
    with tqdm(desc="answer tokens", unit=" tok", unit_scale=True, mininterval=5.0) as bar:
        for batch in engine.run(talks.take, lambda: time.monotonic() < deadline_s):
            for finished in batch:
                conversation = talks.give(finished)
                if conversation is not None:
                    kept = conversation if args.keep_loops else conversation.without_loops()
                    shards.add(kept)
                    counts[kept.source, "sampled" if kept.temperature else "greedy"] += kept.num_answer_tokens
            bar.update(talks.num_answer_tokens - bar.n)
    shards.close()
    for (source, way), tokens in sorted(counts.items()):
        print(f"{source:16s} {way:8s} {tokens:10d} answer tokens")
    print(f"kept {sum(counts.values())} answer tokens, refused {talks.num_refused_questions} self-written questions")


if __name__ == "__main__":
    main()
