"""The limits that a request must keep to be accepted."""

from collections.abc import Container
from typing import NamedTuple

from msgspec import Struct

from ...ipc.messages import Enqueue, Failed


class Queued(NamedTuple):
    """What waits already."""

    num: int  # requests
    num_tokens: int  # prompts and longest outputs of all of them


class Admission(Struct, frozen=True):
    max_model_len: int
    max_queued_requests: int
    max_queued_tokens: int  # prompts and longest outputs of all waiting requests
    # Tokens that a decoder beside an encoder begins with; None: there is no encoder, and the prompt is the decoder's.
    num_start: int | None = None

    def refusal(self, message: Enqueue, open_rids: Container[int], queued: Queued) -> Failed | None:
        """Why a request is not accepted; None: it is. Decided before anything of it is copied."""
        rid, num_prompt = message.rid, len(message.prompt_ids) // 4
        if any(rid + i in open_rids for i in range(message.n)):
            return Failed(rid, "internal", "Two requests have the same number.")
        if num_prompt == 0:
            return Failed(rid, "invalid_request", "The prompt is empty.")
        room, asked = self.max_model_len - num_prompt, message.limits.max_tokens
        is_too_long = room < 0 or (room == 0 and asked != 0)
        if self.num_start is not None:
            room, is_too_long = max(0, self.max_model_len - self.num_start), room < 0
        if is_too_long:
            detail = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt alone has "
                f"{num_prompt}. Shorten it, or start the server with more --max-model-len or --kv-cache-memory."
            )
            return Failed(rid, "context_length_exceeded", detail, num_tokens=num_prompt)
        num_resumed = len(message.resume_ids) // 4
        if num_resumed > (room if asked is None else min(room, asked)):
            detail = f"The output is to begin with {num_resumed} tokens, more than max_tokens or the context allow."
            return Failed(rid, "invalid_request", detail)
        price = message.n * (num_prompt + (self.num_start or 0) + (room if asked is None else min(room, asked)))
        if price > self.max_queued_tokens or message.n > self.max_queued_requests:
            detail = (
                f"The request asks for up to {price} tokens in {message.n} sequences, prompts included; at most "
                f"{self.max_queued_tokens} in {self.max_queued_requests} are taken. Ask for a smaller n or max_tokens."
            )
            return Failed(rid, "invalid_request", detail)
        is_full = queued.num + message.n > self.max_queued_requests
        # A request that was accepted before and then lost has waited already.
        if (is_full or queued.num_tokens + price > self.max_queued_tokens) and not message.attempt:
            detail = f"{queued.num} requests with {queued.num_tokens} tokens are waiting already; try again later."
            return Failed(rid, "queue_full", detail)
        return None
