"""Makes a Python that does not have this package installed find plugins of it: an installed package of entry points."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["PLUGIN", "plugin_python_path"]

REPOSITORY: Final = Path(__file__).resolve().parents[2]
# As pyproject.toml declares it.
PLUGIN: Final = {"breakeven": "verifier.sglang.plugin.hooks:register"}


def plugin_python_path(directory: Path, plugins: Mapping[str, str]) -> str:
    """PYTHONPATH under which SGLang finds ``plugins``, in front of the present one.

    Args:
        directory: where the entry points are written. plugins: name to "module:function".
    """
    package = directory / "breakeven_bench-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: breakeven-bench\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in plugins.items()]
    (package / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    path = [str(directory), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(entry for entry in path if entry)
