"""300 schemas of the common keywords: whatever is drawn from the masks of one is a valid instance of it.

`json_schemas.py` makes them; the end-to-end test of structured outputs has a model draw for the same ones."""

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
def test_what_is_drawn_is_valid(seed: int) -> None:
    schema = make_schema(seed)
    jsonschema.Draft202012Validator.check_schema(schema)
    matcher = GRAMMARS.compile(Constraint("json_schema", json.dumps(schema)), "")
    ids = draw(matcher, TOKENIZER, seed)
    check_instance(schema, json.loads(TOKENIZER.decode(ids, False)))
