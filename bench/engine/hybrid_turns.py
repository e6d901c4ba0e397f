"""Time to first token of a chat's last turn, with and without the prefix cache, when templates drop the reasoning.

`python -m pagewire.bench.engine.hybrid_turns --model FOLDER` holds one conversation turn by turn. The template opens a
reasoning block in the generation prompt, and the history holds only the answers. So the end of a turn is never on the
next turn's path: a model with recurrent layers has to find the state that was kept before the generation prompt. The
same conversation is measured with the prefix cache and without it, in turn.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from ...engine.checkpoint.source import locate
from ...ipc.messages import ChatPrompt
from ..report import Row, machine, percentile, print_table, write_json
from ..workload import conversations
from .in_process import Engine

_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n<think>\n{% endif %}"
)


def turns(num: int, questions: int, seed: int) -> list[dict[str, str]]:
    """The user's messages of a conversation, each of so many questions."""
    texts = iter(conversations(num * questions, seed))
    return [
        {"role": "user", "content": " ".join(next(texts)[0]["content"] for _ in range(questions))} for _ in range(num)
    ]


def last_turn(engine: Engine, asked: list[dict[str, str]], num_tokens: int, seed: int) -> dict[str, float]:
    """Holds the conversation. Returns the figures of its last turn."""
    rng = random.Random(seed)
    messages: list[dict[str, str]] = []
    for question in asked:
        messages.append(question)
        request = engine.send(ChatPrompt(json.dumps(messages).encode()), num_tokens)
        engine.run()
        messages.append({"role": "assistant", "content": f"The answer is {rng.randint(1, 99)}."})
    assert request.usage is not None
    return {
        "TTFT ms": request.first_ms,
        "prompt tokens": request.usage.num_prompt,
        "cached tokens": request.usage.num_cached,
    }


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--model", default="", help="a folder; empty: the demo model, which has no recurrent layers")
    flags.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    flags.add_argument("--turns", type=int, default=10)
    flags.add_argument("--questions", type=int, default=24, help="in each of the user's messages")
    flags.add_argument("--output-len", type=int, default=64, help="tokens of reasoning and answer")
    flags.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"), help="of weights and KV")
    flags.add_argument("--max-model-len", type=int, default=8192)
    flags.add_argument("--threads", type=int, default=1, help="torch threads")
    flags.add_argument("--repeat", type=int, default=5, help="repetitions")
    flags.add_argument("--json", type=Path, default=Path("bench/results/hybrid_turns.json"), help="where to write")
    given = flags.parse_args(argv)
    facts = machine()
    folder, name = locate(given.model, None)
    torch.set_num_threads(given.threads)
    cases = {True: Row("prefix cache"), False: Row("computed again")}
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as scratch:
        template = Path(scratch) / "thinks.jinja"
        template.write_text(_TEMPLATE)
        for repetition in range(given.repeat):
            asked = turns(given.turns, given.questions, seed=repetition)
            for caches in (True, False) if repetition % 2 else (False, True):
                engine = Engine(
                    folder,
                    dtype=given.dtype,
                    threads=given.threads,
                    max_model_len=given.max_model_len,
                    load_format=given.load_format,
                    chat_template=str(template),
                    enable_prefix_caching=caches,
                )
                with closing(engine):
                    cases[caches].add(**last_turn(engine, asked, given.output_len, repetition))
    rows = list(cases.values())
    print(f"{name}, turn {given.turns} of a conversation, {given.threads} thread(s)")
    print_table(rows)
    ratio = cases[False].median("TTFT ms") / cases[True].median("TTFT ms")
    share = percentile(cases[True].figures["cached tokens"], 50) / cases[True].median("prompt tokens")
    print(f"{share:.0%} of the prompt cached, first token {ratio:.1f} × as fast as computed again")
    settings = {"model": name, "turns": given.turns, "questions": given.questions, "output_len": given.output_len}
    write_json(given.json, "last turn of a chat whose reasoning is dropped", rows, facts, settings)


if __name__ == "__main__":
    main()
