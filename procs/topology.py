"""Which actor may send which messages to which other actor. This table is the architecture.

Each process connects only to the receivers in its rows. `python -m pagewire.procs.topology` prints the README's
diagram from it, and a test compares the table with the unions of messages that the mailboxes accept.
"""

from ..ipc import client_messages as c
from ..ipc import messages as m
from ..ipc.epochs import Link

ACTORS: dict[str, object] = {
    "worker": m.ToWorker,
    "core": m.ToCore,
    "grammar": m.ToGrammar,
    "tokenizer": m.ToTokenizer,
    "detokenizer": m.ToDetokenizer,
    "api": m.ToApi,
}
"""Name → the messages that its mailbox accepts, in the order of starting; stopping is in reverse order."""

EDGES: dict[tuple[str, str], tuple[type, ...]] = {
    ("api", "tokenizer"): (m.Submit, m.Cancel, m.Tokenize, m.Detokenize, m.Describe),
    ("api", "core"): (m.Sleep, m.Wake),
    ("tokenizer", "core"): (m.Enqueue, m.Cancel),
    ("tokenizer", "api"): (m.Failed, m.Tokenized, m.Detokenized, m.Described, m.Pulse),
    ("core", "worker"): (m.OpenCache, m.StepPlan, m.LateMasks, m.Sleep, m.Wake, m.ReadExperts, m.PlaceExperts),
    ("worker", "worker"): (m.Hidden, m.SampledIds),
    ("worker", "core"): (m.CacheOffer, m.StepResult, m.Transferred, m.Slept, m.ExpertLoad, m.WorkerUsage),
    ("core", "grammar"): (m.Constrain, m.Sampled),
    ("grammar", "core"): (m.Constrained, m.Masks),
    ("grammar", "api"): (m.Pulse,),
    ("core", "detokenizer"): (m.Opened, m.TokenBatch, m.Failed),
    ("core", "api"): (m.Accepted, m.Failed, m.Snapshot, m.Pulse, m.Slept),
    ("detokenizer", "api"): (m.TextBatch, m.Failed, m.Pulse),
    ("detokenizer", "core"): (m.StopHit,),
}

_TO_ALL = (m.Ping, m.Reset, m.Settings, m.Leave, m.Stop)

FROM_SUPERVISOR: dict[str, tuple[type, ...]] = {name: _TO_ALL for name in ACTORS} | {
    "api": (*_TO_ALL, m.Serve, m.Restored, m.Swapped, m.Vacate, m.ModelStates, m.Replaced)
}
"""What the supervisor may send to each actor; `Leave` comes from the supervisor of another launch."""

TO_SUPERVISOR: tuple[type, ...] = (
    m.Ready,
    m.Loading,
    m.Serving,
    m.Fault,
    m.Gap,
    m.Pong,
    m.Swap,
    m.Change,
    m.Vacated,
    m.Demand,
    m.Leave,
)
"""What every actor may send to the supervisor (`Serving`, `Swap`, `Change`, `Vacated` and `Demand` only the api;
`Leave` is passed on)."""

FROM_CLIENT: tuple[type, ...] = (c.Hello, c.Generate, m.Cancel, c.Ack, c.Bye)
TO_CLIENT: tuple[type, ...] = (c.Welcome, c.News, m.Snapshot, c.Goodbye)
"""What an `EngineClient` and the core may send each other, over a separate socket (`client_port.py`)."""

RENDEZVOUS = "ranks"
"""The key, among the addresses of actors, of the address where the ranks of a tensor-parallel group connect."""


def workers(num_ranks: int) -> tuple[str, ...]:
    """The names of the ranks' workers: worker, worker-1, worker-2 …"""
    return _several("worker", num_ranks)


def apis(num_apis: int) -> tuple[str, ...]:
    """The names of the processes that serve HTTP: api, api-1 …"""
    return _several("api", num_apis)


def names(num_ranks: int, num_apis: int) -> tuple[str, ...]:
    """All actors of an engine, in the order of starting."""
    others = (name for name in ACTORS if name not in ("worker", "api"))
    return (*workers(num_ranks), *others, *apis(num_apis))


def _several(kind: str, num: int) -> tuple[str, ...]:
    return (kind, *(f"{kind}-{index}" for index in range(1, num)))


def kind(name: str) -> str:
    """The key in `ACTORS` of the actor with that name, such as worker for worker-1."""
    return name.partition("-")[0]


def index(name: str) -> int:
    """The number of an actor among those of its kind; for a worker its rank."""
    return int(name.partition("-")[2] or 0)


def link(sender: str, receiver: str) -> Link:
    """Which epoch the messages between two actors are checked against."""
    kinds = {kind(sender), kind(receiver)}
    if "supervisor" in kinds:
        return Link.CONTROL
    return Link.DEVICE if kinds <= {"core", "worker"} else Link.CHAIN


def lost_with(name: str, num_ranks: int) -> tuple[str, ...]:
    """The actors to replace when this one dies. A rank cannot work without the others, and the ranks may be at
    different steps when their core dies, so all are replaced."""
    ranks = workers(num_ranks)
    if kind(name) == "worker":
        return ranks
    return (name, *ranks) if name == "core" and len(ranks) > 1 else (name,)


def receivers(sender: str, num_ranks: int, num_apis: int, num_stages: int = 1) -> tuple[str, ...]:
    """The actors that an actor may send to. Every worker sends the core a CacheOffer, and what it reports of itself;
    only the first of the last stage sends it results."""
    found = [receiver for source, receiver in EDGES if source == kind(sender)]
    if kind(sender) == "worker":
        found.remove("worker")
        if num_stages > 1:
            found.append(next_stage(sender, num_ranks, num_stages))
    elif "worker" in found:
        found += workers(num_ranks)[1:]
    if "api" in found:
        found += apis(num_apis)[1:]
    return (*found, "supervisor")


def next_stage(worker: str, num_ranks: int, num_stages: int) -> str:
    """The worker of the next stage that continues what this one has computed; after the last stage the one of the
    first, which is told the sampled ids."""
    return workers(num_ranks)[(index(worker) + num_ranks // num_stages) % num_ranks]


def picture() -> str:
    """The table as a Mermaid flowchart."""
    lines = ["flowchart LR", "    client([client]) -- HTTP, SSE --> api"]
    lines += [f"    {a} -- {', '.join(kind.__name__ for kind in kinds)} --> {b}" for (a, b), kinds in EDGES.items()]
    told, telling = (", ".join(kind.__name__ for kind in kinds) for kinds in (FROM_CLIENT, TO_CLIENT))
    lines += [f"    embedder([EngineClient]) -- {told} --> core", f"    core -- {telling} --> embedder"]
    lines += [
        "    supervisor -. starts, watches, replaces, stops .-> api & tokenizer & core & grammar & worker & detokenizer"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
