"""The engine in a program of one's own: core and worker in processes behind IPC, token ids in and out.

    python examples/embedded_engine.py [MODEL]

Sixty-four prompts run at once; tokens are handled as they come. A program that has token ids already needs no HTTP, no
tokenizer and no detokenizer.
"""

import asyncio
import sys

from pagewire import EngineClient
from pagewire.ipc.messages import Limits, Sampling, bytes_to_ids

NUM_PROMPTS = 64


async def complete(client: EngineClient, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of one prompt, streamed."""
    ids: list[int] = []
    async with client.generate(prompt, Sampling(temperature=0.0), Limits(max_tokens, ignore_eos=True)) as generation:
        async for _, tokens in generation:
            ids += bytes_to_ids(tokens.ids)
    return ids


async def run(model: str = "") -> list[list[int]]:
    """The tokens of each prompt."""
    async with await EngineClient.start(model, kv_cache_memory="64M") as client:
        prompts = [[300 + i, 310, 320 + i % 7] for i in range(NUM_PROMPTS)]
        return await asyncio.gather(*(complete(client, prompt, 16 + i % 16) for i, prompt in enumerate(prompts)))


if __name__ == "__main__":
    for ids in asyncio.run(run(sys.argv[1] if len(sys.argv) > 1 else "")):
        print(*ids)
