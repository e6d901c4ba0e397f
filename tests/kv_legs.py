"""The two legs of prompts between engines that run: one computes the KV, the other one loads it."""

import json
from itertools import count
from typing import Any

from open_requests import END_S, OpenRequest
from waiting import until

from pagewire.tools.servers import Server

_numbers = count()  # of prompts: no two are equal


def until_loaded(prefill: Server, decode: Server, what: str) -> None:
    """Hands prompts over until KV was loaded. The tokens are those without it."""
    before = _num_loaded(decode)

    def is_loaded() -> bool:
        _hand_over(prefill, decode)
        return _num_loaded(decode) > before

    until(is_loaded, what, END_S)


def _hand_over(prefill: Server, decode: Server) -> None:
    prompt = f"Item {next(_numbers)}. " + "Count from 1 to 9, then say the alphabet. " * 25
    body: dict[str, object] = {"prompt": prompt, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    wanted = _post(decode, {**body, "cache_salt": "alone"})
    told = _post(prefill, {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    found = _post(decode, {**body, "kv_transfer_params": told["kv_transfer_params"]})
    assert found["choices"][0]["text"] == wanted["choices"][0]["text"]


def _num_loaded(server: Server) -> float:
    return server.metric("pagewire:external_prefix_cache_hits_total")


def _post(server: Server, body: dict[str, object]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(OpenRequest(server, "/v1/completions", body).body())
    assert "choices" in answer, answer
    return answer
