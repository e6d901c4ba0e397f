"""Texts per second of an embedding model: `LLM.embed` with all texts at once, compared with transformers.

transformers gets batches of 32 texts sorted by length, as in sentence-transformers; both get token ids. Weights are
random, with the shapes of all-MiniLM-L6-v2 (an encoder) or a small Qwen3 (a decoder, which uses paged attention).
`python -m pagewire.bench.engine.embeddings` prints a table and writes JSON.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from ...offline.llm import LLM
from ..report import Row, machine, print_table, repeat, write_json

_BATCH = 32
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "minilm": (
        "bert",
        {
            "vocab_size": 30_522,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
        },
    ),
    "qwen3-small": (
        "qwen3",
        {
            "vocab_size": 30_522,
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 512,
        },
    ),
}


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--num-texts", type=int, default=256)
    flags.add_argument("--longest", type=int, default=200, help="tokens; lengths are uniform on a log scale")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--repeat", type=int, default=5)
    flags.add_argument("--json", type=Path, default=Path("bench/results/embeddings.json"))
    arguments = flags.parse_args(argv)
    facts, rows = machine(), []
    rng = random.Random(0)
    texts = [
        [rng.randrange(1000, 30_000) for _ in range(round(4 * (arguments.longest / 4) ** rng.random()))]
        for _ in range(arguments.num_texts)
    ]
    with tempfile.TemporaryDirectory() as parent:
        for shape in _SHAPES:
            rows += _measure(shape, Path(parent) / shape, texts, arguments)
    num = sum(map(len, texts))
    print(
        f"{len(texts)} texts of 4 to {arguments.longest} tokens, {num} in all, float32, {arguments.threads} thread(s)"
    )
    print_table(rows)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"} | {"num_tokens": num}
    write_json(arguments.json, "embeddings", rows, facts, settings)


def _measure(shape: str, folder: Path, texts: list[list[int]], arguments: argparse.Namespace) -> list[Row]:
    model = _make(shape, folder)
    llm = LLM(str(folder), dtype="float32", threads=arguments.threads, enable_prefix_caching=False)
    torch.set_num_threads(arguments.threads)
    is_causal = shape != "minilm"

    def ours() -> torch.Tensor:
        return torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])

    def theirs() -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = torch.empty(len(texts), model.config.hidden_size)
        for at in range(0, len(order), _BATCH):
            batch = order[at : at + _BATCH]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(texts[i]) for i in batch], batch_first=True)
            lengths = torch.tensor([len(texts[i]) for i in batch])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            with torch.inference_mode():
                states = model(input_ids=ids, attention_mask=mask).last_hidden_state
                mean = (states * mask[..., None]).sum(1) / lengths[:, None]
                vectors = states[torch.arange(len(batch)), lengths - 1] if is_causal else mean
                found[batch] = torch.nn.functional.normalize(vectors, dim=-1)
        return found

    rows = {f"pagewire, {shape}": ours, f"transformers, {shape}, batches of {_BATCH}": theirs}
    measured = {title: Row(title) for title in rows}
    difference = (ours() - theirs()).abs().max().item()  # and warm
    assert difference < 1e-5, f"the vectors differ by {difference}"

    def measure(title: str) -> Callable[[], None]:
        def run() -> None:
            started = time.perf_counter()
            rows[title]()
            seconds = time.perf_counter() - started
            measured[title].add(**{"seconds": seconds, "texts/s": len(texts) / seconds})

        return run

    repeat(arguments.repeat, *map(measure, rows))
    llm.close()
    return list(measured.values())


def _make(shape: str, folder: Path) -> Any:
    """Writes a checkpoint with random weights and an unused tokenizer, which loading needs."""
    kind, sizes = _SHAPES[shape]
    torch.manual_seed(0)
    auto: Any = transformers.AutoModel  # their functions are only partly typed
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **sizes), dtype=torch.float32).eval()
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return model


if __name__ == "__main__":
    main()
