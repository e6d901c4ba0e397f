"""The main program of a process of the prompt sandbox: `python -m pagewire.procs.prompt_child FD`."""

import sys
from collections.abc import Callable

import msgspec

from ..config.config import EngineConfig
from ..ipc.messages import Message, Submit, Tokenize
from .killable import answer
from .limits import CpuLimit
from .prompt_sandbox import MEMORY_BYTES
from .tokenizer import TokenizerActor

_encode = msgspec.msgpack.Encoder().encode
_questions = msgspec.msgpack.Decoder(Submit | Tokenize)


def start(config: EngineConfig) -> Callable[[bytes], bytes]:
    """The function that answers questions in this process."""
    said: list[tuple[str, Message]] = []
    actor = TokenizerActor(config, limit=CpuLimit())
    actor.start(lambda receiver, message: said.append((receiver, message)))

    def work(question: bytes) -> bytes:
        said.clear()
        actor.handle([_questions.decode(question)])
        return _encode(said)

    return work


if __name__ == "__main__":
    answer(int(sys.argv[1]), start, memory_bytes=MEMORY_BYTES)
