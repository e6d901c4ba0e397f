"""Clients cannot forge log lines, and prompts do not get into the log."""

import logging
import sys

import pytest

from pagewire.errors import RequestError
from pagewire.procs.log_lines import LineFormatter, escaped

SECRET = "my prompt"


def line(message: str, *values: object, error: Exception | None = None) -> str:
    record = logging.LogRecord("pagewire", logging.INFO, __file__, 1, message, values, None)
    if error is not None:
        try:
            raise error
        except Exception:
            record.exc_info = sys.exc_info()
    return LineFormatter("api").format(record)


@pytest.mark.parametrize(
    "text",
    ["a\r\nb", "\x1b[31mred\x1b[0m", "\0", "\x7f", "\u2028\u2029\x85", "\u202eevil", "\ud800", "a\tb", "\x9b31m"],
)
def test_line_breaks_and_control_characters_are_escaped(text: str) -> None:
    for written in (line("a header was %s", text), line("it failed", error=RequestError("internal", text))):
        assert written.isprintable() and written[8:14] == " api: " and len(written.splitlines()) == 1


def test_printable_characters_are_kept() -> None:
    assert escaped("Grüße, 你好 🙂 \\n") == "Grüße, 你好 🙂 \\n"
    assert escaped("a\nb\x1b") == "a\\nb\\x1b"


def test_an_exception_is_logged_as_its_type_and_place() -> None:
    written = line("request %s failed", 5, error=ValueError(SECRET))
    assert "request 5 failed: ValueError in procs/test_log_lines.py:" in written and SECRET not in written


@pytest.mark.parametrize("error", [RequestError("internal", "The queue is full."), OSError(28, "No space left")])
def test_messages_of_our_own_errors_and_of_the_system_are_kept(error: Exception) -> None:
    assert str(error) in line("it failed", error=error)


def test_long_lines_are_cut() -> None:
    assert len(line("%s", "x" * 1_000_000)) < 10_000
