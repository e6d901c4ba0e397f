"""The detokenizer process: token ids become text while the device computes the next step.

It also looks for stop strings, because only text can hold them: on a hit it tells the client the end at once and the
core afterwards, and drops what the core still sends of that request.
"""

from pathlib import Path
from typing import assert_never

from ..config.config import EngineConfig
from ..engine.text.output import OutputText, Piece, render_logprobs
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

_NUM_END_IDS = 16  # of a prompt, whose text is its end


class _Output:
    """One request whose tokens are coming."""

    __slots__ = (
        "ahead",
        "ended",
        "has_told",
        "num_told",
        "opened",
        "prompt",
        "prompt_end",
        "prompt_logprobs",
        "resumed",
        "text",
        "times",
    )

    def __init__(self, tokenizer: Tokenizer, opened: Opened) -> None:
        spec = opened.text
        prompt_ids = bytes_to_ids(opened.prompt_ids)
        self.opened = opened
        self.times: Times | None = opened.times  # until they are sent
        self.ended = False  # its client knows the end; the core does not yet
        self.has_told = False  # what only the first chunk holds has been sent
        self.prompt: PromptEcho | None = None  # until it is sent
        self.prompt_end: str | None = None  # until it is sent
        self.prompt_logprobs: list[TokenLogprob | None] = []
        if spec.prompt:
            text = tokenizer.decode(prompt_ids, skip_special_tokens=False) if spec.detokenize else ""
            self.prompt = PromptEcho(opened.prompt_ids, text)
        if spec.prompt_end:
            self.prompt_end = tokenizer.decode(prompt_ids[-_NUM_END_IDS:], skip_special_tokens=False)
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
        # What a sequence had when the engine lost it is read again, one by one as it came.
        self.resumed: list[Piece] = []
        for id in bytes_to_ids(opened.resume_ids):
            self.resumed.append(self.text.push((id,)))
            if self.resumed[-1].stop is not None:
                break
        text = "".join(piece.text for piece in self.resumed)
        self.ahead = text[max(opened.resume_chars, 0) :]  # of the text, not told yet
        self.num_told = max(0, opened.resume_chars - len(text))  # characters still to come that were told before

    def push_one(self, id: int) -> str | None:
        """See `OutputText`."""
        return self.text.push_one(id) if self.has_told and not self.ended else None

    def untold(self, text: str) -> str:
        """What is news of the text that comes next."""
        text = self.ahead + text
        num_told = min(self.num_told, len(text))
        self.ahead = ""
        self.num_told -= num_told
        return text[num_told:]


class DetokenizerActor:
    """core → api."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._outputs: dict[int, _Output] = {}

    def start(self, post: Post) -> Facts:
        """See `Actor`."""
        self._post = post
        self._tokenizer = load_tokenizer(Path(self._config.model.path))
        return Facts()

    def handle(self, messages: list[ToDetokenizer]) -> None:
        """See `Actor`. Everything that waited goes to the api as one batch."""
        chunks: list[Chunk] = []
        hits: list[int] = []
        for message in messages:
            match message:
                case Opened():
                    opened = self._outputs[message.rid] = _Output(self._tokenizer, message)
                    if message.resume_chars < 0:
                        chunks.append(self._replay(opened, hits))
                case TokenBatch():
                    self._push_columns(message, chunks, hits)
                    for tokens in message.tokens:
                        self._push(tokens, chunks, hits)
                case Failed():
                    output = self._outputs.pop(message.rid, None)
                    if output is None or not output.ended:
                        self._flush(chunks)
                        self._post("api", message)
                case Reset():
                    self._outputs.clear()
                case Ping() | Leave() | Stop():
                    pass
                case _:
                    assert_never(message)
        self._flush(chunks)
        if hits:
            self._post("core", StopHit(tuple(hits)))

    async def stop(self, grace_s: float) -> None:
        """See `Actor`."""

    def _flush(self, chunks: list[Chunk]) -> None:
        if chunks:
            self._post("api", TextBatch(tuple(chunks)))
            chunks.clear()

    def _push_columns(self, batch: TokenBatch, chunks: list[Chunk], hits: list[int]) -> None:
        rids, data = memoryview(batch.rids).cast("q"), batch.ids
        if len(set(rids)) < len(rids):  # somebody got several tokens
            for rid, ids in batch.columns():
                self._push(Tokens(rid, ids), chunks, hits)
            return
        outputs = self._outputs
        for i, (rid, id) in enumerate(zip(rids, bytes_to_ids(data), strict=True)):
            output = outputs.get(rid)
            text = output.push_one(id) if output is not None else None
            ids = data[4 * i : 4 * i + 4]
            if text is None:
                self._push(Tokens(rid, ids), chunks, hits)
            else:
                chunks.append(Chunk(rid, text, ids))

    def _push(self, tokens: Tokens, chunks: list[Chunk], hits: list[int]) -> None:
        output = self._outputs.get(tokens.rid)
        if output is None:  # ended before its first step, so it was never opened
            chunks.append(Chunk(tokens.rid, "", b"", finish=tokens.finish, usage=tokens.usage))
            return
        if tokens.finish is not None:
            del self._outputs[tokens.rid]
        if output.ended:
            return
        spec = output.opened.text
        if tokens.prompt_logprobs is not None:
            output.prompt_logprobs += self._render(tokens.prompt_logprobs)
        if not tokens.ids and tokens.finish is None:
            return  # a chunk of a prompt that is being scored

        ids = bytes_to_ids(tokens.ids)
        shown = ids
        if tokens.finish == "stop" and not spec.include_stop:
            shown = ids[:-1]  # the eos or stop token itself is no text
        piece = output.text.push(shown, last=tokens.finish is not None)
        text = output.untold(piece.text)
        finish, stop_reason, usage = tokens.finish, tokens.stop_token_id, tokens.usage
        text_stop: str | int | None = stop_reason
        logprobs = tokens.logprobs
        if piece.stop is not None:
            ids = ids[: piece.num_ids]
            finish, text_stop = "stop", piece.stop
            opened = output.opened
            usage = Usage(opened.num_prompt, output.text.num_ids, opened.num_cached)
            if tokens.finish is None:
                output.ended = True
                hits.append(tokens.rid)
        chunks.append(
            Chunk(
                rid=tokens.rid,
                text=text,
                ids=ids.tobytes(),
                logprobs=tuple(self._render(logprobs)[: len(ids)]) if logprobs is not None else None,
                prompt=self._take_prompt(output),
                finish=finish,
                stop_reason=text_stop,
                usage=usage,
                prompt_end=output.prompt_end,
                times=output.times,
                vector=tokens.vector,
            )
        )
        output.prompt_end = output.times = None
        output.has_told = not output.num_told

    def _replay(self, output: _Output, hits: list[int]) -> Chunk:
        """All that a resumed sequence had, for a client that has heard nothing of it. It may end there: nobody but who
        resumes it has looked for stop strings."""
        opened, pieces = output.opened, output.resumed
        lengths = ids_to_bytes([len(piece.text) for piece in pieces])
        stop = pieces[-1].stop if pieces else None
        if stop is not None:
            output.ended = True
            hits.append(opened.rid)
        chunk = Chunk(
            rid=opened.rid,
            text=output.untold(""),
            ids=opened.resume_ids[: len(lengths)],
            prompt=self._take_prompt(output),
            finish=None if stop is None else "stop",
            stop_reason=stop,
            usage=None if stop is None else Usage(opened.num_prompt, output.text.num_ids, opened.num_cached),
            prompt_end=output.prompt_end,
            times=output.times,
            lengths=lengths,
        )
        output.prompt_end = output.times = None
        output.resumed = []
        return chunk

    @staticmethod
    def _take_prompt(output: _Output) -> PromptEcho | None:
        """The prompt, once, with its log-probabilities if they were asked for."""
        prompt, output.prompt = output.prompt, None
        if prompt is None or not output.prompt_logprobs:
            return prompt
        return PromptEcho(prompt.ids, prompt.text, (None, *output.prompt_logprobs))

    def _render(self, logprobs: RowLogprobs) -> list[TokenLogprob]:
        positions = render_logprobs(self._tokenizer, logprobs.width, logprobs.ids, logprobs.values)
        return [TokenLogprob(TopLogprob(*p.chosen), tuple(TopLogprob(*c) for c in p.top)) for p in positions]
