"""Random histories of the scheduler against a worker that would notice any mistake, and mutants that prove it would.

One history: random arrivals, cancels, stop hits, failing requests, preemptions, shared prefixes, depth 1 to 3. After
every call all invariants are asserted; at the end everything is free, and each request got exactly one terminal
message and the tokens that it would have got alone.
"""

import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
from fakes import EOS, FakeWorker, all_tokens, enqueue, expected_output
from invariants import check

from pagewire.engine.core.block_pool import BlockPool
from pagewire.engine.core.prefix import PrefixCache
from pagewire.engine.core.request import Request, State
from pagewire.engine.core.roster import Roster
from pagewire.engine.core.scheduler import Scheduler
from pagewire.ipc.messages import Accepted, Failed, Opened, TokenBatch, Tokens, bytes_to_ids

NUM_HISTORIES = 2000
BLOCK_SIZE = 4


class Client:
    """What one request asked for and what it has been told."""

    def __init__(self, prompt: list[int], max_tokens: int | None, seed: int, max_len: int, ignore_eos: bool) -> None:
        room = max_len - len(prompt)
        self.expected = expected_output(prompt, room if max_tokens is None else max_tokens, max_len, seed, ignore_eos)
        self.output: list[int] = []
        self.prompt_positions = 0
        self.opened = 0
        self.terminals: list[str] = []
        self.wanted = True  # False once its client or a stop string ended it


def run_history(seed: int) -> dict[str, int]:
    """One history. Returns what happened in it, so that the suite can prove that it covers what it claims."""
    rng = random.Random(seed)
    num_blocks = rng.randint(4, 24)
    cancel_rate = rng.choice([0.0, 0.002, 0.03])
    depth = rng.randint(1, 3)
    max_num_seqs = rng.randint(1, 8)
    max_tokens_per_step = rng.choice([1, 3, 8, 16, 64, 64])
    max_len = min(num_blocks * BLOCK_SIZE, rng.randint(8, 80))
    scheduler = Scheduler(
        pool=BlockPool(num_blocks=num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens_per_step,
        max_model_len=max_len,
        max_queued_requests=1000,
        max_queued_tokens=10**6,
        depth=depth,
        eos_token_ids=(EOS,),
        prefix_caching=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "priority", "fair"]),
        itl_target_ms=rng.choice([None, None, 0.5, 5.0]),
    )
    worker = FakeWorker(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens_per_step,
    )
    clients: dict[int, Client] = {}
    results: list = []
    stem = [rng.randrange(50) for _ in range(30)]
    stems = [stem, stem[:BLOCK_SIZE] + stem[2 * BLOCK_SIZE :]]  # equal blocks after unequal prefixes
    num_requests = rng.randint(1, 14)
    seen = {"cancelled": 0, "failed": 0, "in flight on cancel": 0}

    def arrive() -> None:
        rid = len(clients) + 1
        prompt = rng.choice(stems)[: rng.randint(0, 24)] + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        prompt = prompt[: max_len - 1]
        max_tokens = rng.choice([None, 0, 1, 2, 5, 20])
        ignore_eos = rng.random() < 0.3
        if rng.random() < 0.05:
            worker.fail_seeds.add(rid)
        clients[rid] = Client(prompt, max_tokens, rid, max_len, ignore_eos)
        message = enqueue(
            rid,
            prompt,
            max_tokens=max_tokens,
            seed=rid,
            priority=rng.randint(0, 2),
            tenant=rng.choice("ab"),
            ignore_eos=ignore_eos,
            salt=rng.choice([b"", b"", b"other"]),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )
        assert isinstance(scheduler.add(message)[0], Accepted)

    def hear() -> None:
        for item in scheduler.take_news():
            if isinstance(item, Opened):
                clients[item.rid].opened += 1
            elif isinstance(item, Failed):
                clients[item.rid].terminals.append("failed")
            else:
                assert isinstance(item, TokenBatch)
                for tokens in all_tokens(item):
                    client = clients[tokens.rid]
                    assert not client.terminals, "news after the terminal message"
                    client.output += bytes_to_ids(tokens.ids)
                    if tokens.prompt_logprobs is not None:
                        client.prompt_positions += len(tokens.prompt_logprobs.ids) // 4
                    if tokens.finish is not None:
                        client.terminals.append(tokens.finish)
                        assert tokens.usage is not None and tokens.usage.num_output == len(client.output)
                    assert client.output == client.expected[: len(client.output)], "a wrong token"

    for _ in range(5000):
        if len(clients) == num_requests and all(c.terminals for c in clients.values()) and not results:
            break
        action = rng.random()
        if action < 0.15 and len(clients) < num_requests:
            arrive()
        elif action < 0.15 + cancel_rate and clients:
            rid = rng.choice(list(clients))
            request = scheduler.roster.requests.get(rid)
            seen["in flight on cancel"] += request is not None and request.num_in_flight > 0
            seen["cancelled"] += request is not None
            clients[rid].wanted = False
            rng.choice([scheduler.cancel, scheduler.stop_hit])(rid)
        elif action < 0.6:
            plan = scheduler.plan()
            if plan is not None:
                results.append(worker.run(plan))
                assert len(results) <= depth
            elif not results and len(clients) < num_requests:
                arrive()
        elif results:
            scheduler.apply(results.pop(0))
        check(scheduler)
        hear()
    else:
        raise AssertionError("requests starve")
    hear()
    for rid, client in clients.items():
        assert len(client.terminals) == 1, (rid, client.terminals)
        if client.terminals[0] in ("stop", "length") and client.wanted:
            assert client.output == client.expected, rid
        seen["failed"] += client.terminals[0] == "failed"
        assert client.opened <= 1
    assert scheduler.num_in_flight == 0 and scheduler.num_running == 0 and scheduler.num_waiting == 0
    assert scheduler.pool.num_free == num_blocks, "blocks leaked"
    assert len(scheduler.roster.free_rows) == max_num_seqs, "rows leaked"
    seen["preempted"] = scheduler.counters.num_preemptions
    seen["cached"] = scheduler.counters.num_cached_tokens
    return seen


def test_random_histories_keep_every_invariant() -> None:
    total: dict[str, int] = {}
    for seed in range(NUM_HISTORIES):
        try:
            seen = run_history(seed)
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
        for name, count in seen.items():
            total[name] = total.get(name, 0) + count
    assert all(count >= 100 for count in total.values()), f"the histories no longer cover this: {total}"


def _leak_a_block(pool: BlockPool, blocks: list[int]) -> None:
    BlockPool_release(pool, blocks[1:])


def _release_in_flight(roster: Roster, request: Request, terminal: object) -> None:
    Roster_end(roster, request, terminal)  # type: ignore[arg-type]
    if request.row >= 0:
        roster._pool.release(request.blocks)
        roster.free_rows.append(request.row)


def _hold_nothing(pool: BlockPool, blocks: list[int]) -> None:
    """A prefix hit that forgets to take its reference."""


def _keys_without_parent(request: Request, num: int, block_size: int) -> list[bytes]:
    return [request.ids[i * block_size : (i + 1) * block_size].tobytes() for i in range(num)]


def _terminal_twice(roster: Roster, request: Request, terminal: object) -> None:
    Roster_end(roster, request, terminal)  # type: ignore[arg-type]
    (roster._news._tokens if isinstance(terminal, Tokens) else roster._news._items).append(terminal)  # type: ignore[arg-type]


def _terminal_never(roster: Roster, request: Request, terminal: object) -> None:
    Roster_end(roster, request, terminal)  # type: ignore[arg-type]
    (roster._news._tokens if isinstance(terminal, Tokens) else roster._news._items).pop()


def _commit_too_early(prefix: PrefixCache, request: Request) -> None:
    """Offers blocks to the index that no plan has filled."""
    full = len(request.ids) // BLOCK_SIZE
    for i, (block, key) in enumerate(zip(request.blocks, request.block_keys(full, BLOCK_SIZE), strict=False)):
        prefix._pool.register(block, key, i)


def _row_kept(roster: Roster, request: Request) -> None:
    row = request.row
    Roster_release(roster, request)
    if row >= 0 and request.state is State.ENDED:
        roster.free_rows.pop()


def _preempt_while_in_flight(roster: Roster, request: Request) -> None:
    """Frees a preempted request's blocks at once although the worker still writes to them."""
    roster._pool.release(request.blocks)
    request.blocks = []
    Roster_preempt(roster, request)


BlockPool_release = BlockPool.release
Roster_end = Roster.end
Roster_release = Roster.release
Roster_preempt = Roster.preempt

MUTANTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a block leaks": (BlockPool, "release", _leak_a_block),
    "a block is owned twice": (BlockPool, "hold", _hold_nothing),
    "row and blocks are reused in flight": (Roster, "end", _release_in_flight),
    "blocks of a preempted request are reused in flight": (Roster, "preempt", _preempt_while_in_flight),
    "a row leaks": (Roster, "release", _row_kept),
    "two terminal messages": (Roster, "end", _terminal_twice),
    "no terminal message": (Roster, "end", _terminal_never),
    "a key does not name the whole prefix": (Request, "block_keys", _keys_without_parent),
    "a block is found before it is computed": (PrefixCache, "commit", _commit_too_early),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_caught(name: str) -> None:
    owner, method, mutant = MUTANTS[name]
    with patch.object(owner, method, mutant), pytest.raises((AssertionError, KeyError, IndexError, TypeError)):
        for seed in range(300):
            run_history(seed)
