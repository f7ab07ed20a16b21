"""An exported setup as a page: what was tried, what it is worth, what failed and why. Pure but for the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verifier.tuning.records import COMPARED

__all__ = ["plot_gains", "report_page"]


def report_page(data: dict[str, Any], *, plot: str = "") -> str:
    """Markdown. ``data`` is what ``export_setup`` gives; ``plot``: file name of the plot beside it."""
    setup = data["setup"]
    machine, versions = setup["machine"], setup["versions"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    parts = [
        f"# {data['plan']}: {data['profile']}",
        "",
        f"Setup `{data['setup_key']}`: {machine['processor']}, {machine['cores']} cores, {gpus}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + ".",
        "",
        f"Each comparison has {data['rules']['repeats']} pairs of engine starts, in turn; a gain counts above "
        f"{data['rules']['min_gain']:.0%} and above the noise (95 %).",
        "",
        "## Experiments",
        "",
        "| experiment | change | verdict | gain | 95 % | what moved |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(each) for each in data["experiments"]),
    ]
    if plot:
        parts += ["", f"![gains]({plot})"]
    failed = [each for each in data["experiments"] if each["verdict"] and each["verdict"] not in COMPARED]
    if failed:
        parts += ["", "## What did not run", "", *(_failure(each) for each in failed)]
    parts += ["", "## Known-good", "", *_medians(data["known_good"])]
    if data["draft_costs"]:
        parts += ["", "## Drafting", "", *_drafting(data)]
    best = " ".join(f"`{text}`" for text in data["best"])
    parts += ["", "## Best", "", best or "The profile's own settings: nothing tried is a proven gain.", ""]
    return "\n".join(parts)


def _row(each: dict[str, Any]) -> str:
    detail = each["detail"]
    change = " ".join(f"`{text}`" for text in each["change"])
    if each["base"]:
        change += " on top of " + " ".join(f"`{text}`" for text in each["base"])
    if each["verdict"] not in COMPARED:
        return f"| {each['name']} | {change} | {each['verdict'] or each['state']} | | | |"
    moved = ", ".join(
        f"{'tok/s' if metric == 'plain_tok_per_s' else f'verify K={k}'} B={batch_size} {value:+.1%}"
        for metric, batch_size, k, value in detail["by_metric"]
    )
    interval = f"{detail['low']:+.1%} to {detail['high']:+.1%}"
    return f"| {each['name']} | {change} | **{each['verdict']}** | {detail['gain']:+.1%} | {interval} | {moved} |"


def _failure(each: dict[str, Any]) -> str:
    detail = each["detail"]
    text = f"- **{each['name']}** ({each['verdict']}): {detail.get('message', '')}"
    diagnosis = detail.get("diagnosis")
    if diagnosis:
        text += f"\n  {diagnosis['cause']}. Remedy: {diagnosis['remedy']} ({diagnosis['source']})."
    return text


def _medians(medians: list[dict[str, Any]]) -> list[str]:
    if not medians:
        return ["Not measured yet."]
    lines = ["| metric | batch size | K | median |", "| --- | --- | --- | --- |"]
    return lines + [
        f"| {each['metric']} | {each['batch_size']} | {each['num_draft_tokens']} | {each['median']:.4g} |"
        for each in medians
    ]


def _drafting(data: dict[str, Any]) -> list[str]:
    lines = [
        f"With the best settings; speedup at an acceptance rate of {data['acceptance_rate']:.0%}, without drafting. "
        f"Best K: {data['best_num_draft_tokens'] or 'none, plain decode is faster'}.",
        "",
        "| batch size | K | plain ms | verify ms | break-even length | speedup |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return lines + [
        f"| {c['batch_size']} | {c['num_draft_tokens']} | {c['plain_ms']:.4g} | {c['verify_ms']:.4g} "
        f"| {c['break_even_length']:.2f} | {c['speedup']:.2f} |"
        for c in data["draft_costs"]
    ]


def plot_gains(data: dict[str, Any], path: Path) -> bool:
    """Gains with their intervals as a picture; False if matplotlib is not installed or nothing was compared."""
    compared = [each for each in data["experiments"] if each["verdict"] in COMPARED]
    if not compared:
        return False
    try:
        # Lazy: only this needs it, and the page stands without.
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return False
    mpl.use("Agg")
    compared.sort(key=lambda each: each["detail"]["gain"])
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(compared)), layout="constrained")
    axes = figure.subplots()
    colours = {"faster": "tab:green", "slower": "tab:red", "same": "tab:gray", "undecided": "tab:orange"}
    for y, each in enumerate(compared):
        detail = each["detail"]
        low, high = 100 * detail["low"], 100 * min(detail["high"], 5.0)
        axes.plot([low, high], [y, y], color=colours[each["verdict"]], linewidth=3, alpha=0.5)
        axes.plot([100 * detail["gain"]], [y], "o", color=colours[each["verdict"]])
    axes.set_yticks(range(len(compared)), [each["name"] for each in compared])
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel("gain against the settings it was compared with, %, with 95 % interval")
    figure.savefig(path, dpi=110)
    return True
