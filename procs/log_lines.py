"""How every process writes its log: one line an event on standard error, whatever the event brings along.

Control characters are escaped, so nobody outside can begin a line of their own or reach the operator's terminal. Of an
exception it tells the kind and the place: its words may hold what a user wrote. Our own errors and those of the
operating system keep their words.
"""

import logging
import traceback
from types import TracebackType

from ..errors import PagewireError

_MAX_CHARS = 8192  # of a line
_MAX_FRAMES = 12  # of an exception, the innermost

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def write_log_lines(name: str) -> None:
    """From now on, as the process `name`. Libraries are heard only where something failed: what they warn of is mostly
    what anyone can send."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(name))
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    logging.getLogger("pagewire").setLevel(logging.INFO)


class LineFormatter(logging.Formatter):
    """See above."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s {name}: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`, which would put an exception on lines of its own."""
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        if record.exc_info:
            line += f": {self.formatException(record.exc_info)}"
        return escaped(line)[:_MAX_CHARS]

    def formatException(self, ei: _ExcInfo) -> str:
        """See `logging.Formatter`."""
        _, error, trace = ei
        if error is None:
            return "no exception"
        words = f": {error}" if isinstance(error, PagewireError | OSError) else ""
        frames = traceback.extract_tb(trace)[: -_MAX_FRAMES - 1 : -1]
        places = [f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno} {f.name}" for f in frames]
        return f"{type(error).__name__}{words} in {', from '.join(places) or 'no frame'}"


def escaped(text: str) -> str:
    """The same text on one line: `\\n`, `\\x1b` and `\\u2028` for what is no printable character."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
