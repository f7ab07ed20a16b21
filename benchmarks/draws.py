"""What a draw costs beside the engine's pass, and whether it is the definition's.

    python -m benchmarks.draws [--device cuda] [--vocab 128256] [--rows 1,4,16,64] [--out FILE]

Rows of random logits of one request each, for every kind of sampling: the ids of ``BatchedDraws`` on the device
against those of ``DrawnByDefinition``, and the time of a call, by the device's own clock (events around it) and by the
host's (the launches alone; a call waits for nothing). A logarithm's last bit may differ between the two, so ids that
differ are listed, with their logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.provenance import provenance
from verifier.sglang.plugin.batched_draws import BatchedDraws
from verifier.sglang.plugin.row_draws import DrawnByDefinition, RowDraws, RowGroup, RowState
from wire.sampling import SamplingParams

__all__ = ["KINDS", "compare", "main"]

_PROMPT_LEN: Final = 40
_KNOWN: Final = 200
# Each kind with its seed left open; "mixed" takes them in turn.
KINDS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "all_filters": {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "logit_bias": {"temperature": 0.8, "logit_bias": ((3, 4.0), (7, -6.0), (11, 2.5))},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and time every kind at every number of rows; print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each cell")
    parser.add_argument("--limit-s", type=float, default=600.0, help="no further cell is begun after so long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/draws.json"))
    options = parser.parse_args(argv)
    begin = time.monotonic()
    device = torch.device(options.device)
    cells: list[dict[str, Any]] = []
    result = {
        "provenance": provenance(sys.argv, seed=0),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "vocab": options.vocab,
        "cells": cells,
    }
    print("| rows | kind | differing ids | device ms | host ms |\n|--|--|--|--|--|")
    for num_rows in (int(rows) for rows in options.rows.split(",")):
        for kind in [*KINDS, "mixed"]:
            if time.monotonic() - begin > options.limit_s:
                break
            cell = compare(kind, num_rows, vocab_size=options.vocab, device=device, calls=options.calls)
            cells.append(cell)
            print(
                f"| {num_rows} | {kind} | {len(cell['differ'])} | {cell['device_ms']} | {cell['host_ms']} |", flush=True
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"cells": len(cells), "differing": sum(len(cell["differ"]) for cell in cells)}))


def compare(kind: str, num_rows: int, *, vocab_size: int, device: torch.device, calls: int) -> dict[str, Any]:
    """One cell: ids of both ways, then the time of ``calls`` calls."""
    rng = np.random.default_rng([num_rows, vocab_size, len(kind)])
    logits = torch.from_numpy(rng.normal(0.0, 4.0, (num_rows, vocab_size)).astype(np.float32))
    known = rng.integers(0, vocab_size, _KNOWN).tolist()
    expected = DrawnByDefinition().draw(logits, _groups(kind, num_rows, known)).tolist()
    rows = logits.to(device)
    groups = _groups(kind, num_rows, known)
    draws = BatchedDraws()
    found = draws.draw(rows, groups).tolist()
    differ = [
        {"row": row, "expected": wanted, "found": got, "logits": [logits[row, wanted].item(), logits[row, got].item()]}
        for row, (wanted, got) in enumerate(zip(expected, found, strict=True))
        if wanted != got
    ]
    device_ms, host_ms = _time(draws, rows, groups, calls)
    return {"kind": kind, "rows": num_rows, "differ": differ, "device_ms": device_ms, "host_ms": host_ms}


def _groups(kind: str, num_rows: int, known: list[int]) -> list[RowGroup]:
    names = [*KINDS] if kind == "mixed" else [kind]
    return [
        RowGroup(
            state=RowState(
                params=SamplingParams(**KINDS[names[row % len(names)]], seed=1000 + row), prompt_len=_PROMPT_LEN
            ),
            position=len(known),
            known_ids=known,
        )
        for row in range(num_rows)
    ]


def _time(draws: RowDraws, rows: torch.Tensor, groups: list[RowGroup], calls: int) -> tuple[float, float]:
    """Medians in ms: on the device, and until the call returns. Without a GPU they are one."""
    on_device, on_host = [], []
    for _ in range(calls + 3):
        if rows.is_cuda:
            torch.cuda.synchronize(rows.device)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
        begin = time.perf_counter()
        draws.draw(rows, groups)
        on_host.append(1e3 * (time.perf_counter() - begin))
        if rows.is_cuda:
            after.record()
            torch.cuda.synchronize(rows.device)
            on_device.append(before.elapsed_time(after))
    return _median(on_device or on_host), _median(on_host)


def _median(values: list[float]) -> float:
    return round(statistics.median(values[3:] or values), 3)


if __name__ == "__main__":
    main()
