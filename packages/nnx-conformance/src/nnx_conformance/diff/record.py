"""Read the records of a run: statistics by step, kind and name, of all ranks together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnx_base.box import Box
from nnx_conformance.diff.statistics import Statistic, total
from nnx_core.errors import NnxError

KINDS = ("output", "gradient", "clipped", "update", "buffer")
"""The kinds of recorded tensors, in the order in which a step computes them."""


class RecordError(NnxError):
    """A record is missing or incomplete."""


@dataclass(frozen=True)
class Piece:
    """The statistic of a box on a rank."""

    rank: int
    box: Box
    statistic: Statistic


@dataclass(frozen=True)
class Entry:
    """The statistic of a tensor in a step.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its element type.
        pieces: The boxes of every rank; empty if the tensor is None on every rank that has it.
        is_estimated: True for updates, whose norms follow from sketches.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    is_estimated: bool = False

    @cached_property
    def owners(self) -> dict[Box, Piece]:
        """The piece of the first rank with each box."""
        found: dict[Box, Piece] = {}
        for piece in self.pieces:
            found.setdefault(piece.box, piece)
        return found

    @cached_property
    def whole(self) -> Statistic | None:
        """The statistic of the whole tensor; None if the boxes do not cover it, or there is none."""
        found = total((piece.statistic for piece in self.owners.values()), is_estimated=self.is_estimated)
        expected = 1
        for extent in self.shape:
            expected *= extent
        if "complex" in self.dtype:
            expected *= 2
        return found if self.pieces and found.numel == expected else None

    def of_rank(self, rank: int) -> Statistic | None:
        """Return the statistic of the whole tensor with this rank's copies where it has some."""
        own = {piece.box: piece.statistic for piece in self.pieces if piece.rank == rank}
        if not own:
            return None
        copies = (own.get(box, piece.statistic) for box, piece in self.owners.items())
        return total(copies, is_estimated=self.is_estimated)

    @property
    def ranks(self) -> list[int]:
        """The ranks that hold a piece."""
        return sorted({piece.rank for piece in self.pieces})


@dataclass
class Step:
    """One step of a run.

    Attributes:
        rows: The digests of the samples, by rank.
        types: The element types of the batch.
        losses: The losses, by rank.
        draws: True if the step drew random numbers.
        rates: The options of the optimizers' groups, of rank zero.
        tensors: Entries by kind and name.
        form: ``whole``; ``partial`` if an error ended it; ``final`` for the weights after the last one.
    """

    form: str = "whole"
    rows: dict[int, list[str]] = field(default_factory=dict)
    types: str = ""
    losses: dict[int, list[float]] = field(default_factory=dict)
    draws: bool = False
    rates: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Entry]] = field(default_factory=dict)


@dataclass
class Run:
    """The record of a run.

    Attributes:
        directory: The directory with the records.
        name: The run's name, such as ``fsdp_auto@2``.
        shares: The number of each rank's share of the data, and of all shares.
        facts: Further facts from the header of rank zero.
        steps: The steps that every rank finished.
        error: The error that ended the run, with its rank; empty if none did.
    """

    directory: Path
    name: str
    shares: dict[int, tuple[int, int]]
    facts: dict[str, Any]
    steps: list[Step]
    error: str = ""

    def shares_once(self) -> dict[int, int]:
        """Return the first rank of each share of the data."""
        first: dict[int, int] = {}
        for rank, (index, _) in sorted(self.shares.items()):
            first.setdefault(index, rank)
        return first

    def loss(self, step: int) -> float | None:
        """Return the mean loss of a step over batches and shares."""
        losses = [self.steps[step].losses.get(rank, []) for rank in self.shares_once().values()]
        values = [value for of_rank in losses for value in of_rank]
        return sum(values) / len(values) if values else None

    def entries(self, step: int, kind: str) -> Mapping[str, Entry]:
        """Return the entries of a kind; updates follow from the weights before and after a step."""
        if kind != "update":
            return self.steps[step].tensors.get(kind, {})
        if step + 1 >= len(self.steps):
            return {}
        before, after = (self.steps[index].tensors.get("weight", {}) for index in (step, step + 1))
        return {name: _difference(after[name], before[name]) for name in before if name in after}

    @property
    def finished(self) -> int:
        """The number of steps that the run finished."""
        return sum(step.form == "whole" for step in self.steps)

    @property
    def begun(self) -> int:
        """The number of steps that the run began."""
        return sum(step.form != "final" for step in self.steps)


def _difference(after: Entry, before: Entry) -> Entry:
    earlier = {(piece.rank, piece.box): piece.statistic for piece in before.pieces}
    pieces = tuple(
        Piece(piece.rank, piece.box, piece.statistic.minus(earlier[piece.rank, piece.box]))
        for piece in after.pieces
        if (piece.rank, piece.box) in earlier
    )
    return Entry(after.shape, after.dtype, pieces, is_estimated=True)


def read_run(directory: Path, name: str) -> Run:
    """Read the records of all ranks in a directory.

    Raises:
        RecordError: There is no record, or a rank's is missing.
    """
    files = sorted(directory.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    lines = {int(path.stem.removeprefix("rank")): list(_lines(path)) for path in files}
    headers = {rank: found[0] for rank, found in lines.items() if found and "share" in found[0]}
    errors = [(line, rank) for rank in lines for line in lines[rank] if "error" in line]
    error, failed = min(errors, key=lambda each: each[0]["time"], default=({"error": "", "remedy": ""}, 0))
    if not headers:
        raise no_step(name, error["error"] or _last_words(directory), error["remedy"])
    first = headers[min(headers)]
    by_rank = {rank: [line for line in lines[rank] if "step" in line] for rank in headers}
    count = min(len(steps) for steps in by_rank.values()) if len(by_rank) == first["size"] else 0
    run = Run(
        directory,
        name,
        {rank: (header["share"][0], header["share"][1]) for rank, header in headers.items()},
        first,
        [_step({rank: steps[index] for rank, steps in by_rank.items()}) for index in range(count)],
        f"rank {failed}: {error['error']} {error['remedy']}".strip() if errors else "",
    )
    if not run.error and len(by_rank) < first["size"]:
        run.error = f"only {len(by_rank)} of {first['size']} ranks recorded"
    return run


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the process was killed while it wrote the last line
            return


def no_step(name: str, why: str, remedy: str = "") -> RecordError:
    """Return the error of a run that ended before its first step."""
    error = RecordError(
        f"the run {name} recorded no step{': ' + why.rstrip('.') if why else ''}.",
        remedy="Try this side alone, or pass `--keep DIR` and read the output of its ranks there.",
    )
    error.remedy = remedy or error.remedy
    return error


def _last_words(directory: Path) -> str:
    """Return the last line that a process of the run printed."""
    for path in sorted(directory.glob("output*.txt")):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return ""


def _step(by_rank: Mapping[int, Mapping[str, Any]]) -> Step:
    first = by_rank[min(by_rank)]
    step = Step(
        next((form for form in ("partial", "final") if form in first), "whole"),
        {rank: line["rows"] for rank, line in by_rank.items()},
        first["types"],
        {rank: line["losses"] for rank, line in by_rank.items()},
        any(line["draws"] for line in by_rank.values()),
        first["rates"],
    )
    for rank, line in by_rank.items():
        for kind, named in line["tensors"].items():
            entries = step.tensors.setdefault(kind, {})
            for name, described in named.items():
                if described is None:
                    entries.setdefault(name, Entry((), "", ()))
                    continue
                shape, dtype, boxes = described
                pieces = tuple(
                    Piece(rank, Box(tuple(offset), tuple(size)), Statistic.from_list(numbers))
                    for offset, size, numbers in boxes
                )
                before = entries.get(name)
                earlier = before.pieces if before is not None else ()
                entries[name] = Entry(tuple(shape), dtype, earlier + pieces)
    return step


@dataclass(frozen=True)
class Copies:
    """A tensor's values on the ranks of a run.

    Attributes:
        pieces: Rank, box and values.
        shape: The shape of the whole tensor.
    """

    pieces: tuple[tuple[int, Box, Tensor], ...]
    shape: tuple[int, ...]

    def of_rank(self, rank: int) -> Tensor:
        """Return the whole tensor in float64, with this rank's copies where it has some."""
        full = torch.zeros(self.shape, dtype=torch.float64)
        for _, box, values in sorted(self.pieces, key=lambda piece: (piece[0] == rank, -piece[0])):
            full[box.slices] = values.to(torch.float64)
        return full


def read_whole(directory: Path) -> dict[tuple[int, str, str], Copies]:
    """Read the tensors that a run recorded whole, by step, kind and name."""
    found: dict[tuple[int, str, str], Copies] = {}
    for path in sorted(directory.glob("whole*.pt")):
        rank = int(path.stem.removeprefix("whole"))
        for key, (shape, pieces) in torch.load(path, weights_only=True).items():
            step, kind, name = key
            placed = tuple((rank, Box(tuple(at), tuple(size)), values) for at, size, values in pieces)
            earlier = found.get((step, kind, name), Copies((), ()))
            found[step, kind, name] = Copies(earlier.pieces + placed, tuple(shape))
    return found
