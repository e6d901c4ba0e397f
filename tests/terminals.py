"""Runs a command in a pseudo-terminal."""

import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

from waiting import until


class Terminal:
    """`pagewire …` with a pseudo-terminal as its standard input, output and error."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._own, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._there = there
        self.settings = termios.tcgetattr(there)
        environment = os.environ | {"TERM": "xterm-256color", "INPUTRC": "/dev/null"}
        environment.pop("PAGEWIRE_API_KEY", None)
        # The leader of a session gets the first terminal that it opens as its own, so Ctrl-C reaches it.
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" <>{os.ttyname(there)} >&0 2>&0', "sh", sys.executable, "-m", "pagewire", *words],
            start_new_session=True,
            cwd=folder,
            env=environment,
        )
        self.shown = ""  # everything so far
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._from = 0  # start of the output that `expect` has not matched yet

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def expect(self, *texts: str, timeout_s: float = 30.0) -> str:
        """The first of `texts` that has been printed after the text that was expected before."""

        def found() -> str:
            if not any(text in self.shown[self._from :] for text in texts):
                self._read(0.1)
            new = self.shown[self._from :]
            return next((text for text in texts if text in new), "")

        text = until(found, lambda: f"{' or '.join(map(repr, texts))} in\n{self.shown}", timeout_s)
        self._from = self.shown.index(text, self._from) + len(text)
        return text

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit code."""

        def has_ended() -> bool:
            self._read(0.1)
            return self.process.poll() is not None

        until(has_ended, lambda: f"it ends:\n{self.shown}", timeout_s)
        self._read(0)
        return self.process.returncode

    def settings_now(self) -> list[object]:
        return termios.tcgetattr(self._there)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._own)
        os.close(self._there)

    def _read(self, timeout_s: float) -> None:
        while select.select([self._own], [], [], timeout_s)[0]:
            self.shown += self._decoder.decode(os.read(self._own, 1 << 16))
            timeout_s = 0
