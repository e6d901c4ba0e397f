"""Calls whose arguments are elements, one for each: `<function=f><parameter=a>1</parameter></function>`.

Families write them with different tags, which `Elements` lists. The values have no quotes; `bare_values.py` says how
their types are known, and `bare_spelling.py` how they are forced.
"""

import json
from typing import NamedTuple

from .bare_spelling import End, spell_bare
from .bare_values import bare_value
from .block import MAX_NAME, SPACE, Block, Reads, call_name, one_tag, skip_space, until
from .lexer import Grammar
from .schema_types import argument_schema, types_of
from .spelling import MAX_ARGUMENTS, CallRules, Schema, Tools, literal, named_properties, one_of, repeat, rule


class Elements(NamedTuple):
    """The tags of a family in the order of a call: `open`, `name` around the function's name, for each argument `key`
    around its name, `value` around its value, then `end` and `close`."""

    open: str
    name: tuple[str, str]  # may be empty
    key: tuple[str, str]
    value: tuple[str, str]  # the first may be empty
    end: str
    close: str = ""  # empty: `end` closes the call
    gap: str = "\n"  # what templates write between elements
    pad: str = ""  # what templates write around a value
    holds_several: bool = False  # whether several calls share `open` and `close`

    @property
    def grammar(self) -> Grammar:
        """Reads these calls."""
        return Grammar(self._read, tags=(self.open,), marks=tuple(self._marks[1:]), needs_schemas=True)

    @property
    def _marks(self) -> list[str]:
        """The tags that stand by themselves and may be special tokens."""
        tags = (self.open, *self.key, *self.value, self.end, self.close)
        return list(dict.fromkeys(tag for tag in tags if tag.startswith("<") and tag.endswith(">")))

    def _read(self, tag: str, block: Block) -> Reads[str]:
        char = yield from skip_space()
        if self.name[0]:
            yield from one_tag(char, (self.name[0],))
            char = yield
        while True:
            block.quiet = False
            yield from self._read_call(block, char)
            if not self.close:
                return ""
            tag = yield from one_tag((yield from skip_space()), (self.close, self.name[0]))
            if tag == self.close:
                block.settle()
                return ""
            char = yield

    def _read_call(self, block: Block, char: str) -> Reads[None]:
        """A call from the first character of its name to `end`."""
        name, char = yield from call_name(char)
        if self.name[1]:
            yield from one_tag(char, (self.name[1],))
            char = yield
        before = "{"
        while (yield from self._next(char)) == self.key[0]:
            key = yield from until(self.key[1], MAX_NAME)
            if before == "{":
                block.start(name)
            if self.value[0]:
                yield from one_tag((yield from skip_space()), (self.value[0],))
            block.argue(f"{before}{json.dumps(key)}: ")
            before = ", "
            types = types_of(*argument_schema(block.schemas, name, key))
            yield from bare_value(block.argue, types, self.value[1], self.pad)
            char = yield from skip_space()
        if before == "{":
            block.start(name)
            block.argue("{")
        block.argue("}")
        block.settle()

    def _next(self, char: str) -> Reads[str]:
        """`key[0]` or `end`, after spaces."""
        if char in SPACE:
            char = yield from skip_space()
        return (yield from one_tag(char, (self.key[0], self.end)))

    def spell(self, tools: Tools, several: bool) -> CallRules:
        """Rules for these calls. Raises CannotSpell."""
        rules = self._spell_calls(several)
        head = [*self._tag(self.name[0]), "name", *self._tag(self.name[1]), *self._gap()]
        rules += one_of("call", [*head, "arguments", *self._tag(self.end)], tools)
        for i, (name, schema) in enumerate(tools):
            properties = named_properties(name, schema)
            if properties is None:
                key = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
                rules.append(rule(f"arguments{i}", f"argument{i}_0{{0,{MAX_ARGUMENTS}}}"))
                rules += self._spell_argument(f"{i}_0", key, True, {})
                continue
            names = [f"argument{i}_{j}" + ("" if required else "?") for j, (_, _, required) in enumerate(properties)]
            rules.append(rule(f"arguments{i}", *(names or [literal("")])))
            for j, (key, inner, _) in enumerate(properties):
                rules += self._spell_argument(f"{i}_{j}", literal(key), inner, schema)
        return CallRules(rules, tuple(self._marks))

    def _spell_calls(self, several: bool) -> list[str]:
        opening, closing = [*self._tag(self.open), *(self._gap() if self.name[0] else [])], self._tag(self.close)
        if self.holds_several:
            return [rule("calls", *opening, repeat("call", self.gap, several), *self._gap(), *closing)]
        if not closing:
            return [rule("calls", repeat("whole", self.gap, several)), rule("whole", *opening, "call")]
        whole = rule("whole", *opening, "call", *self._gap(), *closing)
        return [rule("calls", repeat("whole", self.gap, several)), whole]

    def _spell_argument(self, numbers: str, key: str, schema: object, root: Schema) -> list[str]:
        head = [*self._tag(self.key[0]), key, *self._tag(self.key[1])]
        if self.value[0]:
            head += [*self._gap(), *self._tag(self.value[0])]
        (mark,) = self._tag(self.value[1])
        end = End(self.value[1], mark, self.pad)
        value = spell_bare(f"value{numbers}", numbers, schema, root, end)
        return [rule(f"argument{numbers}", *head, f"value{numbers}", *self._gap()), *value]

    def _tag(self, tag: str) -> list[str]:
        """The rule of a tag, nothing if it is empty."""
        if tag in self._marks:
            return [f"mark{self._marks.index(tag)}"]
        return [literal(tag)] if tag else []

    def _gap(self) -> list[str]:
        return [literal(self.gap)] if self.gap else []
