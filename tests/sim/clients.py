"""The clients of a simulated engine, and the journal from which their requests are sent again to a new core.

A client knows its expected output, compares every message with it, and needs exactly one terminal message.
"""

from collections.abc import Sequence

from fakes import EOS, allowed_after, enqueue, expected_output

from pagewire.engine.core.groups import Groups
from pagewire.ipc.messages import Accepted, Constraint, Enqueue, Failed, Opened, TokenBatch, Tokens, bytes_to_ids

from .oracle import Oracle


class Ask:
    """The parameters of a request, which all of its sequences share."""

    def __init__(
        self,
        prompt: list[int],
        *,
        max_tokens: int | None,
        priority: int,
        tenant: str,
        latency_class: str,
        salt: bytes,
        ignore_eos: bool,
        stop_token_ids: tuple[int, ...],
        logprobs: int | None,
        prompt_logprobs: int | None,
        queue_timeout_s: float | None,
        min_tokens: int,
        constraint: Constraint | None,
        marks: tuple[int, ...],
        starts: tuple[int, ...] = (),
    ) -> None:
        """`starts`: with these ids the decoder begins, and an encoder reads the prompt."""
        self.prompt = prompt
        self.own = list(starts) or prompt  # what the decoder's ids begin with
        self.encoded = prompt if starts else []
        self.max_tokens = max_tokens
        self.priority = priority
        self.tenant = tenant
        self.latency_class = latency_class
        self.salt = salt
        self.ignore_eos = ignore_eos
        self.stop_token_ids = stop_token_ids
        self.logprobs = logprobs
        self.prompt_logprobs = prompt_logprobs
        self.queue_timeout_s = queue_timeout_s
        self.min_tokens = min_tokens
        self.constraint = constraint
        self.marks = marks

    def message(self, rid: int, n: int = 1, resume_ids: Sequence[int] = ()) -> Enqueue:
        """The message that the tokenizer sends. The seed of a sequence is its rid."""
        return enqueue(
            rid,
            self.prompt,
            max_tokens=self.max_tokens,
            seed=rid,
            priority=self.priority,
            tenant=self.tenant,
            latency_class=self.latency_class,
            salt=self.salt,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            queue_timeout_s=self.queue_timeout_s,
            n=n,
            resume_ids=resume_ids,
            min_tokens=self.min_tokens,
            constraint=self.constraint,
            marks=self.marks,
        )


class Client:
    """One sequence: its request, its expected output and the output received so far."""

    def __init__(
        self,
        rid: int,
        ask: Ask,
        *,
        max_len: int,
        fails: bool,
        stop_after: int | None,
        grammar_fails: bool,
        may_be_too_large: bool,
        groups: Groups,
        regime_limit: int | None = None,
    ) -> None:
        """`fails`: its logits are not finite. `stop_after`: the output length at which its text has a stop string.
        `grammar_fails`: its grammar may fail. `may_be_too_large`: its steps may not fit into the memory."""
        self.rid = rid
        self.ask = ask
        self.fails = fails
        self.grammar_fails = grammar_fails
        self.may_be_too_large = may_be_too_large
        self.stop_after = stop_after
        room = max_len - len(ask.own)
        self.max_tokens = room if ask.max_tokens is None else min(room, ask.max_tokens)
        grammar = None if ask.constraint is None else rid
        self.expected = expected_output(
            ask.own,
            self.max_tokens,
            max_len,
            rid,
            ask.ignore_eos,
            ask.stop_token_ids,
            ask.min_tokens,
            grammar,
            groups,
            regime_limit,
            ask.encoded,
        )
        self.is_twice_as_long = regime_limit is not None and len(ask.prompt) + self.max_tokens > regime_limit
        # What plans in flight at its end may sample after it. A constrained row samples one token at a time.
        self.beyond = (
            []
            if ask.constraint
            else expected_output(
                ask.own + self.expected,
                12,
                10**6,
                rid,
                True,
                groups=groups,
                regime_limit=regime_limit,
                encoded=ask.encoded,
            )
        )
        self.output: list[int] = []
        self.prompt_scored: list[int] = []  # ids of the prompt positions whose log-probabilities arrived
        self.has_prompt_scores = False  # all of them arrived before the core was lost
        self.opened = False
        self.accepted = False
        self.resumed = 0
        self.end: str | None = None  # its terminal message
        self.has_left = False  # cancelled, or ended by a stop string: further output is dropped

    @property
    def is_open(self) -> bool:
        """Whether it waits for output."""
        return self.end is None

    @property
    def is_complete(self) -> bool:
        """Whether its grammar allows no further token."""
        return self.ask.constraint is not None and allowed_after(self.rid, self.output) == ()

    @property
    def size(self) -> int:
        """The most positions and tokens that serving it takes, for the bound on its wait. If its regime may change, all
        of it may be computed twice."""
        num_prompt = len(self.ask.own) + len(self.ask.encoded)
        return (num_prompt + self.max_tokens + 1) * (1 + self.is_twice_as_long)

    def hear_tokens(self, tokens: Tokens) -> None:
        """Output of the core with its log-probabilities and end."""
        self.hear_ids(bytes_to_ids(tokens.ids))
        if tokens.logprobs is not None:
            assert tokens.logprobs.ids == tokens.ids, f"{self.rid}: log-probabilities of other tokens"
        if tokens.prompt_logprobs is not None:
            self.prompt_scored += bytes_to_ids(tokens.prompt_logprobs.ids)
            due = self.ask.prompt[1 : 1 + len(self.prompt_scored)]
            assert self.prompt_scored == due, f"{self.rid}: prompt log-probabilities out of place"
        if tokens.finish is None:
            return
        self.end = tokens.finish
        assert tokens.usage is not None and tokens.usage.num_output == len(self.output), f"{self.rid}: usage is wrong"
        if not self.has_left:
            assert tokens.finish != "abort", f"{self.rid}: aborted without a cancel"
            assert self.output == self.expected, f"{self.rid}: ended with {self.output}, not {self.expected}"
            is_stop = bool(self.output) and (
                self.output[-1] in self.ask.stop_token_ids
                or (self.output[-1] == EOS and not self.ask.ignore_eos)
                or (self.is_complete and len(self.output) < self.max_tokens)
            )
            assert (tokens.finish == "stop") == is_stop, f"{self.rid}: {tokens.finish} is the wrong finish reason"
            if self.ask.prompt_logprobs is not None and not self.has_prompt_scores:
                assert self.prompt_scored == self.ask.prompt[1:], f"{self.rid}: prompt log-probabilities are missing"

    def hear_ids(self, ids: Sequence[int]) -> None:
        """The next output tokens."""
        assert self.is_open, f"{self.rid}: a message after the terminal message"
        assert self.opened or not ids, f"{self.rid}: tokens before it was opened"
        self.output += ids
        assert self.output == self.expected[: len(self.output)], f"{self.rid}: got {self.output}, not {self.expected}"

    def hear_failed(self, failed: Failed) -> None:
        """The request has failed. Only some reasons are allowed."""
        assert self.is_open, f"{self.rid}: failed after the terminal message"
        is_too_large = "memory" in failed.detail
        kinds = {"queue_full": True, "unavailable": self.ask.queue_timeout_s is not None}
        kinds |= {"internal": self.fails or self.grammar_fails, "invalid_request": not self.accepted}
        if is_too_large:
            kinds = {"unavailable": self.may_be_too_large}
        assert failed.kind != "unavailable" or not self.opened or is_too_large, (
            f"{self.rid}: expired although it was started"
        )
        assert kinds.get(failed.kind, False), f"{self.rid}: failed without a reason: {failed}"
        self.end = failed.kind


class Journal:
    """Every client, by rid. Takes the core's messages, and knows the requests that a new core must resume."""

    def __init__(self, oracle: Oracle) -> None:
        self.clients: dict[int, Client] = {}
        self._oracle = oracle

    def add(self, client: Client) -> None:
        """Adds a client whose request is about to be sent."""
        self.clients[client.rid] = client
        ask = client.ask
        self._oracle.learn(ask.own + client.expected + client.beyond, ask.salt, ask.encoded)
        if client.fails:  # no KV computed after the bad step may be cached
            client.expected = []

    def hear_answers(self, answers: list[Accepted | Failed]) -> None:
        """The core's answers to an `Enqueue`."""
        for answer in answers:
            client = self.clients[answer.rid]
            if isinstance(answer, Accepted):
                assert answer.num_prompt == len(client.ask.prompt)
                client.accepted = True
            else:
                assert not client.accepted or client.resumed, f"{answer.rid}: refused after it was accepted"
                client.hear_failed(answer)

    def hear(self, item: Opened | TokenBatch | Failed) -> list[int]:
        """One message of output. Returns the rids that got tokens."""
        if isinstance(item, Opened):
            client = self.clients[item.rid]
            assert not client.opened, f"{item.rid}: opened twice"
            assert item.num_prompt == len(client.ask.prompt) and item.num_cached <= item.num_prompt
            client.opened = True
            return []
        if isinstance(item, Failed):
            self.clients[item.rid].hear_failed(item)
            return []
        rids: list[int] = []
        assert 2 * len(item.ids) == len(item.rids), "the columns differ in length"
        for rid, data in item.columns():
            self.clients[rid].hear_ids(bytes_to_ids(data))
            rids.append(rid)
        for tokens in item.tokens:
            self.clients[tokens.rid].hear_tokens(tokens)
            rids.append(tokens.rid)
        assert len(set(rids)) == len(rids), "a request is in a batch twice"
        return rids

    def resume(self) -> list[Enqueue]:
        """The requests that a new core must resume. A client that has left is not among them."""
        messages = []
        for client in self.clients.values():
            if not client.is_open:
                continue
            if client.has_left:
                client.end = "abort"
                continue
            client.opened = False
            # Its grammar may end a resumed request before the step that would compute them again.
            client.has_prompt_scores |= client.prompt_scored == client.ask.prompt[1:]
            client.prompt_scored = []
            client.resumed += 1
            messages.append(client.ask.message(client.rid, resume_ids=client.output))
        return messages
