"""MkDocs hook: a link from a page to a file of the repository becomes that file's path, after a look that it exists.

The site knows no address of the repository, so there is nothing to link to; a path that does not exist stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["on_page_markdown", "without_outside_links"]

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return without_outside_links(markdown, Path(page.file.abs_src_path))


def without_outside_links(markdown: str, page: Path) -> str:
    """``markdown`` of ``page`` with links that leave docs/ replaced by "text (`path`)".

    Raises:
        FileNotFoundError: such a link points to nothing.
    """

    def replace(match: re.Match[str]) -> str:
        target = (page.parent / match.group(2)).resolve()
        if target.is_relative_to(_ROOT / "docs"):
            return match.group()
        if not target.exists():
            raise FileNotFoundError(f"{page.name}: {match.group(2)}")
        return f"{match.group(1)} (`{target.relative_to(_ROOT)}`)"

    return _LINK.sub(replace, markdown)
