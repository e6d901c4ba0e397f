"""Values without quotes, which are read by the types that the schema allows."""

import pytest

from pagewire.api.output.parsers.bare_values import MAX_UNDECIDED, as_json
from pagewire.api.output.parsers.schema_types import TYPES

END = "</v>"
BRACKET = '["' + "a" * MAX_UNDECIDED


@pytest.mark.parametrize(
    ("text", "types", "json"),
    [
        ("5", {"string"}, '"5"'),
        ("5", {"integer"}, "5"),
        ("5", {"string", "null"}, '"5"'),
        ("5", {"string", "number", "integer"}, "5"),
        ("5.5", {"string", "integer"}, '"5.5"'),
        ("5.0", {"string", "integer"}, "5.0"),
        (" null ", {"string", "null"}, "null"),
        (" none ", {"string", "null"}, '" none "'),
        ("None", {"null", "integer"}, "null"),
        ('"a"', {"string", "array"}, '"\\"a\\""'),
        ("{'a': [1, (2)]}", TYPES, "\"{'a': [1, (2)]}\""),
        ("{'a': [1, 2,]}", TYPES, '{"a": [1, 2]}'),
        ("[1] is first", TYPES, '"[1] is first"'),
        ("12 <b", TYPES, '"12 <b"'),
        ("<<b></v", {"string"}, '"<<b></v"'),
        ("", {"integer"}, '""'),
        ('["</v>"]', {"array"}, '["</v>"]'),
        ('["</v>"]', TYPES, '["</v>"]'),
        (BRACKET, TYPES, '"[\\"' + BRACKET[2:] + '"'),
    ],
)
@pytest.mark.parametrize("pad", ["", "\n"])
def test_values_by_their_types(text: str, types: set[str], json: str, pad: str) -> None:
    assert as_json(text, frozenset(types), END, pad) == json


def test_text_with_an_end_is_not_read_to_its_end() -> None:
    assert as_json("a</v>b", frozenset({"string"}), END) is None
    assert as_json("[1, x", frozenset({"array"}), END) is None
