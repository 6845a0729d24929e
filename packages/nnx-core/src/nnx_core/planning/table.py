"""The result of a plan: one row for each strategy, as text and as plain data. Without torch."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import Any

from nnx_core.planning.estimate import Estimate, World

__all__ = ["Plan", "Row", "size_text"]

_TIGHT = 0.9
_WIDTH = 80


def size_text(nbytes: int) -> str:
    """Return a size in binary units.

    Example:
        >>> size_text(3 * 2**29), size_text(2**20), size_text(123)
        ('1.50 GiB', '1.0 MiB', '0.1 KiB')
    """
    for unit, size, digits in (("TiB", 2**40, 2), ("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if nbytes >= size:
            return f"{nbytes / size:.{digits}f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The plan of one strategy.

    Attributes:
        strategy: The name.
        status: ``"planned"``, ``"not installed"``, ``"no estimate"`` or ``"no plan"``.
        fits: ``"yes"``, ``"tight"`` (above nine tenths of the memory), ``"no"``, or empty without a limit.
        estimate: The predicted memory.
        missing: The bytes that are missing.
        largest_batch: The most samples of a device that fit; None without a limit, or if none depends on it.
        limit: The largest kind of memory at the peak, and its phase.
        cure: The cheapest cure, or the reason why there is no estimate.
    """

    strategy: str
    status: str = "planned"
    fits: str = ""
    estimate: Estimate | None = None
    missing: int = 0
    largest_batch: int | None = None
    limit: str = ""
    cure: str = ""

    @staticmethod
    def of(name: str, estimate: Estimate, larger: Estimate, size: int, memory: int | None) -> Row:
        """Return the row of an estimate.

        Args:
            name: The strategy.
            estimate: The memory with a batch of `size`.
            larger: The memory with a batch of twice the size.
            size: The number of samples of a device.
            memory: The memory of a device.
        """
        worst = estimate.worst
        row = Row(strategy=name, estimate=estimate, limit=f"{worst.largest}, {worst.name}")
        if memory is None:
            return row
        return replace(
            row,
            fits="no" if estimate.peak > memory else "tight" if estimate.peak > _TIGHT * memory else "yes",
            missing=max(estimate.peak - memory, 0),
            largest_batch=largest_batch(estimate, larger, size, memory),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return this row as plain data for JSON."""
        return {
            "strategy": self.strategy,
            "status": self.status,
            "fits": self.fits,
            "missing": self.missing,
            "largest_batch": self.largest_batch,
            "limit": self.limit,
            "cure": self.cure,
            "estimate": None if self.estimate is None else self.estimate.as_dict(),
        }


def largest_batch(estimate: Estimate, larger: Estimate, size: int, memory: int) -> int | None:
    """Return the most samples that fit, as each phase grows linearly with the batch; None if none grows."""
    found: list[int] = []
    for one, two in zip(estimate.phases, larger.phases, strict=True):
        slope = (two.peak - one.peak) / size
        if slope > 0:
            found.append(max(int(size + (memory - one.peak) // slope), 0))
        elif one.peak > memory:
            return 0
    return min(found, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plans of all strategies; its ``str`` is a table.

    Attributes:
        rows: The rows.
        world: The ranks.
        parameters: The number of elements of all parameters.
        batch_size: The number of samples of a device.
        precision: Lightning's precision string.
        optimizer: The class of the optimizer.
        source: ``"traced"`` or ``"formula"``.
        notes: Sentences for the user.
    """

    rows: tuple[Row, ...]
    world: World
    parameters: int
    batch_size: int
    precision: str
    optimizer: str
    source: str
    notes: tuple[str, ...] = ()

    def __getitem__(self, strategy: str) -> Row:
        """Return the row of a strategy."""
        return next(row for row in self.rows if row.strategy == strategy)

    def as_dict(self) -> dict[str, Any]:
        """Return this plan as plain data for JSON."""
        return {
            "devices": self.world.size,
            "nodes": self.world.nodes,
            "memory": self.world.memory,
            "accelerator": self.world.accelerator,
            "parameters": self.parameters,
            "batch_size": self.batch_size,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "source": self.source,
            "notes": list(self.notes),
            "strategies": [row.as_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        world = self.world
        limit = "" if world.memory is None else f" of {size_text(world.memory)}"
        lines = textwrap.wrap(
            f"{self.parameters:,} parameters, {self.optimizer}, {self.precision}, batch {self.batch_size} a "
            f"device, {world.size} x {world.accelerator}{limit}",
            _WIDTH,
        )
        planned = [row for row in self.rows if row.estimate is not None]
        width = max((len(row.strategy) for row in planned), default=8)
        lines.append(f"{'STRATEGY':{width}}  {'FITS':5}  {'PEAK':>10}  {'HOST':>9}  {'BATCH':>6}  LIMITED BY")
        for row in sorted(planned, key=lambda row: ("yes", "", "tight", "no").index(row.fits)):
            lines += _lines(row, width)
        for status in ("no estimate", "no plan", "not installed"):
            names = [row.strategy for row in self.rows if row.status == status]
            if names:
                lines += textwrap.wrap(f"{status}: {', '.join(names)}", _WIDTH, subsequent_indent="  ")
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)


def _lines(row: Row, width: int) -> list[str]:
    assert row.estimate is not None
    batch = "any" if row.largest_batch is None else f"{row.largest_batch}"
    host = size_text(row.estimate.host) if row.estimate.host else "-"
    peak = ("~" if row.estimate.bar > 0.05 else "") + size_text(row.estimate.peak)
    lines = [
        f"{row.strategy:{width}}  {row.fits or '-':5}  {peak:>10}  {host:>9}  "
        f"{batch if row.fits else '-':>6}  {row.limit}"
    ]
    if row.cure:
        missing = f"{size_text(row.missing)} missing: " if row.missing else ""
        lines += textwrap.wrap(
            f"{missing}{row.cure}", _WIDTH, initial_indent="    ", subsequent_indent="    "
        )
    return lines
