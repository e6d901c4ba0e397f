"""Training of the demo model, from nothing to a Hugging Face folder, in one command.

Three stages by steps, never by the clock: short rows of packed chats, the same with the
hard kinds more often, then long rows of chats with many turns. Everything that is drawn
comes from `--seed`. A folder with the weights so far is written every few hundred steps.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as nn_functional
from tqdm import tqdm

from .batches import IGNORED, Batch, Packer
from .conversations import Chat, long_chat, training_chat
from .hybrid import HybridShape
from .network import Network, Shape, load_weights, rotary_table, save_network
from .optimizer import Muon
from .template import END_OF_TEXT, TURN_END
from .tokenizer import save_tokenizer, token_id, train_tokenizer


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pagewire.tools.demo_model.train",
        description="Train the demo model and write it as a Hugging Face folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the model goes")
    add("--hybrid", action="store_true", help="a model with recurrent layers (Qwen3.5) in place of Llama")
    add("--seed", type=int, default=1, help="source of the chats and of the first weights")
    add("--threads", type=int, default=1, help="CPU threads of the tensor work")
    add("--vocabulary", type=int, default=768, help="entries of the tokenizer")
    add("--early-steps", type=int, default=1600, help="steps of the first stage (short rows)")
    add("--late-steps", type=int, default=1500, help="steps of the second (hard kinds more often)")
    add("--long-steps", type=int, default=120, help="steps of the third (long rows)")
    add("--short-rows", type=int, default=16, help="rows of a batch of short rows")
    add("--short-length", type=int, default=320, help="tokens of a short row")
    add("--long-rows", type=int, default=4, help="rows of a batch of long rows")
    add("--long-length", type=int, default=1280, help="tokens of a long row")
    add("--muon-rate", type=float, default=0.02, help="learning rate of the matrices")
    add("--adam-rate", type=float, default=3e-3, help="learning rate of all else")
    add("--bf16", action="store_true", help="autocast to bfloat16 (on a CPU that is fast in it)")
    add("--init", type=Path, metavar="FOLDER", help="start from this model and its tokenizer")
    add("--first-step", type=int, default=0, help="step to go on from, with --init")
    add("--save-every", type=int, default=200, metavar="STEPS", help="steps between checkpoints")
    add("--checkpoint", type=Path, metavar="FOLDER", help="where checkpoints go (none if unset)")
    add("--stop-after", type=int, metavar="STEPS", help="stop early, to measure the speed")
    return parser.parse_args(arguments)


def rate_factor(step: int, options: argparse.Namespace, warmup: int = 40) -> float:
    """Factor on the learning rates: warm-up, flat, down to a third at the end of the first
    stage and to one per cent at the end of the last."""
    early: int = options.early_steps
    steps: int = early + options.late_steps + options.long_steps
    rise: float = min(1.0, (step - options.first_step + 1) / warmup)
    if step < early:
        done = max(0.0, step / early - 0.45) / 0.55
        return rise * (1 - done * 2 / 3)
    return rise * max(0.01, (steps - step) / (steps - early) / 3)


def write_folder(network: Network, shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the whole model folder and moves it into place at once, so that a reader never sees a part of it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    eos, pad = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    save_network(network, shape, partial, eos, pad)
    save_tokenizer(tokenizer, partial, shape.context)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


class Trainer:
    """The network with its optimizers; one call per step."""

    def __init__(self, network: Network, shape: Shape, options: argparse.Namespace) -> None:
        self.network, self.options = network, options
        self._compiled = torch.compile(network, dynamic=False)
        self._cos, self._sin = rotary_table(shape)
        named = list(network.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in named if p.dim() != 2 or "embed" in name]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, batch: Batch, factor: float) -> float:
        """Train on one batch; returns its loss per answer token."""
        self._muon.rate = self.options.muon_rate * factor
        self._adam.param_groups[0]["lr"] = self.options.adam_rate * factor
        cos, sin = (table[batch.positions].unsqueeze(1) for table in (self._cos, self._sin))
        wanted = batch.targets != IGNORED
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.bf16):
            hidden: Tensor = self._compiled(batch.ids, cos, sin)
            logits = hidden[wanted] @ self.network.embed_tokens.weight.T
        loss = nn_functional.cross_entropy(logits.float(), batch.targets[wanted])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._muon.step()
        self._adam.step()
        self._adam.zero_grad()
        return loss.item()


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    if options.init:
        tokenizer = Tokenizer.from_file(str(options.init / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(rng, options.vocabulary)
    shape = replace(HybridShape() if options.hybrid else Shape(), vocabulary=tokenizer.get_vocab_size())
    network = Network(shape)
    if options.init:
        load_weights(network, options.init)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    tqdm.write(f"{parameters:,} parameters, {asdict(shape)}")
    trainer, packer = Trainer(network, shape, options), Packer(tokenizer, rng, shape.context)
    long_start = options.early_steps + options.late_steps
    steps = long_start + options.long_steps

    def long_source() -> Chat:
        if rng.random() < 0.5:
            return training_chat(rng, late=True)
        return long_chat(rng, rng.randint(8, 70))

    average, tokens, started, cpu = 0.0, 0, time.time(), time.process_time()
    steps_left = range(options.first_step, steps)
    bar = tqdm(steps_left, unit="step", mininterval=5, smoothing=0.02)
    for step in bar:
        if step in (options.early_steps, long_start):
            packer.forget()
        if step < long_start:
            source = functools.partial(training_chat, rng, step >= options.early_steps)
            batch = packer.batch(source, options.short_rows, options.short_length, 0.15)
        else:
            batch = packer.batch(long_source, options.long_rows, options.long_length, 0.4)
        loss = trainer.step(batch, rate_factor(step, options))
        tokens += batch.ids.numel()
        average = loss if step == options.first_step else 0.95 * average + 0.05 * loss
        bar.set_postfix(loss=f"{average:.4f}", refresh=False)
        if options.checkpoint and (step + 1) % options.save_every == 0:
            write_folder(network, shape, tokenizer, options.checkpoint)
            tqdm.write(f"step {step + 1}: loss {average:.4f}, {time.time() - started:.0f} s")
        if step + 1 == options.stop_after:
            break
    write_folder(network, shape, tokenizer, options.out)
    wall, cpu = (time.time() - started) / 60, (time.process_time() - cpu) / 60
    tqdm.write(f"{tokens:,} tokens, loss {average:.4f}, {wall:.1f} min wall, {cpu:.1f} min CPU")


if __name__ == "__main__":
    train(parse_arguments())
