"""An extension whose attention kills its own process at a long context, to test a request that kills every engine.

`--extension suicidal_attention:Suicidal,context=700`.
"""

import os
import signal

from pagewire.engine.attention.base import AttentionBackend, AttentionStep
from pagewire.engine.attention.kv_cache import KvCache
from pagewire.engine.extension import Options
from pagewire.kernels.states import StateRows


class Suicidal:
    @staticmethod
    def core(options: Options) -> "Silent":
        return Silent()

    @staticmethod
    def wrap_attention(options: Options, backend: AttentionBackend, cache: KvCache) -> AttentionBackend:
        return SuicidalAttention(backend, int(options["context"]))


class Silent:
    def extend(self, step: int, rids: object, counts: object, starts: object) -> bytes:
        return b""


class SuicidalAttention:
    def __init__(self, inner: AttentionBackend, context: int) -> None:
        self._inner = inner
        self._context = context
        self.forward, self.state_tiles = inner.forward, inner.state_tiles

    @property
    def states(self) -> StateRows | None:
        return self._inner.states

    def begin(self, step: AttentionStep) -> None:
        if step.context_lens.max() >= self._context:
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.begin(step)
