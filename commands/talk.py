"""`pagewire chat` and `pagewire complete`: HTTP clients for the terminal."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Generator
from typing import cast

from ..errors import PagewireError
from .client import RemoteServer, add_client_flags, find_server

_GREETING = "You are talking to {model} at {url}. /help lists the commands, Ctrl-D ends."
_HELP = """\
/new            forget the conversation
/retry          answer the last question again
/system TEXT    start a new conversation with this system message
/set NAME VALUE set a parameter of requests, such as /set temperature 0.7; without VALUE: use the server's default
/save FILE      write the conversation to a file, as JSON
/exit           end, as Ctrl-D does
Ctrl-C stops an answer; \"\"\" begins and ends a text of several lines."""
_QUOTES = '"""'


def add_flags(chat: argparse.ArgumentParser, complete: argparse.ArgumentParser) -> None:
    for command in (chat, complete):
        add_client_flags(command)
        command.add_argument("--max-tokens", type=int, default=None, help="most tokens of an answer")
        command.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    chat.add_argument("--system", default=None, help="system message at the start of the conversation")
    chat.add_argument(
        "model", metavar="MODEL", nargs="?", default=None, help="start a server for this folder, GGUF file or Hub name"
    )
    complete.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue; default: standard input")
    complete.add_argument("--model", default=None, help="start a server for this folder, GGUF file or Hub name")


def chat(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    with find_server(arguments) as server:
        return _Conversation(server, _options(server, arguments), arguments.system).run()


def complete(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    with find_server(arguments) as server:
        prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
        options = {"max_tokens": 128} | _options(server, arguments)
        for event in server.events("/v1/completions", options | {"prompt": prompt}):
            for choice in _choices(event):
                print(choice.get("text") or "", end="", flush=True)
        print()
        return 0


def _options(server: RemoteServer, arguments: argparse.Namespace) -> dict[str, object]:
    options: dict[str, object] = {"model": server.model(), "temperature": arguments.temperature}
    if arguments.max_tokens is not None:
        options["max_tokens"] = arguments.max_tokens
    return options


def _choices(event: dict[str, object]) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", event.get("choices") or [])


class _Conversation:
    """Reads lines and prints answers. Everything that is not an answer goes to stderr."""

    def __init__(self, server: RemoteServer, options: dict[str, object], system: str | None) -> None:
        self._server = server
        self._options = options
        self._messages: list[dict[str, str]] = []
        self._is_tty = sys.stdin.isatty()
        self._start(system)

    def run(self) -> int:
        """Runs until the input ends. Returns the exit code."""
        if self._is_tty:
            import readline  # line editing and history for input()

            readline.parse_and_bind("set enable-bracketed-paste on")
            _tell(_GREETING.format(model=self._options["model"], url=self._server.url))
        while True:
            try:
                text = self._read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                _tell("\n(Ctrl-D quits)")
                continue
            command, _, rest = text.partition(" ")
            if command == "/exit":
                return 0
            if text.startswith("/"):
                self._obey(command, rest.strip())
            elif text:
                self._ask(text)

    def _start(self, system: str | None) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _read(self) -> str:
        line = input("> " if self._is_tty else "").strip()
        if not line.startswith(_QUOTES):
            return line
        lines = [line.removeprefix(_QUOTES)]
        while not lines[-1].endswith(_QUOTES):
            lines.append(input("… " if self._is_tty else ""))
        return "\n".join([*lines[:-1], lines[-1].removesuffix(_QUOTES)]).strip()

    def _obey(self, command: str, rest: str) -> None:
        match command:
            case "/new":
                self._start(self._system)
            case "/system":
                self._start(rest or None)
            case "/set":
                self._set(rest)
            case "/save" if rest:
                try:
                    with open(rest, "w", encoding="utf-8") as file:
                        json.dump(self._messages, file, ensure_ascii=False, indent=2)
                except OSError as error:
                    _tell(f"pagewire: {rest} cannot be written: {error.strerror}.")
            case "/retry" if any(message["role"] == "user" for message in self._messages):
                while self._messages[-1]["role"] != "user":
                    self._messages.pop()
                self._ask(self._messages.pop()["content"])
            case _:
                _tell(_HELP)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name and value:
            try:
                self._options[name] = json.loads(value)
            except ValueError:
                self._options[name] = value
        elif name:
            self._options.pop(name, None)
        _tell(", ".join(f"{name} {json.dumps(value)}" for name, value in self._options.items()))

    def _ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._show()
            self._messages.append({"role": "assistant", "content": answer})
        except PagewireError as error:
            self._messages.pop()
            _tell(f"pagewire: {error}")
        except KeyboardInterrupt:
            self._messages.pop()
            _tell("\n(interrupted)")

    def _show(self) -> str:
        """Prints an answer as it arrives. Returns its text without the reasoning."""
        answer, is_dim, has_tools = "", False, False
        asked, first, num_tokens = time.monotonic(), 0.0, 0
        shows_dim = sys.stdout.isatty()
        with contextlib.closing(self._events()) as events:
            for event in events:
                if isinstance(usage := event.get("usage"), dict):
                    num_tokens = usage.get("completion_tokens") or 0
                for choice in _choices(event):
                    delta = cast("dict[str, object]", choice.get("delta") or {})
                    thought = str(delta.get("reasoning") or delta.get("reasoning_content") or "")
                    piece = str(delta.get("content") or "")
                    has_tools = has_tools or bool(delta.get("tool_calls"))
                    first = first or (time.monotonic() if thought or piece else 0.0)
                    if thought and shows_dim:  # without a terminal, only the answer is printed
                        print(("" if is_dim else "\033[2m") + thought, end="", flush=True)
                        is_dim = True
                    if piece:
                        print(("\033[0m\n" if is_dim else "") + piece, end="", flush=True)
                        is_dim = False
                    answer += piece
        print("\033[0m" if is_dim else "")
        if has_tools:
            _tell("(the model called a tool, which this command cannot run)")
        if self._is_tty and first and num_tokens:
            after = time.monotonic() - first
            speed = f", {(num_tokens - 1) / after:.0f} tokens/s" if num_tokens > 1 and after > 0 else ""
            _tell(f"({num_tokens} tokens, {first - asked:.2f} s to the first{speed})")
        return answer

    def _events(self) -> Generator[dict[str, object]]:
        return self._server.events("/v1/chat/completions", self._options | {"messages": self._messages})


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
