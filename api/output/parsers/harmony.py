"""gpt-oss' harmony: an output is a row of messages, each with a header that says whose it is and on which channel.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>`: analysis is reasoning, what is for a function is a call, everything else is for the reader.
The prompt ends with `<|start|>assistant`, so the first header may go on with ` to=`.
"""

from .block import Block, Reads, arguments, skip_space, until
from .lexer import Grammar

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TO = "to=functions."
_MAX_HEADER = 512


def _harmony(tag: str, block: Block) -> Reads[str]:
    block.kind = "text"
    block.quiet = True  # half a header is nobody's
    if tag in _ENDS:
        return ""
    header = tag if tag == _MESSAGE else tag + (yield from until(_MESSAGE, _MAX_HEADER))
    channel = header.partition(_CHANNEL)[2]
    name = header.partition(_TO)[2].partition("<")[0].partition(" ")[0]
    block.settle()
    if not name:
        block.kind = "reasoning" if channel.startswith("analysis") else "text"
        return ""
    block.quiet = False
    char = yield from skip_space()
    if char == "{":
        block.start(name)
    yield from arguments(block, char)
    return ""


def _reasons(prompt: str) -> bool:
    last = prompt.rpartition(_START)[2]
    return last.rpartition(_CHANNEL)[2].startswith("analysis" + _MESSAGE) and not any(end in last for end in _ENDS)


_TAGS = (_START, _CHANNEL, _MESSAGE, *_ENDS)
HARMONY = Grammar(_harmony, (_TO,), _TAGS, _TAGS, (_CONSTRAIN,), _reasons)
