"""Time to first token of a chat's last turn when templates drop the reasoning: with the prefix cache, after the device
has evicted the chat to the host tier, and without the prefix cache.

`python -m pagewire.bench.engine.hybrid_turns --model FOLDER` holds one conversation turn by turn. The template opens a
reasoning block in the generation prompt, and the history holds only the answers. So the end of a turn is never on the
next turn's path: a model with recurrent layers has to find the state that was kept before the generation prompt. The
same conversation is measured in all three ways, in turn. Before the last turn the second one computes other prompts,
which need more memory than the cache has.

Without a model of one's own: `python -m pagewire.tools.make_checkpoint FOLDER --like qwen3.5-0.8b`, and
`--load-format dummy` here.
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

_OTHER_LEN = 2048  # tokens of a prompt of others
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


def last_turn(
    engine: Engine, asked: list[dict[str, str]], num_tokens: int, seed: int, *, num_others: int
) -> dict[str, float]:
    """Holds the conversation. Returns the figures of its last turn. num_others: prompts of others that come between the
    last two turns."""
    rng = random.Random(seed)
    messages: list[dict[str, str]] = []
    for number, question in enumerate(asked, start=1):
        if number == len(asked):
            for _ in range(num_others):
                engine.send([rng.randrange(20, 500) for _ in range(_OTHER_LEN)], 1)
                engine.run()
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
    flags.add_argument("--kv-cache-memory", type=int, default=192 << 20, help="bytes of the device's cache")
    flags.add_argument("--others", type=int, default=5, help=f"prompts of {_OTHER_LEN} tokens that evict the chat")
    flags.add_argument("--threads", type=int, default=1, help="torch threads")
    flags.add_argument("--repeat", type=int, default=5, help="repetitions")
    flags.add_argument("--json", type=Path, default=Path("bench/results/hybrid_turns.json"), help="where to write")
    given = flags.parse_args(argv)
    facts = machine()
    folder, name = locate(given.model, None)
    torch.set_num_threads(given.threads)
    cases = {name: Row(name) for name in ("prefix cache", "from the host tier", "computed again")}
    with tempfile.TemporaryDirectory(prefix="pagewire-bench-") as scratch:
        template = Path(scratch) / "thinks.jinja"
        template.write_text(_TEMPLATE)
        for repetition in range(given.repeat):
            asked = turns(given.turns, given.questions, seed=repetition)
            for case in list(cases)[:: -1 if repetition % 2 else 1]:
                is_tiered = case == "from the host tier"
                engine = Engine(
                    folder,
                    dtype=given.dtype,
                    threads=given.threads,
                    max_model_len=given.max_model_len,
                    load_format=given.load_format,
                    chat_template=str(template),
                    kv_cache_memory=given.kv_cache_memory,
                    kv_connector=("host,size=2G",) if is_tiered else (),
                    enable_prefix_caching=case != "computed again",
                )
                with closing(engine):
                    num_others = given.others if is_tiered else 0
                    cases[case].add(**last_turn(engine, asked, given.output_len, repetition, num_others=num_others))
    rows = list(cases.values())
    print(f"{name}, turn {given.turns} of a conversation, {given.threads} thread(s)")
    print_table(rows)
    *reusing, again = rows
    for row in reusing:
        ratio = again.median("TTFT ms") / row.median("TTFT ms")
        share = percentile(row.figures["cached tokens"], 50) / row.median("prompt tokens")
        print(f"{row.name}: {share:.0%} of the prompt cached, first token {ratio:.1f} × as fast as computed again")
    settings = {key: value for key, value in vars(given).items() if key != "json"} | {"model": name}
    write_json(given.json, "last turn of a chat whose reasoning is dropped", rows, facts, settings)


if __name__ == "__main__":
    main()
