"""Tables and the plot of the rivals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.measure import Cell, percentile

__all__ = ["draw", "summarise", "table"]

_COLUMNS = ("tok_per_s", "vs_plain", "ttft_ms", "tpot_ms_p50", "tpot_ms_p99", "acceptance_length", "mib")


def summarise(
    cells: Mapping[tuple[str, int, float], Sequence[Cell]], memory: Mapping[str, float], *, plain: str
) -> list[dict[str, Any]]:
    """One row per (system, batch, temperature), systems in the order of their first cell."""
    rows = []
    for (name, batch, temperature), own in cells.items():
        base = cells[plain, batch, temperature]
        ratios = [cell.tok_per_s / other.tok_per_s for cell, other in zip(own, base, strict=True)]
        tpot = [value for cell in own for value in cell.tpot_ms]
        lengths = [cell.acceptance_length for cell in own if cell.acceptance_length is not None]
        rows.append(
            {
                "system": name,
                "batch": batch,
                "temperature": temperature,
                "tok_per_s": round(statistics.median(cell.tok_per_s for cell in own), 2),
                "vs_plain": round(statistics.median(ratios), 3),
                "ttft_ms": round(statistics.median(value for cell in own for value in cell.ttft_ms), 1),
                "tpot_ms_p50": round(percentile(tpot, 0.5), 2),
                "tpot_ms_p99": round(percentile(tpot, 0.99), 2),
                "acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
                "mib": round(memory[name]) if name in memory else None,
                "cells": len(own),
            }
        )
    names = list(dict.fromkeys(row["system"] for row in rows))
    return sorted(rows, key=lambda row: (row["batch"], row["temperature"], names.index(row["system"])))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| batch | T | system | tok/s | vs plain | TTFT ms | TPOT p50 | TPOT p99 | acceptance length | MiB |",
        "|--|--|--|--|--|--|--|--|--|--|",
    ]
    for row in rows:
        values = ["" if row[column] is None else str(row[column]) for column in _COLUMNS]
        lines.append(f"| {row['batch']} | {row['temperature']:g} | {row['system']} | {' | '.join(values)} |")
    return "\n".join(lines)


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
                if row["batch"] == batch and row["temperature"] == temperature
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
