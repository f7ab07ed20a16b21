"""The result of ``benchmarks/sglang_overhead.py`` as tables."""

from __future__ import annotations

from typing import Any

from benchmarks.sglang.parts import PARTS

__all__ = ["print_tables"]


def print_tables(result: dict[str, Any]) -> None:
    """Plain t and C(K) of every variant and cell, then the parts of K = 0 and K = 3."""
    print("variant          B  ctx | plain ms/tok  step |  C(K) ms by K, kinds: verify / no_logprobs / no_tap")
    for name, entry in result["variants"].items():
        for cell in entry["cells"]:
            plain, step = _median(cell["plain_token_ms"]), _median(cell["plain_step_ms"])
            costs = "  ".join(f"{row['kind'][:5]}{row['num_drafts']}={_median(row['ms'])}" for row in cell["rounds"])
            print(f"{name:15} {cell['batch']:2} {cell['context']:5} | {plain:>8} {step:>8} | {costs}")
    names = [name for name, _, _ in PARTS] + ["gpu", "passes"]
    print("\nparts, ms:       B  ctx kind   K | " + " ".join(f"{name[:9]:>9}" for name in names))
    for name, entry in result["variants"].items():
        for cell in entry["cells"]:
            for row in cell["rounds"]:
                if row["num_drafts"] in (0, 3):
                    values = " ".join(f"{row['parts_ms'].get(part, '-'):>9}" for part in names)
                    head = f"{name:15} {cell['batch']:2} {cell['context']:5} {row['kind'][:6]:6} {row['num_drafts']}"
                    print(f"{head} | {values}")
        for row in entry.get("growth", ()):
            print(f"{name}: batch {row['batch']}, {row['rounds']} rounds: {row['first_ms']} -> {row['last_ms']} ms")
        if "features" in entry:
            print(f"{name}: features {entry['features']}")
        if "error" in entry:
            print(f"{name}: {entry['error'].strip().splitlines()[-1]}")


def _median(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else str(spread["median"])
