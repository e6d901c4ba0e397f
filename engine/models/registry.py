"""The families' pages, by the architecture's name."""

from collections.abc import Callable

from .description import Decoder
from .fields import Fields

Page = Callable[[Fields], Decoder]
PAGES: dict[str, Page] = {}


def family(*architectures: str) -> Callable[[Page], Page]:
    """Registers a page for these names in config.json's `architectures`."""

    def register(page: Page) -> Page:
        for architecture in architectures:
            assert architecture not in PAGES, f"two pages for {architecture}"
            PAGES[architecture] = page
        return page

    return register
