"""300 schemas of the common keywords: every text sampled under the masks of one is a valid instance of it.

`json_schemas.py` makes them. The end-to-end test of structured outputs has a model generate for the same schemas."""

import json

import jsonschema
import pytest
from drawing import draw, grammars_of
from json_schemas import check_instance, make_schema

from pagewire.ipc.messages import Constraint

from .tokenizers_for_tests import make

TOKENIZER = make("byte_level", eos_token="<|im_end|>")
GRAMMARS = grammars_of(TOKENIZER)


@pytest.mark.parametrize("seed", range(300))
def test_a_sampled_text_is_a_valid_instance(seed: int) -> None:
    schema = make_schema(seed)
    jsonschema.Draft202012Validator.check_schema(schema)
    matcher = GRAMMARS.compile(Constraint("json_schema", json.dumps(schema)), "")
    ids = draw(matcher, TOKENIZER, seed)
    check_instance(schema, json.loads(TOKENIZER.decode(ids, False)))
