"""Every error that pagewire raises or reports on purpose.

    PagewireError                     `str(e)` is one clear sentence
    ├── ConfigError                   a flag, folder or file cannot be used: exit code 2
    │   └── UnsupportedModel          the checkpoint is valid, but pagewire cannot serve this model
    ├── CheckpointError               the checkpoint's files are damaged or inconsistent: exit code 2
    ├── StartError                    a process did not become ready: exit code 1
    │   └── BrokenDeviceError(kernel) a kernel's check broke the device for its process; the next one leaves it out
    └── RequestError(kind)            one request is refused or failed; other requests are not affected

`Failed` carries the `ErrorKind` over IPC; the api turns it into an HTTP status and OpenAI's error object.
"""

from typing import Literal

ErrorKind = Literal[
    "invalid_request",  # the request cannot be served as it is: 400
    "context_length_exceeded",  # the prompt does not fit the model's context or the KV cache: 400
    "queue_full",  # the waiting queue is at its bound: 429
    "unavailable",  # a part of the engine is starting, stopping or gone: 503
    "internal",  # a bug: 500
]

_MAX_CHARS = 1000  # of a message, because what it quotes may have any length


class PagewireError(Exception):
    """Base of all errors raised on purpose. `str()` is one sentence that says what to do.

    The message may quote a file or a request, so control characters are escaped: they could move a terminal's cursor
    or begin a new line in a log."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _MAX_CHARS:
            text = f"{text[: _MAX_CHARS - 100]} … {text[-97:]}"
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConfigError(PagewireError):
    """A flag, folder or config file that cannot be used."""


class UnsupportedModel(ConfigError):
    """`reason`: a clause that names the missing mechanism, without a full stop."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"{architecture} cannot be served: {reason}.")


class CheckpointError(PagewireError):
    """A checkpoint whose files are damaged, incomplete, or do not belong together."""


class StartError(PagewireError):
    """A process did not become ready."""


class BrokenDeviceError(StartError):
    """The check of a kernel broke the device for this process. Another process can serve without that kernel."""

    def __init__(self, kernel: str, problem: str) -> None:
        """`problem`: one line of the error."""
        super().__init__(
            f"The check of the GPU kernel {kernel} broke the device for this process ({problem}). The next process "
            "leaves that kernel out."
        )
        self.kernel = kernel
        self.problem = problem


class RequestError(PagewireError):
    """One request is refused or has failed; other requests are not affected."""

    def __init__(self, kind: ErrorKind, detail: str, *, param: str = "", num_tokens: int = 0) -> None:
        """`param`: the invalid field of the request, if there is one. `num_tokens`: length of a prompt that is too
        long, if it is known."""
        super().__init__(detail)
        self.kind: ErrorKind = kind
        self.param = param
        self.num_tokens = num_tokens


def prompt_too_long(max_model_len: int, why: str, *, num_tokens: int = 0) -> RequestError:
    """`why`: the clause after "However,". Clients recognise the error by its first sentence, which is OpenAI's."""
    detail = f"This model's maximum context length is {max_model_len} tokens. However, {why}. Shorten the prompt."
    return RequestError("context_length_exceeded", detail, num_tokens=num_tokens)
