"""The work of a call in executed lines of Python, which does not depend on the machine or its load."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def lines_of(where: ModuleType, call: Callable[[], object]) -> int:
    """The number of lines of a module, or of a package's modules, that `call` executes on this thread."""
    assert where.__file__ is not None
    prefix = str(Path(where.__file__).parent) + "/" if hasattr(where, "__path__") else where.__file__
    num_lines = 0

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(prefix):
            return None
        num_lines += event == "line"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines
