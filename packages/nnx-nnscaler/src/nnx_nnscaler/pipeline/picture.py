"""Record the actions of each rank along a pipe, and draw them or the predicted schedule as SVG.

A `Timeline` measures actions, and writes a file in Chrome's trace event format for Perfetto and
``chrome://tracing``. An action lasts from the arrival of its inputs until its results exist, on the device's
own clock. So the gaps are waiting time. The first steps are not measured, because they compile programs and
allocate memory. `draw` shows the predicted schedule of a plan, and below it the actions of a file.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from nnx_base.ranks import control_group, gather_object, together
from nnx_core._torch_compat import when_backward_ends
from nnx_core.errors import NnxError
from nnx_nnscaler.plan.pipeline_plan import PipelinePlan, predicted
from nnx_nnscaler.plan.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    NAMES,
    WEIGHTS,
    Action,
    Span,
    waiting_share,
)

log = logging.getLogger("nnx.nnscaler")

_LEFT, _TOP, _WIDTH, _ROW, _GAP = 72, 50, 840, 34, 10
_COLORS = {
    FORWARD: ("#bbdefb", "#64b5f6", "#1e88e5"),
    BACKWARD: ("#c8e6c9", "#81c784", "#43a047"),
    INPUTS: ("#b2dfdb", "#4db6ac", "#00897b"),
    WEIGHTS: ("#ffe0b2", "#ffb74d", "#fb8c00"),
}
"""Colors that get darker for each further stage of a rank."""
_DIGIT = 8
"""The width of a digit, and of the margin of a number."""
WARMUP = 3
"""The number of steps before the measured ones."""
MEASURED = 3
"""The number of measured steps."""
_TRACE = "nnx pipeline"


class Timeline:
    """Measures this rank's actions in a few steps, and writes those of all ranks. Construction is collective.

    Args:
        path: The file to write.
        device: The device whose clock counts.

    Attributes:
        measures: True while actions are recorded.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self.measures = False
        self._path = Path(path)
        self._clock = _Clock(device)
        self._group = control_group()
        self._step = -1
        self._marks: list[tuple[int, Action, Any, Any]] = []
        self._open: tuple[Action, Any] | None = None
        self._is_written = False
        with together(self._group, doing="opening timeline_file"):
            if self._rank == 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("a").close()

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    def begin_step(self) -> None:
        """Begin a training step. Collective in the first measured step, and in the one after the last."""
        self._step += 1
        self.measures = WARMUP <= self._step < WARMUP + MEASURED
        if self._step == WARMUP:
            dist.barrier(self._group)
            self._clock.start()
        if self._step == WARMUP + MEASURED:
            self.finish()

    def finish(self) -> None:
        """Write the measurements, once. Collective."""
        if 0 <= self._step < WARMUP and self._rank == 0:
            log.warning(f"timeline: {self._path} is empty ({self._step + 1} steps, measured after {WARMUP})")
        if self._is_written or self._step < WARMUP:
            return
        self._is_written, self.measures = True, False
        spans = [
            Span(self._rank, action, self._clock.seconds(start), self._clock.seconds(stop), step)
            for step, action, start, stop in self._marks
        ]
        self._marks.clear()
        found = gather_object((socket.gethostname(), self._clock.zero, spans), self._group)
        with together(self._group, doing="writing timeline_file"):
            if found is not None:
                _write(self._path, [span for one in _on_one_clock(found) for span in one])

    @contextmanager
    def during(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Context manager that measures an action."""
        self._begin(Action(kind, stage, microbatch))
        yield
        self._end()

    def during_backward(self, kind: str, stage: int, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Measure autograd's work from the first gradient of outputs until autograd starts other work."""
        recorded = [tensor for tensor in outputs if tensor.grad_fn is not None]

        def begin(gradient: Tensor) -> None:
            self._begin(Action(kind, stage, microbatch))
            when_backward_ends(self._end)

        if recorded:
            register_multi_grad_hook(recorded, begin, mode="any")

    def ends_before(self, messages: Sequence[Tensor]) -> None:
        """End a measurement when autograd reaches these messages, where it waits for other ranks."""
        for node in {tensor.grad_fn for tensor in messages if tensor.grad_fn is not None}:
            node.register_prehook(lambda *unused: self._end())

    def _begin(self, action: Action) -> None:
        self._end()
        self._open = action, self._clock.now()

    def _end(self) -> None:
        if self._open is not None:
            self._marks.append((self._step, *self._open, self._clock.now()))
            self._open = None


class _Clock:
    """A device's clock, in seconds of the host's clock.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: Any = None
        self.zero = 0.0

    def start(self) -> None:
        """Read both clocks at the same time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._first = self.now()
        self.zero = time.perf_counter()

    def now(self) -> Any:
        """Return a mark on the clock."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark."""
        if self._first is None:
            return float(mark)
        mark.synchronize()
        return self.zero + float(self._first.elapsed_time(mark)) / 1e3


def _on_one_clock(found: Sequence[tuple[str, float, list[Span]]]) -> Iterator[list[Span]]:
    """Convert all spans to the first rank's clock.

    Ranks of one host share a clock. Ranks of other hosts passed a barrier at the same time.
    """
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
        kind, stage, microbatch = span.action
        events.append(
            {
                "ph": "X",
                "name": f"{kind}{microbatch}, stage {stage}",
                "cat": kind,
                "pid": span.rank,
                "tid": 0,
                "ts": (span.start - begin) * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": {**span.action._asdict(), "step": span.step},
            }
        )
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made by": _TRACE}}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document), encoding="utf-8")
    part.replace(path)


def read_timeline(path: str | Path) -> list[Span]:
    """Read the actions of a file.

    Args:
        path: A file of a run.

    Raises:
        NnxError: The file is no timeline, or has no actions.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        spans = [_span(event) for event in found["traceEvents"] if event["ph"] == "X"]
    except (ValueError, KeyError, TypeError) as error:
        raise NnxError(
            f"{path} is not a timeline: {type(error).__name__}: {error}.",
            remedy=f"Pass the file of timeline_file, after a run of more than {WARMUP} steps.",
        ) from None
    if not spans:
        raise NnxError(
            f"{path} has no actions: no forward ran in stages.",
            remedy="Read the log, which says why a forward falls back to eager.",
        )
    return spans


def _span(event: Mapping[str, Any]) -> Span:
    start, args = event["ts"] / 1e6, event["args"]
    action = Action(args["kind"], args["stage"], args["microbatch"])
    return Span(event["pid"], action, start, start + event["dur"] / 1e6, args["step"])


def measured(timeline: str | Path) -> tuple[list[Span], str]:
    """Return the actions of the last step of a timeline, from its start, with a title.

    Args:
        timeline: A file of the option ``timeline_file``.

    Raises:
        NnxError: The file is no timeline, or has no actions.
    """
    spans = read_timeline(timeline)
    last = max(span.step for span in spans)
    spans = [span for span in spans if span.step == last]
    begin = min(span.start for span in spans)
    spans = [span._replace(start=span.start - begin, stop=span.stop - begin) for span in spans]
    return spans, f"measured: step {last + 1}"


def draw(plan: PipelinePlan, schedule: str | None = None, *, timeline: str | Path | None = None) -> str:
    """Draw the predicted schedule of a plan as SVG: a row for each rank, a box for each stage and microbatch.

    Args:
        plan: The plan. The forward pass counts as a third of a stage's predicted time.
        schedule: The name of the schedule; by default the plan's own.
        timeline: A file of the option ``timeline_file``, whose last step is drawn below.

    Raises:
        NnxError: The schedule or the file cannot be drawn, for the reason in the message.
    """
    schedule = schedule or plan.schedule
    spans = predicted(plan, schedule)
    stages, ranks = plan.arrangement.stages, plan.arrangement.ranks
    title = f"{schedule}, predicted: {stages} stages on {ranks} ranks, {plan.microbatches} microbatches"
    return _page([(spans, title)] if timeline is None else [(spans, title), measured(timeline)])


def _page(charts: Sequence[tuple[Sequence[Span], str]]) -> str:
    """Return a page with charts one below the other."""
    width, height = _LEFT + _WIDTH + 20, 0
    lines, heads = [], []
    for spans, title in charts:
        ranks, total = 1 + max(span.rank for span in spans), max(span.stop for span in spans)
        heads.append(f"{title}; {total * 1e3:.3g} ms, of which a rank waits {waiting_share(spans):.0%}")
        lines += [f'<g transform="translate(0 {height})">', *_chart(spans, heads[-1], ranks, total), "</g>"]
        height += _TOP + ranks * (_ROW + _GAP) + 36
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img">',
        f"<title>{escape('. '.join(heads))}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def _chart(spans: Sequence[Span], head: str, ranks: int, total: float) -> list[str]:
    """Return a chart: a line of text, and a row for each rank."""
    stages = [sorted({span.action.stage for span in spans if span.rank == rank}) for rank in range(ranks)]
    lines = [f'<text x="{_LEFT}" y="28">{escape(head)}</text>']
    for rank in range(ranks):
        y = _TOP + rank * (_ROW + _GAP)
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 22}" text-anchor="end">rank {rank}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#f5f5f5"/>')
    lines += [_box(span, stages[span.rank].index(span.action.stage), _WIDTH / total) for span in spans]
    kinds = {span.action.kind for span in spans}
    y = _TOP + ranks * (_ROW + _GAP) + 10
    return lines + _legend(kinds, several=max(map(len, stages)) > 1, y=y)


def _box(span: Span, loop: int, scale: float) -> str:
    """Return a box, with the number of its microbatch if it fits; a tooltip shows the rest."""
    kind, stage, index = span.action
    x, y = _LEFT + span.start * scale, _TOP + span.rank * (_ROW + _GAP)
    width = (span.stop - span.start) * scale
    told = f"stage {stage}, microbatch {index}, {NAMES[kind]}: "
    told += f"{span.start * 1e3:.3g} to {span.stop * 1e3:.3g} ms"
    color = _COLORS[kind][min(loop, len(_COLORS[kind]) - 1)]
    box = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" stroke="#ffffff" fill="{color}"/>'
    if width >= _DIGIT * (len(str(index)) + 0.5):
        box += f'<text x="{x + width / 2:.2f}" y="{y + 22}" text-anchor="middle">{index}</text>'
    return f'<g class="{kind}"><title>{told}</title>{box}</g>'


def _legend(kinds: set[str], several: bool, y: int) -> list[str]:
    """Return the legend of the colors."""
    lines, x = [], _LEFT
    for kind in [kind for kind in NAMES if kind in kinds]:
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLORS[kind][0]}"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 12}">{NAMES[kind]}</text>')
        x += 50 + 8 * len(NAMES[kind])
    if several:
        lines.append(f'<text x="{x}" y="{y + 12}">darker: a further stage of the rank</text>')
    return lines
