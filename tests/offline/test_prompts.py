"""Prompts in vLLM's forms."""

from typing import Any

import pytest

from pagewire import TextPrompt as TextDict
from pagewire import TokensPrompt
from pagewire.errors import RequestError
from pagewire.ipc.messages import IdsPrompt, TextPrompt, ids_to_bytes
from pagewire.offline.prompts import Parsed, as_list, parse

IDS = IdsPrompt(ids_to_bytes([1, 2]))


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", Parsed(TextPrompt("a"), "a", "")),
        ([1, 2], Parsed(IDS, None, "")),
        ((1, 2), Parsed(IDS, None, "")),
        (TextDict(prompt="a", cache_salt="s"), Parsed(TextPrompt("a"), "a", "s")),
        (TokensPrompt(prompt_token_ids=[1, 2]), Parsed(IDS, None, "")),
        ({"prompt_token_ids": [1, 2], "prompt": "ab", "multi_modal_data": None}, Parsed(IDS, "ab", "")),
    ],
)
def test_every_form_of_a_prompt(prompt: Any, parsed: Parsed) -> None:
    assert parse(prompt) == parsed
    assert as_list(prompt) == [prompt] and as_list([prompt, "b"]) == [prompt, "b"]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ({}, "A prompt needs prompt (a text) or prompt_token_ids."),
        ({"text": "a"}, "A prompt has no field 'text'."),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "multi_modal_data: prompts are texts or token ids, without",
        ),
        ({"prompt_embeds": [1.0]}, "prompt_embeds: prompts are texts or token ids."),
        ({"encoder_prompt": "a"}, "encoder_prompt: models with an encoder for the prompt are not served."),
        ({"prompt_token_ids": "ab"}, "Token ids must be a list of integers."),
        ([1, "a"], "Token ids must be a list of integers."),
        ([2**40], "A token id is out of range."),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt must be a text."),
    ],
)
def test_what_is_no_prompt_is_refused_in_a_sentence(prompt: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as error:
        parse(prompt)
    assert str(error.value).startswith(sentence)
