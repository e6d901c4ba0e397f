"""How the published cases of JSON Schema are counted."""

from pagewire.tools.json_schema_suite import Score, Suite


def test_cases_are_counted() -> None:
    suite = Suite()
    record = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    cases = [
        {
            "schema": record,
            "tests": [
                {"data": {"b": 1, "a": "x"}, "valid": True},  # in another order than the schema's
                {"data": {"a": "x", "c": 1}, "valid": True},  # closed on purpose
                {"data": {"a": 1}, "valid": False},
            ],
        },
        {"schema": {"uniqueItems": True}, "tests": [{"data": [1, 1], "valid": False}]},
        {"schema": {"if": {"const": 1}, "then": False}, "tests": [{"data": 1, "valid": False}]},
    ]
    assert suite.score(cases) == Score(schemas=3, enforced=2, wrong=2, ruled_out=1, right=2, allowed=1)
