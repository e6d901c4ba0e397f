"""Answers the requests of a file in OpenAI's batch format into another file. Run it again to continue an earlier run.

Each line of IN is {"custom_id", "method", "url", "body"}; each line of OUT is {"id", "custom_id", "response", "error"}
with the same custom_id, in the order in which the answers arrived. OUT holds only final answers: requests that have a
line there are not sent again. If the server refuses a request, the refusal is its answer. If the server is busy or
fails, the request is retried, and left out after the last attempt.
"""

import argparse
import fcntl
import http.client
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from ..api.batches.format import BatchRequest, answer_line, error_message, read_request
from ..errors import ConfigError, PagewireError
from .client import RemoteServer, add_client_flags, find_server

_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class _Done(msgspec.Struct, frozen=True):
    custom_id: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="requests, one JSON object per line")
    parser.add_argument("output", metavar="OUT", help="answers, one JSON object per line; existing ones are kept")
    add_client_flags(parser)
    parser.add_argument("--model", default=None, help="start a server for this folder, GGUF file or Hub name")
    parser.add_argument("--concurrency", type=int, default=64, help="most open requests (default: 64)")


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if some requests got no answer."""
    if arguments.concurrency < 1:
        raise ConfigError("--concurrency must be at least 1.")
    source, target = Path(arguments.input), Path(arguments.output)
    ids = _check(source)
    with _open(target) as out:
        done = _finished(out, target) & ids
        if done == ids:
            print(f"all {len(ids)} requests are answered in {target}", file=sys.stderr)
            return 0
        if done:
            print(f"continuing: {len(done)} of {len(ids)} requests are answered in {target}", file=sys.stderr)
        try:
            with find_server(arguments) as server:
                return _Run(server, out, source, target, ids, done).run(arguments.concurrency)
        except KeyboardInterrupt:
            print(
                f"\npagewire: interrupted. The answers in {target} are kept; run the command again to continue.",
                file=sys.stderr,
            )
            raise


def read_requests(source: Path) -> Iterator[BatchRequest]:
    """The requests of a batch file. Raises ConfigError naming the line."""
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    request = read_request(line)
                except ValueError as error:
                    raise ConfigError(f"{source}, line {number}: {error}") from error
                yield request
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}.") from error


def _check(source: Path) -> set[str]:
    """Checks all lines before any request is sent. Returns every custom_id. Raises ConfigError."""
    ids: set[str] = set()
    for request in read_requests(source):
        if request.custom_id in ids:
            raise ConfigError(f"{source}: custom_id {request.custom_id!r} appears twice; give each request its own.")
        ids.add(request.custom_id)
    if not ids:
        raise ConfigError(f"{source} contains no requests.")
    return ids


def _open(target: Path) -> IO[bytes]:
    """The output file, locked for this run. Raises ConfigError."""
    try:
        file = target.open("a+b")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"Another run is writing {target}; wait for it, or choose another OUT.") from error
    return file


def _finished(out: IO[bytes], target: Path) -> set[str]:
    """The custom_ids that have an answer. Removes an incomplete last line. Raises ConfigError."""
    out.seek(0)
    ids: set[str] = set()
    whole = 0
    for number, line in enumerate(out, start=1):
        if not line.endswith(b"\n"):
            out.truncate(whole)
            break
        whole += len(line)
        try:
            ids.add(msgspec.json.decode(line, type=_Done).custom_id)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{target}, line {number}, is not an answer of a batch; choose another OUT.") from error
    return ids


class _Run:
    """One run: one thread reads requests, several send them, and the main thread writes the answers."""

    def __init__(
        self, server: RemoteServer, out: IO[bytes], source: Path, target: Path, ids: set[str], done: set[str]
    ) -> None:
        self._server = server
        self._out = out
        self._source = source
        self._target = target
        self._ids = ids
        self._done = done
        self._left_out: list[tuple[str, str]] = []  # custom_id, why

    def run(self, concurrency: int) -> int:
        from tqdm import tqdm

        num_left = len(self._ids) - len(self._done)
        concurrency = min(concurrency, num_left)
        todo: queue.Queue[BatchRequest | None] = queue.Queue(2 * concurrency)  # the file may be larger than memory
        answers: queue.Queue[tuple[str, bytes | str]] = queue.Queue()
        for target in (lambda: self._read(todo, concurrency), *[lambda: self._send(todo, answers)] * concurrency):
            threading.Thread(target=target, daemon=True).start()  # daemon: an interrupt does not wait for open requests
        with tqdm(total=len(self._ids), initial=len(self._done), unit="request", file=sys.stderr) as bar:
            for _ in range(num_left):
                custom_id, answer = answers.get()
                if isinstance(answer, bytes):
                    self._out.write(answer)
                    self._out.flush()
                    bar.update(1)
                else:
                    self._left_out.append((custom_id, answer))
        os.fsync(self._out.fileno())
        if not self._left_out:
            return 0
        custom_id, why = self._left_out[0]
        print(
            f"pagewire: {len(self._left_out)} of {len(self._ids)} requests got no answer; the first is {custom_id!r}: "
            f"{why}. Run the command again to continue.",
            file=sys.stderr,
        )
        return 1

    def _read(self, todo: "queue.Queue[BatchRequest | None]", num_senders: int) -> None:
        for request in read_requests(self._source):
            if request.custom_id not in self._done:
                todo.put(request)
        for _ in range(num_senders):
            todo.put(None)

    def _send(self, todo: "queue.Queue[BatchRequest | None]", answers: "queue.Queue[tuple[str, bytes | str]]") -> None:
        connection = self._server.connect()
        while (request := todo.get()) is not None:
            try:
                answer: bytes | str = self._ask(connection, request)
            except PagewireError as error:
                answer = str(error)
            answers.put((request.custom_id, answer))
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, request: BatchRequest) -> bytes:
        """The line for the output. Raises PagewireError if no attempt got a final answer."""
        data = msgspec.json.encode(request.body)
        pause, why = _FIRST_PAUSE_S, ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                connection.request("POST", self._server.path(request.url), data, self._server.headers)
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()  # the next request opens it again
                why = str(error) or type(error).__name__
                continue
            status = response.status
            if status not in (408, 409, 429) and status < 500:
                return answer_line(request.custom_id, status, response.headers.get("x-request-id") or "", body)
            why = f"the server answered {status}: {error_message(_json(body)) or 'it did not say why'}"
            if (after := response.headers.get("retry-after", "")).isdigit():
                pause = min(max(pause, float(after)), _LONGEST_PAUSE_S)
        raise PagewireError(why.removesuffix("."))


def _json(body: bytes) -> object:
    try:
        return cast(object, json.loads(body))
    except ValueError:
        return None
