"""The detokenizer process: token ids become text while the device computes the next step.

It also looks for stop strings, because only text can hold them. On a hit it ends the request for the client at once,
tells the core, and drops the tokens of that request that were in flight.
"""

from pathlib import Path
from typing import assert_never

from ..config.config import EngineConfig
from ..engine.text.output import OutputText, render_logprobs
from ..engine.text.tokenizer import Tokenizer, load_tokenizer
from ..ipc.actor import Post
from ..ipc.messages import (
    Chunk,
    Facts,
    Failed,
    Leave,
    Opened,
    Ping,
    PromptEcho,
    Reset,
    RowLogprobs,
    Settings,
    Stop,
    StopHit,
    TextBatch,
    Times,
    ToDetokenizer,
    TokenBatch,
    TokenLogprob,
    Tokens,
    TopLogprob,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)

_NUM_END_IDS = 16  # of the prompt, whose text is `Chunk.prompt_end`


class _Output:
    """The output of one open request: its text, and what only its first chunk carries."""

    def __init__(self, tokenizer: Tokenizer, opened: Opened) -> None:
        spec = opened.text
        prompt_ids = bytes_to_ids(opened.prompt_ids)
        self._tokenizer = tokenizer
        self._opened = opened
        self.has_ended = False  # by a stop string
        self.is_plain = False  # the next chunk needs nothing but its text and ids
        # These four are for the first chunk, and None afterwards.
        self._times: Times | None = opened.times
        self._prompt: PromptEcho | None = None
        self._prompt_end: str | None = None
        self._prompt_logprobs: list[TokenLogprob | None] = []
        if spec.prompt:
            text = tokenizer.decode(prompt_ids, skip_special_tokens=False) if spec.detokenize else ""
            self._prompt = PromptEcho(opened.prompt_ids, text)
        if spec.prompt_end:
            self._prompt_end = tokenizer.decode(prompt_ids[-_NUM_END_IDS:], skip_special_tokens=False)
        self.text = OutputText(
            tokenizer,
            prompt_ids,
            stop=spec.stop,
            include_stop=spec.include_stop,
            skip_special_tokens=spec.skip_special_tokens,
            detokenize=spec.detokenize,
            marks=spec.marks,
            min_ids=spec.min_tokens,
        )
        # The ids of a resumed output are pushed one by one, as they came the first time.
        self._stop: str | None = None  # the stop string in them
        pieces: list[str] = []
        for id in bytes_to_ids(opened.resume_ids):
            piece = self.text.push((id,))
            pieces.append(piece.text)
            self._stop = piece.stop
            if piece.stop is not None:
                break
        self._lengths = [len(piece) for piece in pieces]
        resumed = "".join(pieces)
        self._ahead = resumed[max(opened.resume_chars, 0) :]  # resumed text that the client does not have
        self._num_told = max(0, opened.resume_chars - len(resumed))  # characters to come that the client has

    def read(self, tokens: Tokens) -> Chunk | None:
        """The general path: the chunk of one step's tokens. None while the prompt is being scored."""
        if tokens.prompt_logprobs is not None:
            self._prompt_logprobs += self._render(tokens.prompt_logprobs)
        if not tokens.ids and tokens.finish is None:
            return None
        ids = bytes_to_ids(tokens.ids)
        is_end_hidden = tokens.finish == "stop" and not self._opened.text.include_stop
        piece = self.text.push(ids[:-1] if is_end_hidden else ids, last=tokens.finish is not None)
        num_ids = len(ids) if piece.stop is None else piece.num_ids
        return self._chunk(tokens, piece.text, ids[:num_ids].tobytes(), piece.stop)

    def replay(self) -> Chunk:
        """The whole resumed output, for a client that has none of it. The engine that sampled it did not look for stop
        strings, so it may end here."""
        ids = self._opened.resume_ids[: 4 * len(self._lengths)]
        return self._chunk(Tokens(self._opened.rid, b""), "", ids, self._stop, ids_to_bytes(self._lengths))

    def _chunk(self, tokens: Tokens, text: str, ids: bytes, stop: str | None, lengths: bytes = b"") -> Chunk:
        finish, usage = tokens.finish, tokens.usage
        stop_reason: str | int | None = tokens.stop_token_id
        if stop is not None:
            self.has_ended = True
            opened = self._opened
            finish, stop_reason = "stop", stop
            usage = Usage(opened.num_prompt, self.text.num_ids, opened.num_cached)
        prompt = self._prompt
        if prompt is not None and self._prompt_logprobs:
            prompt = PromptEcho(prompt.ids, prompt.text, (None, *self._prompt_logprobs))
        text = self._ahead + text
        num_told = min(self._num_told, len(text))
        logprobs = tokens.logprobs
        chunk = Chunk(
            rid=tokens.rid,
            text=text[num_told:],
            ids=ids,
            logprobs=None if logprobs is None else tuple(self._render(logprobs)[: len(ids) // 4]),
            prompt=prompt,
            finish=finish,
            stop_reason=stop_reason,
            usage=usage,
            prompt_end=self._prompt_end,
            times=self._times,
            vector=tokens.vector,
            lengths=lengths,
        )
        self._prompt = self._prompt_end = self._times = None
        self._ahead = ""
        self._num_told -= num_told
        self.is_plain = not (self._num_told or self.has_ended)
        return chunk

    def _render(self, logprobs: RowLogprobs) -> list[TokenLogprob]:
        positions = render_logprobs(self._tokenizer, logprobs.width, logprobs.ids, logprobs.values)
        return [TokenLogprob(TopLogprob(*p.chosen), tuple(TopLogprob(*c) for c in p.top)) for p in positions]


class DetokenizerActor:
    """core → api."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._outputs: dict[int, _Output] = {}

    def start(self, post: Post) -> Facts:
        self._post = post
        self._tokenizer = load_tokenizer(Path(self._config.model.path))
        return Facts()

    def handle(self, messages: list[ToDetokenizer]) -> None:
        """The chunks of all `messages` go to the api as one batch, unless a failure stands between them."""
        chunks: list[Chunk] = []
        hits: list[int] = []
        for message in messages:
            match message:
                case Opened():
                    output = self._outputs[message.rid] = _Output(self._tokenizer, message)
                    if message.resume_chars < 0:
                        chunks.append(output.replay())
                        if output.has_ended:
                            hits.append(message.rid)
                case TokenBatch():
                    self._read(message, chunks, hits)
                case Failed():
                    ended = self._outputs.pop(message.rid, None)
                    if ended is None or not ended.has_ended:
                        self._flush(chunks)
                        self._post("api", message)
                case Reset():
                    self._outputs.clear()
                case Ping() | Settings() | Leave() | Stop():
                    pass
                case _:
                    assert_never(message)
        self._flush(chunks)
        if hits:
            self._post("core", StopHit(tuple(hits)))

    async def stop(self, grace_s: float) -> None:
        pass

    def _flush(self, chunks: list[Chunk]) -> None:
        if chunks:
            self._post("api", TextBatch(tuple(chunks)))
            chunks.clear()

    def _read(self, batch: TokenBatch, chunks: list[Chunk], hits: list[int]) -> None:
        outputs = self._outputs
        for rid, ids in batch.columns():
            # The fast path: one token that is whole characters after whole characters. `_Output.read` gives the same.
            output = outputs.get(rid)
            if output is not None and output.is_plain and len(ids) == 4:
                text = output.text.push_one(int.from_bytes(ids, "little"))
                if text is not None:
                    chunks.append(Chunk(rid, text, ids))
                    continue
            self._read_one(Tokens(rid, ids), chunks, hits)
        for tokens in batch.tokens:
            self._read_one(tokens, chunks, hits)

    def _read_one(self, tokens: Tokens, chunks: list[Chunk], hits: list[int]) -> None:
        output = self._outputs.get(tokens.rid)
        if output is None:  # it ended before its first step, so it was never opened
            chunks.append(Chunk(tokens.rid, "", b"", finish=tokens.finish, usage=tokens.usage))
            return
        if tokens.finish is not None:
            del self._outputs[tokens.rid]
        if output.has_ended:
            return
        if (chunk := output.read(tokens)) is not None:
            chunks.append(chunk)
            if tokens.finish is None and chunk.finish is not None:  # the core does not know of the stop string
                hits.append(tokens.rid)
