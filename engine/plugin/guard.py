"""Calls a runner plugin at its points, and keeps its errors from any request but those that they belong to.

An answer never comes without what the plugin was to do: a request for which a call fails gets an error, and no error
turns the plugin off. A call that never returns cannot be handled; one that takes long is named in the log.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import RequestError
from ...ipc.messages import RowFailure, RowOpen
from ..models.layers import LayerSpan
from ..parallel.collectives import Group
from .base import LogitsRow, PluginRow, PluginStep, RunnerPlugin

log = logging.getLogger("pagewire.plugin")

SLOW_S = 1.0
"""A call that takes longer is named in the log and counted."""

_WARN_EVERY_S = 60.0
_MOST_TRACEBACKS = 10  # in the log; later errors are only counted
_POINTS = ("layers_to_skip", "before_step", "after_layer", "on_logits", "after_step")
_CPU = torch.device("cpu")
_NO_ARGS: Mapping[str, object] = MappingProxyType({})


LAYER_POINTS = frozenset({"layers_to_skip", "after_layer"})


def points_of(plugin: RunnerPlugin) -> frozenset[str]:
    """The points that a plugin overrides, of those that are called in steps."""
    return frozenset(each for each in _POINTS if getattr(type(plugin), each) is not getattr(RunnerPlugin, each))


class Report(NamedTuple):
    """What a step says of the plugin."""

    failed: dict[int, RowFailure]  # index into the plan's rows
    num_failed_calls: int  # since the last report
    num_slow_calls: int


NOTHING = Report({}, 0, 0)


@dataclass
class _Open:
    """The request that holds a row of the worker."""

    rid: int
    args: Mapping[str, object]
    num_prompt: int
    skips: frozenset[int] = frozenset()  # layers
    failure: RowFailure | None = None  # of `layers_to_skip`


@dataclass(frozen=True)
class _Running:
    """The step under way. All but the first are by row of the step."""

    step: PluginStep
    places: tuple[int, ...]  # the worker's rows
    order: tuple[int, ...]  # index into the plan's rows
    num_ids: tuple[int, ...]  # known before the step


class PluginGuard:
    """One plugin in one worker; a `LayerHook` of the executor. The order of calls: `open`, `begin`, those of the
    executor, `on_logits`, `end`."""

    def __init__(
        self, plugin: RunnerPlugin, name: str, *, group: Group, spans: Sequence[LayerSpan] = (),
        device: torch.device = _CPU, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """name: for messages. spans: of all layers, if the plugin has a point of `LAYER_POINTS`. device:
        on which ranks exchange tensors."""
        self._plugin, self._name, self._spans, self._clock = plugin, name, spans, clock
        self._group, self._device = group, device
        self._points = points_of(plugin)
        self.skips_layers = "layers_to_skip" in self._points
        self.edits_logits = "on_logits" in self._points
        self._rows: dict[int, _Open] = {}  # by the worker's row
        self._running: _Running | None = None
        self._failed: dict[int, RowFailure] = {}  # rid → of the step under way
        self._skipping: dict[int, Tensor | bool] = {}  # layer → tokens of the step under way, or all of them
        self._num_failed_calls = self._num_slow_calls = 0  # since the last report
        self._num_tracebacks = 0
        self._warned_at = float("-inf")
        self._is_closed = False

    @property
    def keys_by_args(self) -> bool:
        """Only requests with equal arguments may share cached KV."""
        return self._plugin.shared_kv == "equal args"

    def open(self, rows: Sequence[RowOpen]) -> None:
        """These requests get rows of the worker. All ranks call it with the same ones."""
        for row in rows:
            extra = row.sampling.extra_args
            args = MappingProxyType(msgspec.json.decode(extra)) if extra else _NO_ARGS
            opened = self._rows[row.row] = _Open(row.rid, args, row.num_prompt)
            if self.skips_layers:
                opened.failure = self._try("layers_to_skip", partial(self._skip, opened))
        if rows and self.skips_layers and self._group.size > 1:
            self._agree_on_skips([self._rows[row.row] for row in rows])

    def _skip(self, opened: _Open) -> None:
        asked = self._plugin.layers_to_skip(opened.args)
        for layer in asked:
            if not isinstance(layer, int) or not 0 <= layer < len(self._spans):
                raise RequestError("invalid_request", f"Layer {layer} cannot be skipped: there are {len(self._spans)}.")
            if self._spans[layer].is_read_elsewhere:
                detail = f"Layer {layer} cannot be skipped: other layers read its keys and values."
                raise RequestError("invalid_request", detail)
        opened.skips = frozenset(asked)

    def _agree_on_skips(self, opened: Sequence[_Open]) -> None:
        """Ranks that ran different layers would wait for each other for ever."""
        own = torch.zeros((len(opened), len(self._spans)), device=self._device)
        for row, each in enumerate(opened):
            own[row, list(each.skips)] = 1
        of_ranks = self._group.all_gather(own)
        for row, each in enumerate(opened):
            if not (of_ranks[:, row] == own[row]).all():
                each.skips = frozenset()
                each.failure = each.failure or self._elsewhere()

    def begin(
        self,
        number: int,
        places: NDArray[np.int64],
        order: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        ids: Tensor,
        positions: Tensor,
        known: NDArray[np.int32],
        num_ids: NDArray[np.int64],
    ) -> None:
        """A step begins. By row of the step: places: the worker's rows; order: index into the plan's rows; starts,
        counts: positions. ids, positions: [tokens]. known: the ids of each of the worker's rows; num_ids: how many of
        them are known, without draft tokens."""
        self._failed = {}
        rows, first = [], 0
        for place, start, count in zip(places.tolist(), starts.tolist(), counts.tolist(), strict=True):
            opened = self._rows[place]
            own = known[place, : max(int(num_ids[place]), start + count)]
            own.flags.writeable = False
            rows.append(
                PluginRow(
                    rid=opened.rid, args=opened.args, first=first, last=first + count, start=start,
                    num_prompt=opened.num_prompt, ids=own,
                )
            )  # fmt: skip
            first += count
            if opened.failure is not None:
                self._failed[opened.rid] = opened.failure
        step = PluginStep(number=number, rows=tuple(rows), ids=ids, positions=positions)
        self._running = _Running(step, tuple(places.tolist()), tuple(order.tolist()), tuple(num_ids[places].tolist()))
        self._skipping = self._to_skip(rows, [self._rows[place].skips for place in places.tolist()])
        if "before_step" in self._points:
            self._call("before_step", lambda some: self._plugin.before_step(self._of(some)))

    def _to_skip(self, rows: Sequence[PluginRow], skips: Sequence[frozenset[int]]) -> dict[int, Tensor | bool]:
        found: dict[int, Tensor | bool] = {}
        for layer in frozenset().union(*skips):
            some = [row for row, own in zip(rows, skips, strict=True) if layer in own]
            found[layer] = (
                True if len(some) == len(rows) else torch.cat([torch.arange(row.first, row.last) for row in some])
            )
        return found

    def skipping(self, layer: int) -> Tensor | bool:
        """As in `LayerHook`."""
        return self._skipping.get(layer, False)

    def after_layer(self, layer: int, hidden: Tensor) -> None:
        """As in `LayerHook`."""
        if "after_layer" not in self._points:
            return

        def call(rows: Sequence[PluginRow]) -> None:
            own = hidden[rows[0].first : rows[-1].last]
            found: object = self._plugin.after_layer(layer, own, self._of(rows))
            if found is None:
                return
            if not isinstance(found, Tensor) or found.shape != own.shape:
                raise TypeError(f"after_layer returned {type(found).__name__}, not a tensor {list(own.shape)}")
            if self._plugin.shared_kv == "all":
                raise TypeError('after_layer changes hidden states, so shared_kv must not be "all"')
            own.copy_(found)

        self._call("after_layer", call)

    def on_logits(self, logits: Tensor, places: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """logits: [samples, vocab_size] float32, changed in place. places, ends: [samples] the worker's row of each,
        and the position of the token; the samples of a row follow each other."""
        running = self._now()
        row_of = dict(zip(running.places, running.step.rows, strict=True))
        about = [LogitsRow(row=row_of[p], position=end) for p, end in zip(places.tolist(), ends.tolist(), strict=True)]
        samples: dict[int, slice] = {}
        first = 0
        for rid, group in groupby(about, key=lambda each: each.row.rid):
            samples[rid] = slice(first, first := first + len(list(group)))
        rows = [row for row in running.step.rows if row.rid in samples]
        before = logits.clone() if len(rows) > 1 else None  # for the rows of a call that fails

        def call(some: Sequence[PluginRow]) -> None:
            if len(some) == len(rows):
                self._plugin.on_logits(logits, about)
                return
            own = samples[some[0].rid]
            if before is not None:
                logits[own] = before[own]
            self._plugin.on_logits(logits[own], about[own])

        self._call("on_logits", call, rows)

    def end(self, known: NDArray[np.int32], num_ids: NDArray[np.int64]) -> Report:
        """The step has sampled. known, num_ids: as in `begin`, with the tokens that were sampled."""
        running = self._now()
        if "after_step" in self._points:
            new = {
                row.rid: known[place, before : num_ids[place]].tolist()
                for row, place, before in zip(running.step.rows, running.places, running.num_ids, strict=True)
            }
            self._call("after_step", lambda some: self._plugin.after_step(self._of(some), [new[r.rid] for r in some]))
        self._running = None
        rids = [row.rid for row in running.step.rows]
        if self._group.size > 1:
            own = torch.tensor([float(rid in self._failed) for rid in rids], device=self._device)
            for rid, is_failed in zip(rids, self._group.all_gather(own).amax(0).tolist(), strict=True):
                if is_failed:
                    self._failed.setdefault(rid, self._elsewhere())
        failed = {
            place: self._failed[rid] for place, rid in zip(running.order, rids, strict=True) if rid in self._failed
        }
        report = Report(failed, self._num_failed_calls, self._num_slow_calls)
        self._num_failed_calls = self._num_slow_calls = 0
        return report

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._try("close", self._plugin.close)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _call(
        self, point: str, call: Callable[[Sequence[PluginRow]], None], rows: Sequence[PluginRow] | None = None
    ) -> None:
        """Calls a point with these rows of the step (default: all). If that fails, each row is tried alone, so that
        only the requests fail for which it fails. Those that have failed are left out."""
        rows = self._now().step.rows if rows is None else rows
        alive = [row for row in rows if row.rid not in self._failed]
        if len(alive) == len(rows):
            failure = self._try(point, lambda: call(rows))
            if failure is None:
                return
            if len(rows) == 1:
                self._failed[rows[0].rid] = failure
                return
        for row in alive:
            if (failure := self._try(point, partial(call, [row]))) is not None:
                self._failed[row.rid] = failure

    def _try(self, point: str, call: Callable[[], None]) -> RowFailure | None:
        started = self._clock()
        try:
            call()
        except RequestError as error:
            return RowFailure(error.kind, str(error))
        except Exception:  # the operator's code: the log has the error, and the requests of the call fail
            self._num_failed_calls += 1
            if self._num_tracebacks < _MOST_TRACEBACKS:
                self._num_tracebacks += 1
                log.exception("the runner plugin %s has failed at %s", self._name, point)
            return RowFailure("internal", f"The runner plugin {self._name} has failed at {point} for this request.")
        finally:
            self._note_time(point, started)
        return None

    def _note_time(self, point: str, started: float) -> None:
        now = self._clock()
        if now - started <= SLOW_S:
            return
        self._num_slow_calls += 1
        if now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "the runner plugin %s took %.1f s at %s, and all requests wait", self._name, now - started, point
            )

    def _of(self, rows: Sequence[PluginRow]) -> PluginStep:
        """The step, or the part of it that is about one row."""
        step = self._now().step
        if len(rows) == len(step.rows):
            return step
        (row,) = rows
        own, tokens = replace(row, first=0, last=row.last - row.first), slice(row.first, row.last)
        return replace(step, rows=(own,), ids=step.ids[tokens], positions=step.positions[tokens])

    def _now(self) -> _Running:
        assert self._running is not None, "no step is under way"
        return self._running

    def _elsewhere(self) -> RowFailure:
        return RowFailure("internal", f"The runner plugin {self._name} has failed on another rank for this request.")
