"""What sleep releases: the resident memory of an engine with a full KV cache, asleep, and awake again.

`python -m pagewire.bench.engine.sleep` puts an engine in this process to sleep in the middle of its requests, and
checks that their tokens are the same as without sleep. `--model FOLDER` uses another model than the demo model.
"""

import argparse
import random
import time
from pathlib import Path

from ...config.flags import convert
from ...ipc.messages import Chunk, Failed, IdsPrompt, Limits, Sampling, Sleep, Submit, TextSpec, Wake, ids_to_bytes
from ...procs.inline import Inline
from ...procs.prepare import prepare
from ..report import Row, machine, print_table, write_json

_NUM_TOKENS = 32  # of an output


class Engine:
    """Serves the same prompts repeatedly."""

    def __init__(self, prompts: list[list[int]], **options: object) -> None:
        """`options`: settings by name."""
        self._prompts = prompts
        self._output: dict[int, bytes] = {}
        self.inline = Inline(prepare(convert(options)), on_chunk=self._on_chunk, on_failed=self._on_failed)

    def begin(self) -> None:
        """Sends all requests and runs until they have 4 tokens each on average."""
        self._output = dict.fromkeys(range(len(self._prompts)), b"")
        for rid, ids in enumerate(self._prompts):
            limits = Limits(_NUM_TOKENS, (), True)
            prompt = IdsPrompt(ids_to_bytes(ids))
            submit = Submit(rid, 1, prompt, Sampling(temperature=0.0), limits, TextSpec(detokenize=False))
            self.inline.post("tokenizer", submit)
        self.inline.run(until=lambda: sum(map(len, self._output.values())) > 4 * 4 * len(self._prompts))

    def finish(self) -> dict[int, bytes]:
        """Runs all requests to their ends. Returns the ids of each."""
        self.inline.run()
        return self._output

    def tell(self, message: Sleep | Wake) -> float:
        """Sends the message. Returns the milliseconds until the engine sleeps or plans again."""
        started = time.perf_counter()
        self.inline.post("core", message)
        self.inline.run(until=lambda: isinstance(message, Wake) and not self.inline.scheduler.is_paused)
        return (time.perf_counter() - started) * 1e3

    def _on_chunk(self, chunk: Chunk) -> None:
        self._output[chunk.rid] += chunk.ids

    def _on_failed(self, failed: Failed) -> None:
        raise SystemExit(f"the engine refused a request: {failed.detail}")


def resident_mb() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder; the demo model if none is given")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights of the model's shapes")
    parser.add_argument("--kv-cache-memory", type=int, default=256 << 20, help="bytes")
    parser.add_argument("--requests", type=int, default=16, help="requests at once")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions")
    parser.add_argument("--json", type=Path, default=Path("bench/results/sleep.json"), help="where to write")
    arguments = parser.parse_args(argv)
    facts = machine()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 300) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]
    engine = Engine(
        prompts,
        model=arguments.model,
        load_format=arguments.load_format,
        kv_cache_memory=arguments.kv_cache_memory,
        max_model_len=arguments.prompt + _NUM_TOKENS,
    )
    engine.begin()
    expected = engine.finish()
    row = Row(Path(arguments.model).name or "demo")
    for _ in range(arguments.repeat):
        engine.begin()
        awake = resident_mb()
        sleep_ms = engine.tell(Sleep())
        asleep = resident_mb()
        wake_ms = engine.tell(Wake())
        woken = resident_mb()
        if engine.finish() != expected:
            raise SystemExit("The tokens differ from those without sleep.")
        row.add(
            awake_mb=awake,
            asleep_mb=asleep,
            woken_mb=woken,
            served_mb=resident_mb(),
            sleep_ms=sleep_ms,
            wake_ms=wake_ms,
        )
    print_table([row])
    settings = {
        "requests": arguments.requests,
        "prompt": arguments.prompt,
        "kv_cache_memory": arguments.kv_cache_memory,
    }
    write_json(arguments.json, "Memory freed by sleep", [row], facts, settings)


if __name__ == "__main__":
    main()
