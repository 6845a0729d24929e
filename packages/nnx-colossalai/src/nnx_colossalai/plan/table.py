"""A plan as a text table: every chunk, what it holds where, what it moves, and why.

Layers that follow each other and are alike are one line. Owns the text; every number is from the cost model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from nnx_colossalai.plan.cost import footprint
from nnx_colossalai.plan.planner import Planned
from nnx_colossalai.plan.schedule import work
from nnx_colossalai.plan.spec import Group, Hardware, ModelSpec, Tier

__all__ = ["plan_table", "size_text", "summary"]

_HEAD = ("chunk", "tier", "elements", "device", "host", "moved/step", "why")
_LEFT = (0, 1, 6)
_ROOT = "(root)"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plan_table(spec: ModelSpec, hardware: Hardware, planned: Planned) -> str:
    """The table of a plan, for one rank, with its sums and predictions below.

    Args:
        spec: What was planned.
        hardware: Budgets that it was planned for.
        planned: The plan.
    """
    lines = [_HEAD, *(_row(spec, planned, run) for run in _runs(spec, planned))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    rows = [
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([rows[0], "-" * max(map(len, rows)), *rows[1:], "", summary(spec, hardware, planned)])


def summary(spec: ModelSpec, hardware: Hardware, planned: Planned) -> str:
    """Peak memory against the budgets, the time of a step, and what limits it; three lines."""
    peak = planned.memory.peak
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in peak.by_kind.items() if size)
    moment = {"step": "the step"}.get(peak.phase, f"the {peak.phase} of {peak.group or _ROOT}")
    elements = sum(group.numel for group in spec.groups)
    busy = {lane: seconds for lane, seconds in planned.busy.items() if seconds}
    limit = f", most of it {max(busy, key=lambda lane: busy[lane])}" if busy else ""
    return "\n".join(
        [
            f"{elements:,} elements in {len(spec.groups)} chunks on {spec.world_size} "
            f"rank{'s' * (spec.world_size > 1)}; predicted {_seconds(planned.seconds)} a step{limit}",
            f"device: {size_text(planned.memory.device)} of {size_text(hardware.device_bytes)} in {moment} "
            f"({kinds or 'nothing'})",
            f"host: {size_text(planned.memory.host)} of {size_text(hardware.host_bytes)}",
        ]
    )


def size_text(count: int) -> str:
    """A number of bytes for people.

    Example:
        >>> size_text(0), size_text(1023), size_text(3 * 2**30 // 2)
        ('0 B', '1023 B', '1.50 GiB')
    """
    size = float(count)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _runs(spec: ModelSpec, planned: Planned) -> Iterator[list[Group]]:
    """Chunks that follow each other, of one size and tier, with names that differ in numbers only."""

    def alike(group: Group) -> tuple[object, ...]:
        tier = planned.placement.tiers[group.name]
        return re.sub(r"\d+", "#", group.name), tier, group.numel, group.trainable

    for _, run in groupby(spec.groups, alike):
        yield list(run)


def _why(planned: Planned, group: Group) -> str:
    """The reason without the exact bytes beside the readable ones."""
    return re.sub(r" \(\d+ bytes\)", "", planned.reasons.get(group.name, ""))


def _row(spec: ModelSpec, planned: Planned, run: Sequence[Group]) -> tuple[str, ...]:
    tier = planned.placement.tiers[run[0].name]
    device, host, moved = (
        sum(column) for column in zip(*(_cost(spec, one, tier) for one in run), strict=True)
    )
    name = run[0].name or _ROOT
    name = name if len(run) == 1 else f"{name} to {run[-1].name} ({len(run)})"
    elements = f"{sum(group.numel for group in run):,}"
    frozen = sum(group.numel - group.trainable for group in run)
    why = _why(planned, run[0]) + (f"; {frozen:,} frozen" if frozen else "")
    return (name, tier.value, elements, *map(size_text, (device, host, moved)), why)


def _cost(spec: ModelSpec, group: Group, tier: Tier) -> tuple[int, int, int]:
    held, moving = footprint(spec, group, tier), work(spec, group, tier)
    return held.device + held.gradients, held.host, moving.to_device + moving.to_host
