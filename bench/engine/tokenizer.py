"""How long prompts take in the tokenizer's process, and how long short ones wait beside a long one.

`python -m pagewire.bench.engine.tokenizer` runs the tokenizer's actor on a loop, with the limits and the sandbox of a
server, and gives it requests as they would arrive:

- `N tokens`: the time from a prompt's arrival to its `Enqueue`, and how late short prompts (one every 2 ms) are beside
  it, counted from when each was due.
- `burst`: one prompt of each length at once; the time until the first and the last of them.
- `chat`: a conversation whose every turn sends all earlier ones again, as an agent does. `chat, cut off` is the same
  with another owner for each turn, so that none finds pieces of earlier ones. Nor do the prompts of the other cases.

Lengths are rounded to the words of the text. Nothing is computed by a model.
"""

import argparse
import asyncio
import itertools
import json
import time
from pathlib import Path

import uvloop

from ...config.config import Config, EngineConfig, MachineFacts, ModelFacts
from ...config.resolve import resolve
from ...engine.text.tokenizer import Tokenizer, load_tokenizer
from ...ipc.messages import ChatPrompt, Enqueue, Failed, Limits, Message, Sampling, Submit, TextPrompt, TextSpec
from ...procs.limits import CpuLimit
from ...procs.tokenizer import TokenizerActor
from ..report import Row, machine, percentile, print_table, write_json

_ROOT = Path(__file__).resolve().parents[2]
_SHORT_TOKENS = 50
_SHORT_EVERY_S = 0.002
_MOST_TOKENS = 1 << 20
_SANDBOXED_CHARS = 1 << 19  # always tokenized in the sandbox


class Requests:
    """The requests that one actor is given, and when each was answered."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: dict[int, asyncio.Future[float]] = {}
        self.actor = TokenizerActor(config, limit=CpuLimit(), has_prompt_sandbox=True)
        self.actor.start(self._on_message)

    def send(self, prompt: TextPrompt | ChatPrompt, owner: str | None = None) -> "asyncio.Future[float]":
        """Gives the actor a request. The future is the time at which the core was sent it. owner: of pieces that it
        shares with earlier prompts; None: no other prompt has the same."""
        rid = len(self._ended)
        ended = self._ended[rid] = self._loop.create_future()
        self.actor.handle([Submit(rid, 1, prompt, Sampling(), Limits(1), TextSpec(), cache_salt=owner or str(rid))])
        return ended

    def _on_message(self, receiver: str, message: Message) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Enqueue):
            self._ended[message.rid].set_result(time.perf_counter())


async def beside(requests: Requests, long: TextPrompt, short: TextPrompt) -> dict[str, float]:
    """Sends `long`, and `short` again and again until it is done; times in ms."""
    loop = asyncio.get_running_loop()
    start, num_due = time.perf_counter(), itertools.count(1)
    late_ms: list[float] = []
    tasks: list[asyncio.Task[None]] = []
    is_done = False

    async def send_short(due: float) -> None:
        late_ms.append(1000 * (await requests.send(short) - due))

    def send_what_is_due() -> None:
        if is_done:
            return
        due = start + _SHORT_EVERY_S * next(num_due)
        tasks.append(loop.create_task(send_short(due)))
        loop.call_later(max(0, due + _SHORT_EVERY_S - time.perf_counter()), send_what_is_due)

    loop.call_later(_SHORT_EVERY_S, send_what_is_due)
    took_ms = 1000 * (await requests.send(long) - start)
    await asyncio.sleep(2 * _SHORT_EVERY_S)  # for those that were due meanwhile
    is_done = True
    await asyncio.gather(*tasks)
    return {"ms": took_ms, "short p50 late ms": percentile(late_ms, 50), "short max late ms": max(late_ms)}


async def burst(requests: Requests, prompts: list[TextPrompt]) -> dict[str, float]:
    """Sends all at once; times in ms."""
    start = time.perf_counter()
    times_ms = [1000 * (end - start) for end in await asyncio.gather(*map(requests.send, prompts))]
    return {"first ms": min(times_ms), "ms": max(times_ms)}


async def chat(requests: Requests, turns: list[str], owner: str | None) -> dict[str, float]:
    """Sends a conversation of `owner` turn by turn; the sum of the turns' times and the last one's, in ms."""
    messages: list[dict[str, str]] = []
    times_ms: list[float] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn}]
        start = time.perf_counter()
        times_ms.append(1000 * (await requests.send(ChatPrompt(json.dumps(messages).encode()), owner) - start))
        messages += [{"role": "assistant", "content": turn}]
    return {"ms": sum(times_ms), "last turn ms": times_ms[-1]}


def text_of(tokenizer: Tokenizer, num_tokens: int, first: int = 0) -> str:
    """About so many tokens of this repository's documentation, from its word `first` on."""
    pages = " ".join(page.read_text() for page in sorted((_ROOT / "docs").glob("*.md")))
    words = pages.split(" ")
    per_token = len(words) / len(tokenizer.encode(pages))
    num_words = max(1, round(num_tokens * per_token))
    start = first % len(words)
    return " ".join((words[start:] + words * (1 + num_words // len(words)))[:num_words])


async def run(arguments: argparse.Namespace, config: EngineConfig, tokenizer: Tokenizer) -> list[Row]:
    """Measures the cases in turn."""
    requests = Requests(config)
    short = TextPrompt(text_of(tokenizer, _SHORT_TOKENS))
    prompts = {num: TextPrompt(text_of(tokenizer, num)) for num in arguments.tokens}
    turns = [text_of(tokenizer, arguments.turn_tokens // 2, first=i * 1000) for i in range(arguments.turns)]
    rows = {num: Row(f"{num} tokens") for num in prompts}
    of_burst, of_chat, cut_off = Row("burst"), Row(f"chat of {len(turns)} turns"), Row("chat, cut off")
    very_long = TextPrompt(short.text * (1 + _SANDBOXED_CHARS // len(short.text)))
    await burst(requests, [very_long] * 2)  # starts the processes of the sandbox
    for i in range(arguments.repeat):
        for num, prompt in prompts.items():
            rows[num].add(**await beside(requests, prompt, short))
        of_burst.add(**await burst(requests, list(prompts.values())))
        of_chat.add(**await chat(requests, turns, f"chat {i}"))
        cut_off.add(**await chat(requests, turns, None))
    await requests.actor.stop(0)
    return [*rows.values(), of_burst, of_chat, cut_off]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, default=_ROOT / "demo_model", help="a folder with a tokenizer")
    lengths = [1000, 4000, 16000, 32000, 64000, 100000]
    parser.add_argument("--tokens", type=int, nargs="+", default=lengths, help="of the prompts")
    parser.add_argument("--turns", type=int, default=20, help="of the conversation")
    parser.add_argument("--turn-tokens", type=int, default=2000, help="of each turn, question and answer")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/tokenizer.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts, tokenizer = machine(), load_tokenizer(arguments.model)
    model = ModelFacts(path=str(arguments.model), name="m", max_position=_MOST_TOKENS, vocab_size=tokenizer.vocab_size,
                       eos_token_ids=(), checkpoint_dtype="float32")  # fmt: skip
    config = resolve(Config(), model, MachineFacts(num_cores=1))
    rows = uvloop.run(run(arguments, config, tokenizer))
    print_table(rows)
    settings = {"tokens": arguments.tokens, "turns": arguments.turns, "turn_tokens": arguments.turn_tokens}
    write_json(arguments.json, "tokenizer", rows, facts, settings)


if __name__ == "__main__":
    main()
