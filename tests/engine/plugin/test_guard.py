"""A runner plugin is called with the rows, tokens and logits of a step, and its errors fail the rows they belong to."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.engine.models.layers import LayerSpan
from pagewire.engine.models.program import View
from pagewire.engine.parallel.collectives import Alone
from pagewire.engine.plugin.base import LogitsRow, PluginStep, RunnerPlugin, SharedKv
from pagewire.engine.plugin.guard import PluginGuard, Report
from pagewire.errors import RequestError
from pagewire.ipc.messages import RowFailure, RowOpen, Sampling, ids_to_bytes

HIDDEN, VOCAB, LAYERS = 4, 8, 3
SPANS = tuple(LayerSpan(i, i, i + 1, View(0, 0, HIDDEN), View(0, 0, HIDDEN), i == 2) for i in range(LAYERS))


class Recorder(RunnerPlugin):
    """Does what the arguments of a row ask for: raises at a point, adds to hidden states, skips layers."""

    api_version = 1
    shared_kv: ClassVar[SharedKv] = "equal args"

    def __init__(self) -> None:
        super().__init__({})
        self.seen: list[tuple[str, list[int]]] = []  # point and rids

    def layers_to_skip(self, args: Mapping[str, object]) -> Collection[int]:
        if args.get("raises") == "layers_to_skip":
            raise RuntimeError
        found = args.get("skips", [])
        assert isinstance(found, list)
        return found

    def before_step(self, step: PluginStep) -> None:
        self._see("before_step", step)
        for row in step.rows:
            assert step.positions[row.first : row.last].tolist() == [
                *range(row.start, row.start + row.last - row.first)
            ]
            assert step.ids[row.first : row.last].tolist() == row.ids[row.start :][: row.last - row.first].tolist()

    def after_layer(self, layer: int, hidden: Tensor, step: PluginStep) -> Tensor | None:
        self._see("after_layer", step)
        added = [row.args.get("adds", 0) for row in step.rows for _ in range(row.last - row.first)]
        if any(added):
            return hidden + torch.tensor(added)[:, None]
        return None

    def on_logits(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        self.seen.append(("on_logits", [each.row.rid for each in rows]))
        for own, each in zip(logits, rows, strict=True):
            own += each.position
            own[each.output_ids[-1:].tolist()] = -1
            self._raise("on_logits", each.row.args)

    def after_step(self, step: PluginStep, sampled: Sequence[Sequence[int]]) -> None:
        self._see("after_step", step)
        self.sampled = {row.rid: [*ids] for row, ids in zip(step.rows, sampled, strict=True)}

    def _see(self, point: str, step: PluginStep) -> None:
        self.seen.append((point, [row.rid for row in step.rows]))
        for row in step.rows:
            self._raise(point, row.args)

    @staticmethod
    def _raise(point: str, args: Mapping[str, object]) -> None:
        if args.get("raises") == point:
            raise ZeroDivisionError
        if args.get("refuses") == point:
            raise RequestError("invalid_request", "no such thing")


def opened(rid: int, row: int, args: bytes = b"") -> RowOpen:
    return RowOpen(row, ids_to_bytes([rid % VOCAB] * 5), 3, 0, b"", Sampling(extra_args=args), rid=rid)


class Ran:
    """What a step with three rows gave: rid 10 has one position, 11 three, 12 one. The rows 10 and 12 sample."""

    def __init__(self, guard: PluginGuard, *args: bytes) -> None:
        places, counts = np.array([4, 0, 2]), np.array([1, 3, 1])
        known = np.arange(60, dtype=np.int32).reshape(6, 10) % VOCAB
        num_ids = np.full(6, 5)
        guard.open([opened(10 + i, place, own) for i, (place, own) in enumerate(zip(places, args, strict=True))])
        starts = np.array([4, 0, 4])
        positions = torch.tensor([4, 0, 1, 2, 4])
        ids = torch.from_numpy(known[np.repeat(places, counts), positions.numpy()].astype(np.int64))
        guard.begin(1, places, np.array([2, 0, 1]), starts, counts, ids, positions, known, num_ids)
        self.hidden = []
        for layer in range(LAYERS):
            hidden = torch.zeros(5, HIDDEN)
            guard.after_layer(layer, hidden)
            self.hidden.append(hidden)
        self.skipping = [guard.skipping(layer) for layer in range(LAYERS)]
        self.logits = torch.zeros(2, VOCAB)
        guard.on_logits(self.logits, np.array([4, 2]), np.array([5, 5]))
        known[[4, 2], 5] = [6, 7]
        num_ids[[4, 2]] += 1
        self.report: Report = guard.end(known, num_ids)


def run(*args: bytes, plugin: RunnerPlugin | None = None, **options: Any) -> tuple[Recorder, Ran]:
    plugin = plugin or Recorder()
    guard = PluginGuard(plugin, "tests:Recorder", group=Alone(), spans=SPANS, **options)
    assert isinstance(plugin, Recorder)
    return plugin, Ran(guard, *args)


def test_every_point_sees_its_rows() -> None:
    plugin, ran = run(b"", b"", b"")
    everyone = [10, 11, 12]
    assert plugin.seen == [
        ("before_step", everyone), *[("after_layer", everyone)] * 3, ("on_logits", [10, 12]), ("after_step", everyone)
    ]  # fmt: skip
    assert ran.report == Report({}, 0, 0) and plugin.sampled == {10: [6], 11: [], 12: [7]}
    assert ran.logits[0].tolist() == [5, 5, 5, 5, -1, 5, 5, 5] and ran.logits[1].tolist() == [-1, *[5.0] * 7]


def test_hidden_states_are_changed_where_the_plugin_returns_others() -> None:
    _, ran = run(b"", b'{"adds": 2}', b"")
    assert ran.hidden[0][:, 0].tolist() == [0, 2, 2, 2, 0]


def test_states_that_any_request_may_find_are_not_changed() -> None:
    class Careless(Recorder):
        shared_kv = "all"

    _, ran = run(b"", b'{"adds": 2}', b"", plugin=Careless())
    assert ran.report.failed.keys() == {0} and not ran.hidden[0].any()


def test_a_result_of_another_shape_is_an_error_of_the_plugin() -> None:
    class Narrow(Recorder):
        def after_layer(self, layer: int, hidden: Tensor, step: PluginStep) -> Tensor | None:
            return hidden[:, 1:]

    _, ran = run(b"", b"", b"", plugin=Narrow())
    assert ran.report.failed.keys() == {0, 1, 2}


@pytest.mark.parametrize("point", ["before_step", "after_layer", "on_logits", "after_step", "layers_to_skip"])
def test_an_error_fails_its_row_alone(point: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others get what they would get without it."""
    plugin, ran = run(b'{"adds": 1}', b"", b'{"raises": "%s"}' % point.encode())
    detail = f"The runner plugin tests:Recorder has failed at {point} for this request."
    assert ran.report.failed == {1: RowFailure("internal", detail)}
    assert ran.report.num_failed_calls == (1 if point == "layers_to_skip" else 2)  # with the others, and alone
    assert all(hidden[:4, 0].tolist() == [1, 0, 0, 0] for hidden in ran.hidden)
    assert ran.logits[0].tolist() == [5, 5, 5, 5, -1, 5, 5, 5]
    assert "the runner plugin tests:Recorder has failed at " + point in caplog.text
    later = plugin.seen[plugin.seen.index((point, [12])) + 1 :] if point != "layers_to_skip" else plugin.seen
    assert not any(12 in rids for _, rids in later), "a row that has failed is shown to no point after that"


def test_a_refusal_is_the_clients_error_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    _, ran = run(b'{"refuses": "before_step"}', b"", b"")
    assert ran.report == Report({2: RowFailure("invalid_request", "no such thing")}, 0, 0) and not caplog.text


def test_rows_skip_layers() -> None:
    _, ran = run(b'{"skips": [0, 1]}', b'{"skips": [1]}', b'{"skips": [1]}')
    assert isinstance(ran.skipping[0], Tensor) and ran.skipping[0].tolist() == [0]
    assert ran.skipping[1] is True and ran.skipping[2] is False


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (b'{"skips": [3]}', "Layer 3 cannot be skipped: there are 3."),
        (b'{"skips": [-1]}', "Layer -1 cannot be skipped: there are 3."),
        (b'{"skips": ["a"]}', "Layer a cannot be skipped: there are 3."),
        (b'{"skips": [2]}', "Layer 2 cannot be skipped: other layers read its keys and values."),
    ],
)
def test_layers_that_cannot_be_skipped_are_refused(args: bytes, sentence: str) -> None:
    _, ran = run(b"", args, b"")
    assert ran.report.failed == {0: RowFailure("invalid_request", sentence)} and ran.skipping == [False] * 3


def test_a_slow_call_is_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Each look at the clock is 0.7 s after the one before; the second of a call with a warning is the 12th."""
    ticks = iter(range(1000))
    _, ran = run(b"", b"", b"", clock=lambda: 0.7 * next(ticks))
    assert ran.report.num_slow_calls == 0 and not caplog.text
    _, ran = run(b"", b"", b"", clock=lambda: 1.5 * next(ticks))
    assert ran.report.num_slow_calls == 9  # three rows, one step, three layers, logits, the end
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "tests:Recorder took 1.5 s at layers_to_skip" in caplog.text


class Ranks(Alone):
    """A group of two of which the other one says the opposite."""

    size = 2

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.stack((x, 1 - x))


def test_what_another_rank_fails_or_skips_fails_here() -> None:
    plugin = Recorder()
    ran = Ran(PluginGuard(plugin, "p", group=Ranks(), spans=SPANS), b"", b'{"skips": [1]}', b"")
    assert ran.skipping == [False] * 3, "ranks must run the same layers"
    assert {why.detail for why in ran.report.failed.values()} == {
        "The runner plugin p has failed on another rank for this request."
    }
    assert ran.report.failed.keys() == {0, 1, 2}


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The guard without one of its rules."""

    def break_it(patch: pytest.MonkeyPatch) -> None:
        if name == "logits are restored":
            patch.setattr(Tensor, "clone", lambda self: self)
        elif name == "each row is tried alone":

            def only_whole(self: PluginGuard, point: str, call: Any, rows: Any = None) -> None:
                rows = self._now().step.rows if rows is None else rows
                failure = self._try(point, lambda: call(rows))
                self._failed.update({row.rid: failure for row in rows if failure is not None})

            patch.setattr(PluginGuard, "_call", only_whole)

    return break_it


@pytest.mark.parametrize("rule", ["logits are restored", "each row is tried alone"])
def test_a_guard_without_a_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(rule)(monkeypatch)
    _, ran = run(b"", b"", b'{"raises": "on_logits"}')
    assert ran.logits[0].tolist() != [5, 5, 5, 5, -1, 5, 5, 5] or ran.report.failed.keys() != {1}
