"""Collects the sources of the documentation's site: the repository's pages at their paths in the repository, so that
links work in both places; the files that they link to; the generated pages of `tools/reference.py`; and diagrams as
pictures, because a site that works without a network cannot load a renderer.

`python -m pagewire.tools.site --out build/site-source`, then `mkdocs build --strict`: `make docs` does both.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from . import reference

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "examples/**/*.md")
REFERENCE = "docs/reference"  # its README.md is written by hand, the other pages are generated

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
_STYLE = """\
/* Diagrams are drawn for a light page. */
img[src$=".svg"] { background: white; border-radius: 0.2rem; padding: 0.5rem; }
.md-grid { max-width: 80rem; } /* tables are wide */
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/site-source", help="folder, which is emptied first")
    stage(parser.parse_args(argv).out)
    return 0


def stage(out: Path) -> None:
    """Fills the folder. Raises FileNotFoundError if a page links to a file that does not exist."""
    shutil.rmtree(out, ignore_errors=True)
    for page in pages():
        place = out / page.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text()
        place.write_text(_with_plain_pipes(_with_pictures(text, place)))
        for target in links(text):
            linked = (page.parent / target.partition("#")[0]).resolve()
            if linked.suffix != ".md":
                copy = out / linked.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(linked, copy)
    index = out / REFERENCE / "README.md"
    for name, text in reference.pages().items():
        (index.parent / name).write_text(_with_plain_pipes(text))
        title = text.partition("\n")[0].removeprefix("# ")
        index.write_text(index.read_text().replace(f"| {title} |", f"| [{title}]({name}) |"))
    (out / "style.css").write_text(_STYLE)


def pages() -> list[Path]:
    """The pages that are written by hand."""
    return sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})


def links(text: str) -> Iterator[str]:
    """The targets, with anchors, of a page's links and pictures within the repository."""
    prose = _CODE.sub("", _FENCE.sub("", text))
    for target in ("".join(found) for found in _LINK.findall(prose)):
        if not target.startswith(("http://", "https://", "#")):
            yield target


def _with_pictures(text: str, place: Path) -> str:
    """The page with each Mermaid diagram as an SVG file beside it."""
    count = 0

    def draw(fence: re.Match[str]) -> str:
        nonlocal count
        if fence[2] != "mermaid":
            return fence[0]
        import mmdr

        count += 1
        picture = place.with_name(f"{place.stem.lower()}-diagram-{count}.svg")
        picture.write_text(mmdr.render(fence[3]).svg())
        return f"{fence[1]}[![The diagram, as a link to itself in full size]({picture.name})]({picture.name})"

    return _FENCE.sub(draw, text)


def _with_plain_pipes(text: str) -> str:
    """Unescapes pipes in code within table cells: Git hosts need the backslash and hide it, the site would show it."""

    def plain(row: re.Match[str]) -> str:
        return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])

    return re.sub(r"^\|.*$", plain, text, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
