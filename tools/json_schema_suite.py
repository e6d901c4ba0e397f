"""How much of JSON Schema structured outputs honour: `python -m pagewire.tools.json_schema_suite FOLDER`.

FOLDER holds the published test suite's cases of one draft, for example `json/tests/draft2020-12` in the source archive
of the package jsonschema. Each instance of a case is fed to the grammar of its schema, as a model would write it. The
table says, by keyword, for how many schemas there is a grammar, how many of the wrong instances it rules out, and how
many of the right ones it allows. Right ones are ruled out on purpose where objects are closed, and where properties do
not come in the schema's order.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.text.grammar import Grammars
from ..engine.text.tokenizer import Tokenizer, load_tokenizer
from ..errors import RequestError
from ..ipc.messages import Constraint

_TOKENIZER = Path(__file__).parents[1] / "demo_model"
_MAX_ORDERS = 24  # of an object's properties that are tried
_LEFT_OUT = (  # what says nothing about values, or needs other documents
    "vocabulary", "refRemote", "infinite-loop-detection", "format", "content", "default", "anchor", "dynamicRef",
)  # fmt: skip


class Score(NamedTuple):
    """Counts of one keyword's cases."""

    schemas: int = 0
    enforced: int = 0  # schemas with a grammar
    wrong: int = 0  # instances that are not valid, of those schemas
    ruled_out: int = 0
    right: int = 0
    allowed: int = 0

    def plus(self, other: "Score") -> "Score":
        """The sums."""
        return Score(*(a + b for a, b in zip(self, other, strict=True)))


class Suite:
    def __init__(self) -> None:
        self._tokenizer: Tokenizer = load_tokenizer(_TOKENIZER)
        eos = self._tokenizer.eos_token_id
        assert eos is not None
        self._eos = eos
        self._grammars = Grammars(self._tokenizer, self._tokenizer.vocab_size, [eos])

    def score(self, cases: list[dict[str, Any]]) -> Score:
        """The score of one file's cases."""
        total = Score()
        for case in cases:
            total = total.plus(self._score_one(case["schema"], case["tests"]))
        return total

    def _score_one(self, schema: object, tests: list[dict[str, Any]]) -> Score:
        constraint = Constraint("json_schema", json.dumps(schema))
        try:
            self._grammars.compile(constraint, "")
        except RequestError:
            return Score(schemas=1)
        found = [(test["valid"], self.allows(constraint, test["data"])) for test in tests]
        return Score(
            schemas=1,
            enforced=1,
            wrong=sum(not valid for valid, _ in found),
            ruled_out=sum(not valid and not allowed for valid, allowed in found),
            right=sum(valid for valid, _ in found),
            allowed=sum(valid and allowed for valid, allowed in found),
        )

    def allows(self, constraint: Constraint, value: object) -> bool:
        """Whether the grammar allows the value, its properties in any order."""
        return any(self._follows(constraint, json.dumps(one, ensure_ascii=False)) for one in _orders(value))

    def _follows(self, constraint: Constraint, text: str) -> bool:
        matcher = self._grammars.compile(constraint, "")
        try:
            for id in self._tokenizer.encode(text, add_special_tokens=False):
                if matcher.is_ended:
                    return False  # it would drop what follows
                matcher.accept([id])
            matcher.accept([self._eos])
        except RequestError:
            return False
        return True


def _orders(value: object) -> Iterator[object]:
    """The value with the properties of its outermost object in different orders."""
    if not isinstance(value, dict):
        yield value
        return
    for entries in itertools.islice(itertools.permutations(value.items()), _MAX_ORDERS):
        yield dict(entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    suite, total = Suite(), Score()
    print(
        "| keyword | schemas with a grammar | wrong instances ruled out | right instances allowed |\n|---|---|---|---|"
    )
    for path in sorted(folder.glob("*.json")):
        if path.stem in _LEFT_OUT:
            continue
        score = suite.score(json.loads(path.read_text()))
        total = total.plus(score)
        print(_row(path.stem, score))
    print(_row("all", total))


def _row(name: str, score: Score) -> str:
    parts = [(score.enforced, score.schemas), (score.ruled_out, score.wrong), (score.allowed, score.right)]
    return f"| {name} | " + " | ".join(f"{part} of {whole}" if whole else "–" for part, whole in parts) + " |"


if __name__ == "__main__":
    main()
