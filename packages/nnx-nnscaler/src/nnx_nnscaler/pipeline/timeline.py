"""What the ranks of a pipeline did when: a few steps of a run, measured and written as one file.

The file has the trace event format of Chrome, which Perfetto and ``chrome://tracing`` show and
`nnx_nnscaler.pipeline.picture` draws. An action is measured from when its inputs have arrived until its
results are there, on the device's own clock, so that what lies between is waiting. Nothing is measured
before the first steps are over, in which programs are compiled and memory is allocated.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from nnx_checkpoint.collective import control_group, gather_object, together
from nnx_core.errors import NnxError

log = logging.getLogger("nnx.nnscaler")

WARMUP = 3
"""Steps before those that are measured."""
MEASURED = 3
"""Steps that are measured."""
_TRACE = "nnx pipeline"


class Span(NamedTuple):
    """An action that was measured.

    Attributes:
        rank: The rank, in the world.
        step: The training step, from 0.
        kind: As of `nnx_nnscaler.pipeline.schedules.Action`.
        stage: The stage.
        microbatch: The microbatch.
        start: When it began, in seconds.
        stop: When it was done.
    """

    rank: int
    step: int
    kind: str
    stage: int
    microbatch: int
    start: float
    stop: float


class Timeline:
    """Measures this rank's actions in a few steps, and writes those of all ranks. Making it is collective.

    Args:
        path: The file to write.
        device: The device whose clock is looked at.

    Attributes:
        measures: True while actions are to be told.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self.measures = False
        self._path = Path(path)
        self._clock = _Clock(device)
        self._group = control_group()
        self._step = -1
        self._marks: list[tuple[int, str, int, int, Any, Any]] = []
        self._open: tuple[str, int, int, Any] | None = None
        self._is_written = False
        with together(self._group, doing="opening timeline_file"):
            if self._rank == 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("a").close()

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    # --- steps --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A training step begins. Collective in the first that is measured, and in the one after the last."""
        self._step += 1
        self.measures = WARMUP <= self._step < WARMUP + MEASURED
        if self._step == WARMUP:
            dist.barrier(self._group)
            self._clock.start()
        if self._step == WARMUP + MEASURED:
            self.finish()

    def finish(self) -> None:
        """Write what was measured, unless that was done. Collective."""
        if 0 <= self._step < WARMUP and self._rank == 0:
            log.warning(
                f"{self._path} stays empty: of {self._step + 1} steps the first {WARMUP} are not measured."
            )
        if self._is_written or self._step < WARMUP:
            return
        self._is_written, self.measures = True, False
        spans = [
            Span(self._rank, step, kind, stage, index, self._clock.seconds(start), self._clock.seconds(stop))
            for step, kind, stage, index, start, stop in self._marks
        ]
        self._marks.clear()
        found = gather_object((socket.gethostname(), self._clock.zero, spans), self._group)
        with together(self._group, doing="writing timeline_file"):
            if found is not None:
                _write(self._path, [span for one in _on_one_clock(found) for span in one])

    # --- actions ------------------------------------------------------------------------------

    @contextmanager
    def during(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Around an action."""
        self._begin(kind, stage, microbatch)
        yield
        self._end()

    def during_backward(self, kind: str, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Measure what autograd will do, from the first gradient of outputs until it does something else."""
        recorded = [tensor for tensor in outputs if tensor.grad_fn is not None]

        def begin(gradient: Tensor) -> None:
            self._begin(kind, stage, microbatch)
            Variable._execution_engine.queue_callback(self._end)

        if recorded:
            register_multi_grad_hook(recorded, begin, mode="any")

    def ends_before(self, messages: Sequence[Tensor]) -> None:
        """Autograd does something else when it comes to what made these: it waits for other ranks."""
        for node in {tensor.grad_fn for tensor in messages if tensor.grad_fn is not None}:
            node.register_prehook(lambda *unused: self._end())

    def _begin(self, kind: str, stage: int, microbatch: int) -> None:
        self._end()
        self._open = kind, stage, microbatch, self._clock.now()

    def _end(self) -> None:
        if self._open is not None:
            *action, start = self._open
            self._marks.append((self._step, *action, start, self._clock.now()))
            self._open = None


class _Clock:
    """A device's clock, in seconds of the host's.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: Any = None
        self.zero = 0.0

    def start(self) -> None:
        """Look at both clocks at once."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._first = self.now()
        self.zero = time.perf_counter()

    def now(self) -> Any:
        """A mark on the clock."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """When a mark was made."""
        if self._first is None:
            return float(mark)
        mark.synchronize()
        return self.zero + float(self._first.elapsed_time(mark)) / 1e3


# --- the file -------------------------------------------------------------------------------------


def _on_one_clock(found: Sequence[tuple[str, float, list[Span]]]) -> Iterator[list[Span]]:
    """All on the first rank's clock: ranks of one host share it, those of others left a barrier with it."""
    host, zero, _ = found[0]
    for other, its_zero, spans in found:
        shift = 0.0 if other == host else zero - its_zero
        yield [span._replace(start=span.start + shift, stop=span.stop + shift) for span in spans]


def _write(path: Path, spans: Sequence[Span]) -> None:
    begin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    for span in spans:
        action = {"kind": span.kind, "stage": span.stage, "microbatch": span.microbatch, "step": span.step}
        events.append(
            {
                "ph": "X",
                "name": f"{span.kind}{span.microbatch}, stage {span.stage}",
                "cat": span.kind,
                "pid": span.rank,
                "tid": 0,
                "ts": (span.start - begin) * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": action,
            }
        )
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made by": _TRACE}}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document), encoding="utf-8")
    part.replace(path)


def read_timeline(path: str | Path) -> list[Span]:
    """What a file has.

    Args:
        path: A file that a run has written.

    Raises:
        NnxError: It is no such file, or nothing was measured.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        spans = [_span(event) for event in found["traceEvents"] if event["ph"] == "X"]
    except (ValueError, KeyError, TypeError) as error:
        raise NnxError(
            f"{path} is not a timeline: {type(error).__name__}: {error}.",
            remedy=f"Pass what timeline_file named, when {WARMUP} steps and one more were over.",
        ) from None
    if not spans:
        raise NnxError(
            f"{path} has no actions: no forward ran in stages.",
            remedy="Look at the log, which says why a forward runs whole.",
        )
    return spans


def _span(event: Mapping[str, Any]) -> Span:
    start, args = event["ts"] / 1e6, event["args"]
    action = args["step"], args["kind"], args["stage"], args["microbatch"]
    return Span(event["pid"], *action, start, start + event["dur"] / 1e6)
