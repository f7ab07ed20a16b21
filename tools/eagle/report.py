"""Measures a saved head on held-out texts in every way the model card reports, and prints it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.eagle.acceptance import measure
from tools.eagle.corpus import Conversation, load_corpus
from tools.eagle.head_files import load_head
from tools.eagle.target import Target

MAX_DRAFT_TOKENS = 7

Report = dict[str, dict[str, dict[str, dict[str, float]]]]

__all__ = ["MAX_DRAFT_TOKENS", "Report", "acceptance_report", "summary"]


def _views(conversations: Sequence[Conversation]) -> dict[str, tuple[list[Conversation], bool]]:
    """Every way to look at the texts: name -> (conversations, draft with the target's noise)."""
    greedy = [c for c in conversations if c.temperature == 0]
    sampled = [c for c in conversations if c.temperature > 0]
    views = {
        "greedy": (greedy, False),
        "greedy, loops cut": ([c.without_loops() for c in greedy], False),
        "sampled": (sampled, False),
        "sampled, loops cut": ([c.without_loops() for c in sampled], False),
        "sampled, shared noise": (sampled, True),
        "sampled, shared noise, loops cut": ([c.without_loops() for c in sampled], True),
    }
    return {name: view for name, view in views.items() if view[0]}


def acceptance_report(target: Target, folder: Path, shards: Sequence[Path]) -> Report:
    """view -> source or ``split:NAME`` -> draft tokens -> mean_acceptance_length and its sums. Reads the saved file."""
    head = load_head(folder, target.embed.float())
    conversations = load_corpus(shards)
    report: Report = {}
    for name, (texts, shared_noise) in _views(conversations).items():
        tallies = measure(target, head, texts, max_draft_tokens=MAX_DRAFT_TOKENS, shared_noise=shared_noise)
        report[name] = {
            source: {
                str(count): {
                    "mean_acceptance_length": round(tally.mean_acceptance_length, 4),
                    "num_rounds": tally.num_rounds,
                    "num_committed_tokens": tally.num_committed_tokens,
                }
                for count, tally in by_count.items()
            }
            for source, by_count in sorted(tallies.items())
        }
    return report


def summary(report: Report, sources: bool = False) -> str:
    """A table of mean acceptance lengths; split sums only unless ``sources``."""
    lines = []
    for view, by_source in report.items():
        for source, by_count in by_source.items():
            if sources or source.startswith("split:"):
                cells = "  ".join(f"K={k} {cell['mean_acceptance_length']:.3f}" for k, cell in by_count.items())
                lines.append(f"{view:34s} {source:18s} {cells}")
    return "\n".join(lines)
