"""Shows the token ids of a text, or the text of token ids. Needs no server and no weights."""

import argparse
import json
import sys

from ..engine.checkpoint.source import locate
from ..errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text", metavar="TEXT", nargs="*", help="the text, or token ids with --decode; default: standard input"
    )
    parser.add_argument("--model", default="", help="a folder, GGUF file or Hub name (default: the demo model)")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of a Hub model")
    parser.add_argument("--decode", action="store_true", help="convert token ids to text")
    parser.add_argument("--chat", action="store_true", help="the text is a user's message: apply the chat template")
    parser.add_argument("--no-special-tokens", action="store_true", help="do not add BOS or EOS")
    parser.add_argument("--format", choices=("table", "ids", "count", "json"), default="table", help="default: table")


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    from ..engine.text.tokenizer import load_tokenizer

    folder, _ = locate(arguments.model, arguments.revision, weights=False)
    tokenizer = load_tokenizer(folder)
    text = " ".join(arguments.text) if arguments.text else sys.stdin.read()
    if arguments.decode:
        print(tokenizer.decode(_ids(text, tokenizer.vocab_size), skip_special_tokens=False))
        return 0
    if arguments.chat:
        from ..engine.text.chat_template import load_chat_template

        messages = json.dumps([{"role": "user", "content": text}]).encode()
        ids = load_chat_template(folder, tokenizer).encode(tokenizer, messages=messages)
    else:
        ids = tokenizer.encode(text, not arguments.no_special_tokens)
    match arguments.format:
        case "count":
            print(len(ids))
        case "ids":
            print(" ".join(map(str, ids)))
        case "json":
            print(json.dumps({"tokens": ids, "count": len(ids)}))
        case _:
            for id in ids:
                print(f"{id:>8}  {json.dumps(tokenizer.token_text(id), ensure_ascii=False)}")
            print(f"{len(ids)} tokens", file=sys.stderr)
    return 0


def _ids(text: str, vocab_size: int) -> list[int]:
    """Parses numbers separated by blanks or commas. Raises ConfigError."""
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit() or int(word) >= vocab_size:
            raise ConfigError(f"{word!r} is not a token id of this model; ids are 0 to {vocab_size - 1}.")
    return [int(word) for word in words]
