"""Waits for the processes that a server starts in place of others."""

from collections.abc import Iterable, Mapping

import psutil
from waiting import until

from pagewire.tools.servers import Server


def until_replaced(
    server: Server, before: Mapping[str, psutil.Process], names: Iterable[str]
) -> dict[str, psutil.Process]:
    """The children when each of `names` is another process than `before`. A stream may end first: what is left of it
    was on its way already."""
    lost = {name: before[name].pid for name in names}

    def children() -> dict[str, psutil.Process]:
        found = server.children()
        return found if all(name in found and found[name].pid != pid for name, pid in lost.items()) else {}

    return until(children, f"{', '.join(lost)} are replaced", 60)
