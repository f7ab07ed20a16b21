"""Tables and the plot of the rivals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rivals.measure import Cell, percentile

__all__ = ["Memory", "draw", "summarise", "table"]

_COLUMNS = ("tok_per_s", "vs_plain", "ttft_ms", "tpot_ms_p50", "tpot_ms_p99", "acceptance_length", "mib", "device_mib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one system's processes: resident on the host, and on the GPU where the driver tells."""

    mib: float
    device_mib: float | None = None


def summarise(
    cells: Mapping[tuple[str, int, float], Sequence[Cell]], memory: Mapping[str, Memory], *, plain: str
) -> list[dict[str, Any]]:
    """One row per (system, batch, temperature), systems in the order of their first cell.

    Cells of two systems belong together by their index; one that failed has fewer.
    """
    rows = []
    for (name, batch, temperature), own in cells.items():
        if not own:
            continue
        base = cells.get((plain, batch, temperature), ())
        ratios = [cell.tok_per_s / other.tok_per_s for cell, other in zip(own, base, strict=False)]
        tpot = [value for cell in own for value in cell.tpot_ms]
        lengths = [cell.acceptance_length for cell in own if cell.acceptance_length is not None]
        rows.append(
            {
                "system": name,
                "batch": batch,
                "temperature": temperature,
                "tok_per_s": round(statistics.median(cell.tok_per_s for cell in own), 2),
                "vs_plain": round(statistics.median(ratios), 3) if ratios else None,
                "ttft_ms": round(statistics.median(value for cell in own for value in cell.ttft_ms), 1),
                "tpot_ms_p50": round(percentile(tpot, 0.5), 2) if tpot else None,
                "tpot_ms_p99": round(percentile(tpot, 0.99), 2) if tpot else None,
                "acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
                "mib": round(memory[name].mib) if name in memory and memory[name].mib else None,
                "device_mib": _rounded(memory[name].device_mib) if name in memory else None,
                "cells": len(own),
            }
        )
    names = list(dict.fromkeys(row["system"] for row in rows))
    return sorted(rows, key=lambda row: (row["batch"], row["temperature"], names.index(row["system"])))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| batch | T | system | tok/s | vs plain | TTFT ms | TPOT p50 | TPOT p99 | acceptance length | MiB | GPU MiB |",
        "|--|--|--|--|--|--|--|--|--|--|--|",
    ]
    for row in rows:
        values = ["" if row[column] is None else str(row[column]) for column in _COLUMNS]
        lines.append(f"| {row['batch']} | {row['temperature']:g} | {row['system']} | {' | '.join(values)} |")
    return "\n".join(lines)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Delivered tokens a second against breakeven plain, a panel per batch and temperature."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({row["batch"] for row in rows})
    temperatures = sorted({row["temperature"] for row in rows})
    names = list(dict.fromkeys(row["system"] for row in rows))
    figure, panels = plt.subplots(
        len(temperatures),
        len(batches),
        figsize=(4 * len(batches), 0.8 + 0.32 * len(names) * len(temperatures)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for line, temperature in enumerate(temperatures):
        for column, batch in enumerate(batches):
            axes = panels[line][column]
            own = {
                row["system"]: row["vs_plain"]
                for row in rows
                if (row["batch"], row["temperature"]) == (batch, temperature) and row["vs_plain"] is not None
            }
            colours = ["tab:blue" if name == "breakeven" else "tab:gray" for name in names]
            axes.barh(names, [own.get(name, 0.0) for name in names], color=colours)
            for index, name in enumerate(names):
                axes.text(0.02, index, f"{own[name]:.2f}" if name in own else "-", va="center", fontsize=8)
            axes.axvline(1.0, color="black", lw=0.8)
            axes.set_title(f"batch {batch}, T = {temperature:g}", fontsize=9)
            axes.invert_yaxis() if line == column == 0 else None
    figure.supxlabel("delivered tokens/s, plain decode = 1", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
