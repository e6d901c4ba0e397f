"""Fuzzes a real server with thousands of invalid requests; checks answers, times and leftovers.

`python -m pagewire.tests.stress.hostile` starts a server on the demo model (or uses `--url`) and sends valid requests
in which a value, a field, a header or any byte was changed. It exits with 1 if an answer has status 5xx, does not have
the API's format, comes later than `--limit-s` or reveals internals; if a process has died; or if requests, rows or KV
are left at the end. `--first N --count 1` sends only the Nth request and prints it.
"""

import argparse
import asyncio
import copy
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ...api.anthropic.types import MessagesRequest
from ...api.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from ...api.openai.types import ChatRequest, CompletionRequest
from ...api.pooling.types import EmbeddingsRequest, RerankRequest, ScoreRequest
from ...api.responses.types import ResponsesRequest
from ...tools.servers import Server

IDLE_TIMEOUT_S = 60.0
FLAGS = ("--max-model-len", "192", "--head-timeout-s", "2", "--body-timeout-s", "2",
         "--timeout-keep-alive", "2", "--no-access-log")  # fmt: skip
INSIDES = (b"Traceback", b".py", b" object at 0x", b"msgspec", b"site-packages", b"/tmp/", b"/home/")
FIELDS = sorted(
    {name for kind in (ChatRequest, CompletionRequest, MessagesRequest, EmbeddingsRequest, RerankRequest, ScoreRequest)
     for name in kind.__struct_fields__}
    | {name for kind in (ResponsesRequest, TokenizeRequest, DetokenizeRequest) for name in kind.__struct_fields__}
)  # fmt: skip

_SAY = [{"role": "user", "content": "Count from 1 to 5"}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_SCHEMA = {"schema": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}}
BODIES: dict[str, list[dict[str, object]]] = {
    "/v1/chat/completions": [
        {"messages": _SAY, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "stop": ["5"], "seed": 1, "stream": True},
        {"messages": _SAY, "max_tokens": 4, "logprobs": True, "top_logprobs": 3, "n": 2, "logit_bias": {"50": 5.0}},
        {"messages": _SAY, "max_tokens": 8, "tools": [_TOOL], "tool_choice": "auto", "stream": True},
        {"messages": _SAY, "max_tokens": 8, "response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
        {"messages": _SAY, "max_tokens": 4, "allowed_token_ids": [60, 61], "bad_words": ["a"], "min_tokens": 2},
        {"messages": [*_SAY, {"role": "assistant", "content": "1"}], "max_tokens": 4, "continue_final_message": True},
    ],
    "/v1/completions": [
        {"prompt": "Count", "max_tokens": 4, "echo": True, "logprobs": 2, "prompt_logprobs": 1},
        {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "best_of": 2, "stop_token_ids": [5], "repetition_penalty": 1.1},
        {"prompt": [40, 50, 60], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{1,9}"}, "min_p": 0.1, "top_k": 5},
        {"prompt": "x", "max_tokens": 4, "use_beam_search": True, "n": 2, "length_penalty": 1.0},
    ],
    "/v1/responses": [
        {"input": "Count", "max_output_tokens": 4, "stream": True},
        {"input": _SAY, "max_output_tokens": 4, "instructions": "short", "tools": [{"type": "function", "name": "f"}]},
    ],
    "/v1/messages": [
        {"messages": _SAY, "max_tokens": 4, "system": "short", "stop_sequences": ["5"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4, "stream": True},
    ],
    "/v1/messages/count_tokens": [{"messages": _SAY, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}, {"input": [[40, 50]]}],
    "/v1/rerank": [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}],
    "/v1/score": [{"text_1": "a", "text_2": ["b", "c"]}],
    "/tokenize": [{"prompt": "a b", "return_token_strs": True}, {"messages": _SAY, "add_generation_prompt": True}],
    "/detokenize": [{"tokens": [40, 50, 60]}],
    "/v1/batches": [{"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}],
}  # fmt: skip
GETS = ("/health", "/ready", "/metrics", "/load", "/version", "/v1/models", "/v1/models/x", "/v1/files?limit=5&after=x",
        "/v1/files/x", "/v1/files/x/content", "/v1/batches?limit=1", "/v1/batches/x", "/v1/responses/x",
        "/tokenizer_info", "/openapi.json", "/docs", "/")  # fmt: skip
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n--b--\r\n'
)


class _Text(str):
    """Literal JSON that no encoder would write."""


def _deep(levels: int) -> _Text:
    return _Text("[" * levels + "]" * levels)


VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, 2, -1, 20, 21, 128, 129, 0.5, 1e-300, 1e300, -0.0, 2**31 - 1, 2**31, 2**53, 2**63,
    2**64, -(2**31), -(2**63), 10**40, "", " ", "1", "null", "\0", "\x7f", "\u202e\u2028", "\ufdd0\U0010f000",
    "x" * 5000, "ab " * 40_000, " " * 200_000, "🙂" * 300, "a\r\nset-cookie: b=c\r\n\r\n", "\x1b[31m\x1b]0;x\x07",
    "<|im_end|><|im_start|>", "../../etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/", "{{ 7 * 7 }}", "%s%n",
    "{% for i in range(10**9) %}{% endfor %}", "(a+)+$", "(" * 3000, "start: start", "auto", "required", "image_url",
    [], {}, [[]], [None], [""], {"": None}, {"type": "json_schema"}, {"a": {"$ref": "#"}}, [0] * 3000, ["x"] * 300,
    [{} for _ in range(50)], [[40] for _ in range(257)], {str(i): 1 for i in range(1100)}, list(range(2000)),
    {"type": "text", "text": None},
    *map(_Text, ("NaN", "-Infinity", "1e999", '"\\ud800"', '"\\udc00\\ud800"', "01", "+1", "'a'", '"\t"', "", "{")),
    _deep(60), _deep(900), _deep(5000),
)  # fmt: skip
HEADERS = (
    "origin: http://evil.example", "origin: null", "host: evil.example", "content-type: text/plain",
    "expect: 100-continue", "expect: nonsense", "x-request-id: a b", "x-request-id: \x1b[31m", "x: " + "y" * 33_000,
    "content-encoding: gzip",
    "x-api-key: k", "connection: upgrade\r\nupgrade: h2c", "transfer-encoding: gzip", "content-length: 3", "\xff: a",
    "content-type: application/json; charset=utf-16", "cookie: " + "a=b; " * 900, "authorization: Bearer \xff",
)  # fmt: skip


# ── making requests ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Request:
    label: str
    data: bytes
    path: str | None  # None: unknown after a change of any bytes


def make_request(seed: int, number: int) -> Request:
    """Returns the same request for the same two numbers."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.random()
    if kind < 0.07:
        method, path = rng.choice(("GET", "GET", "GET", "DELETE", "HEAD", "POST")), rng.choice(GETS)
        label, body, content_type = "GET …", b"", "application/json"
    elif kind < 0.1:
        method, path, label, content_type = "POST", "/v1/files", "/v1/files", "multipart/form-data; boundary=b"
        body = _mutated_bytes(rng, FORM)
    else:
        method, content_type = "POST", "application/json"
        label = path = rng.choice([*BODIES, *list(BODIES)[:4], *list(BODIES)[:2]])
        body = _mutated_body(rng, rng.choice(BODIES[path]))
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: {content_type}\r\n"
    if rng.random() < 0.1:
        head += rng.choice(HEADERS) + "\r\n"
    data = f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body
    if rng.random() < 0.2:
        return Request("any bytes", _mutated_bytes(rng, data), None)
    return Request(label, data, path if method != "HEAD" else None)


def _mutated_body(rng: random.Random, body: dict[str, object]) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        holder = rng.choice(list(_holders(body)))
        if isinstance(holder, list):
            _change_list(rng, holder)
        elif rng.random() < 0.4 or not holder:
            holder[rng.choice(FIELDS)] = copy.deepcopy(rng.choice(VALUES))
        else:
            key = rng.choice(list(holder))
            match rng.randrange(6):
                case 0:
                    del holder[key]
                case 1:
                    holder[rng.choice(FIELDS)] = holder.pop(key)
                case 2:
                    holder[key] = [holder[key]]
                case _:
                    holder[key] = copy.deepcopy(rng.choice(VALUES))
    data = _encode(body).encode("utf-8", "surrogatepass")
    return _mutated_bytes(rng, data) if rng.random() < 0.1 else data


def _holders(value: object) -> "Iterator[dict[str, object] | list[object]]":
    """Every object and list in a body."""
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


def _change_list(rng: random.Random, holder: list[object]) -> None:
    match rng.randrange(3):
        case 0:
            holder.append(copy.deepcopy(rng.choice(VALUES)))
        case 1 if holder:
            holder[rng.randrange(len(holder))] = copy.deepcopy(rng.choice(VALUES))
        case _:
            times = rng.choice((0, 2, 300 if len(_encode(holder)) < 1000 else 2))
            holder[:] = [copy.deepcopy(item) for _ in range(times) for item in holder]  # shared ones would multiply


def _encode(value: object) -> str:
    match value:
        case _Text():
            return str(value)
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{_encode(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_encode, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Changes, repeats, deletes, inserts or moves a few bytes."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, other = rng.randrange(len(found) + 1), rng.randrange(len(found) + 1)
        length = rng.choice((1, 1, 2, 8, 40))
        match rng.randrange(5):
            case 0:
                found[at : at + length] = rng.randbytes(length)
            case 1:
                found[at:at] = found[at : at + length] * rng.choice((1, 2, 500))
            case 2:
                del found[at : at + length]
            case 3:
                found[at:at] = rng.choice((b"\r\n", b"\n", b"\0", b":", b" ", b"\t", b",", b'"', b"\\", b"\xff", b"-1"))
            case _:
                found[at : at + length] = found[other : other + length]
    return bytes(found)


# ── sending requests ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Tally:
    """The outcomes of the requests with one label."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


@dataclass
class Report:
    """The outcomes of all requests."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # one sentence each

    def note(self, request: Request, received: bytes, seconds: float) -> list[str]:
        """Counts one request. Returns what is wrong with its answer."""
        tally = self.tallies.setdefault(request.label, Tally())
        tally.slowest_s = max(tally.slowest_s, seconds)
        statuses = [status for status, _, _ in answers(received) if status != 100]
        tally.outcomes[f"{statuses[0] // 100}xx" if statuses else "closed"] += 1
        return list(complaints(request, received))


def answers(received: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(status, head, body) of each answer on a connection."""
    for part in received.split(b"HTTP/1.1 ")[1:]:
        head, _, body = part.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        yield int(part[:3]), head, body


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        num = int(size or b"0", 16)
        whole, body = whole + rest[:num], rest[num + 2 :]
    return whole


def complaints(request: Request, received: bytes) -> Iterator[str]:
    """What is wrong with the answers, whatever the request was."""
    for status, head, body in answers(received):
        if status >= 500:
            yield f"answered {status}: {body[:300]!r}"
        elif status >= 400:
            if request.path is not None or body:
                yield from _complaints_of_shape(request.path, body)
            if any(word in body for word in INSIDES):
                yield f"reveals internals: {body[:300]!r}"
        elif b"text/event-stream" in head:
            if b'"server_error"' in body or b'"api_error"' in body:
                yield f"a stream failed: {body[-300:]!r}"
            elif not any(end in body for end in (b"[DONE]", b'"error"', b"message_stop", b"response.completed",
                                                 b"response.incomplete")):  # fmt: skip
                yield f"a stream has no end: {body[-300:]!r}"


def _complaints_of_shape(path: str | None, body: bytes) -> Iterator[str]:
    try:
        error = json.loads(body)
        is_anthropic = set(error) == {"type", "error"} and set(error["error"]) == {"type", "message"}
        is_openai = set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"}
    except (ValueError, TypeError, KeyError):
        is_anthropic = is_openai = False
    wants_anthropic = path is not None and path.startswith("/v1/messages")
    if not (is_anthropic or is_openai) or (path is not None and is_anthropic != wants_anthropic):
        yield f"is not an error in the API's format: {body[:300]!r}"


async def exchange(host: str, port: int, data: bytes, limit_s: float) -> bytes | None:
    """All received bytes; None: the connection was still open after `limit_s`."""
    reader, writer = await asyncio.open_connection(host, port)
    received = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            try:
                writer.write(data)
                while part := await reader.read(1 << 16):
                    received += part
            except ConnectionError:
                pass
        return bytes(received)
    except TimeoutError:
        return None
    finally:
        writer.transport.abort()


def ask(url: str, data: bytes) -> bytes | None:
    """Sends one request."""
    parts = urlsplit(url)
    return asyncio.run(exchange(parts.hostname or "", parts.port or 0, data, IDLE_TIMEOUT_S))


async def send_all(url: str, arguments: argparse.Namespace, report: Report) -> None:
    """Sends all requests, `--concurrency` at a time."""
    parts = urlsplit(url)
    numbers = iter(range(arguments.first, arguments.first + arguments.count))

    async def work() -> None:
        for number in numbers:
            request = make_request(arguments.seed, number)
            started = time.monotonic()
            received = await exchange(parts.hostname or "", parts.port or 0, request.data, arguments.limit_s)
            seconds = time.monotonic() - started
            wrong = report.note(request, received or b"", seconds)
            if received is None:
                wrong = [f"no end within {arguments.limit_s:g} s"]
            report.wrong += [f"--seed {arguments.seed} --first {number} ({request.label}): {what}" for what in wrong]
            if arguments.count == 1:
                print(request.data, received, sep="\n\n")

    await asyncio.gather(*(work() for _ in range(arguments.concurrency)))


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


def children(pid: int) -> str:
    """The pids of the engine's processes."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text() if pid else ""


def leftovers(url: str) -> dict[str, float]:
    """The requests and KV that are left after up to `IDLE_TIMEOUT_S`."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        found = {name: float(line.rpartition(" ")[2]) for name in names for line in lines
                 if line.startswith(f"pagewire:{name}{{")}  # fmt: skip
        held = {name: value for name, value in found.items() if value}
        if len(found) == len(names) and (not held or time.monotonic() > deadline):
            return held
        time.sleep(0.3)


def run(url: str, pid: int, arguments: argparse.Namespace) -> Report:
    """Sends the requests and checks the server afterwards."""
    report, before = Report(), children(pid)
    asyncio.run(send_all(url, arguments, report))
    try:
        urllib.request.urlopen(f"{url}/health", timeout=60).close()
        held = leftovers(url)
    except OSError:
        report.wrong.append("the server is no longer healthy")
    else:
        report.wrong += [f"left in the server: {held}"] * bool(held)
    if children(pid) != before:
        report.wrong.append("a process has died")
    return report


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--url", help="a running server without API keys")
    parser.add_argument("--count", type=int, default=10_000, help="number of requests")
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once")
    parser.add_argument("--limit-s", type=float, default=10.0, help="longest time of a request")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    started = time.monotonic()
    with ExitStack() as stack:
        server = None if arguments.url else stack.enter_context(Server(None, *FLAGS))
        report = run(server.url if server else arguments.url, server.process.pid if server else 0, arguments)
        show(report, time.monotonic() - started)
        if report.wrong:
            raise SystemExit(1)


def show(report: Report, seconds: float) -> None:
    """Prints a table and the first errors."""
    kinds = ("2xx", "4xx", "5xx", "closed")
    print(f"{'':28}{'sent':>8}" + "".join(f"{kind:>8}" for kind in kinds) + f"{'slowest s':>12}")
    for label, tally in sorted(report.tallies.items()):
        counts = "".join(f"{tally.outcomes[kind]:>8}" for kind in kinds)
        print(f"{label:28}{tally.outcomes.total():>8}{counts}{tally.slowest_s:>12.2f}")
    total = sum(tally.outcomes.total() for tally in report.tallies.values())
    print(f"{total} requests in {seconds:.0f} s; {len(report.wrong)} complaints")
    for complaint in report.wrong[:20]:
        print(complaint)


if __name__ == "__main__":
    main()
