"""Links lead to files, on a git host and in the site; the menu has every page; the README stays short."""

import re
from pathlib import Path

import pytest

from pagewire.tools import site

ROOT = Path(__file__).resolve().parents[2]
PAGES = site.pages()
GENERATED = ("flags.md", "http.md", "metrics.md", "messages.md")


def anchors(page: Path) -> set[str]:
    """The anchors that git hosts make of headings."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in site.links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve()
        assert target.is_file(), f"{link}: link to a file, since a site cannot show folders"
        assert target.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(target), link


def test_links_in_code_are_not_counted() -> None:
    text = 'A [b](c.md#d), `[no](e.md)`, [out](https://x.y) <img src="f.png" width="1">\n```\n[no](g.md)\n```\n'
    assert list(site.links(text)) == ["c.md#d", "f.png"]


def test_the_menu_has_every_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/.-]+\.md)$", menu, re.M)
    generated = {f"{site.REFERENCE}/{name}" for name in GENERATED}
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(ROOT)) for page in PAGES} | generated


def test_the_site_has_every_file_that_its_pages_link_to(tmp_path: Path) -> None:
    pytest.importorskip("mmdr", reason="make docs installs it")
    site.stage(tmp_path)
    for page in PAGES:
        copy = tmp_path / page.relative_to(ROOT)
        for link in site.links(copy.read_text()):
            assert (copy.parent / link.partition("#")[0]).is_file(), (page, link)
    index = (tmp_path / site.REFERENCE / "README.md").read_text()
    assert all(f"]({name})" in index and (tmp_path / site.REFERENCE / name).is_file() for name in GENERATED)
    assert "completion bash|zsh|fish" in (tmp_path / "docs" / "commands.md").read_text()
    assert "```mermaid" not in (tmp_path / "README.md").read_text()
    assert (tmp_path / "readme-diagram-1.svg").read_text().startswith("<svg")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
