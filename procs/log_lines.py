"""The log format of every process: one line for each event, on standard error.

Control characters are escaped, so that a client can neither begin a line nor control the operator's terminal. An
exception is logged with its type and place but without its message, which may contain what a user wrote. Messages of
PagewireError and OSError are kept.
"""

import logging
import traceback
from types import TracebackType

from ..errors import PagewireError

_MAX_CHARS = 8192  # of a line
_MAX_FRAMES = 12  # of an exception, the innermost

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def write_log_lines(name: str) -> None:
    """Sets up logging for the process `name`. Libraries log only errors, because most of their warnings are about input
    that any client can send."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(name))
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    logging.getLogger("pagewire").setLevel(logging.INFO)


def set_log_level(level: str) -> None:
    """`level`: as of --log-level. Of libraries it lets errors alone pass, as always."""
    logging.getLogger("pagewire").setLevel(level.upper())


class LineFormatter(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s {name}: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Unlike `logging.Formatter`, keeps an exception on the same line."""
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        line = self.formatMessage(record)
        if record.exc_info:
            line += f": {self.formatException(record.exc_info)}"
        return escaped(line)[:_MAX_CHARS]

    def formatException(self, ei: _ExcInfo) -> str:
        _, error, trace = ei
        if error is None:
            return "no exception"
        words = f": {error}" if isinstance(error, PagewireError | OSError) else ""
        frames = traceback.extract_tb(trace)[: -_MAX_FRAMES - 1 : -1]
        places = [f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno} {f.name}" for f in frames]
        return f"{type(error).__name__}{words} in {', from '.join(places) or 'no frame'}"


def escaped(text: str) -> str:
    """The text on one line, with escapes such as `\\n`, `\\x1b` and `\\u2028` for characters that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
