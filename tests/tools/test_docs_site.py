"""Links in the documentation lead somewhere; the site itself is built by `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools.docs_site import without_outside_links

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """As MkDocs and code hosts make them: lower case, no punctuation, blanks to hyphens."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in _HEADING.findall(text)]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if ":" in path.partition("/")[0]:
            continue  # an address
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


def test_the_navigation_names_pages_that_exist() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [page for child in children for page in pages(child)]  # type: ignore[attr-defined]

    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(named) == len(set(named)) > 15
    assert all((ROOT / "docs" / name).exists() for name in named)


def test_links_out_of_the_site_become_paths_and_must_exist() -> None:
    page = ROOT / "docs" / "decisions" / "0001-row-invariant-kernels.md"
    text = "[the kernel](../../cpukernels/rowwise.c#x), [a page](../heads.md#y), [other](z.md) ![p](../../p.png)"
    assert without_outside_links(text, page) == (
        "the kernel (`cpukernels/rowwise.c`), [a page](../heads.md#y), [other](z.md) ![p](../../p.png)"
    )
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        without_outside_links("[x](../../none.json)", page)
