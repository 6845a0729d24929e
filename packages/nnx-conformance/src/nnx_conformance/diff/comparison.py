"""Find where two records begin to differ, by more than a float64 twin says that rounding can explain.

Within a step the order of comparison is that of computation: samples, weights, outputs, loss, gradients,
clipped gradients, updates, buffers. This module knows no kinds of faults.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from nnx_conformance.diff.record import KINDS, Entry, Run
from nnx_conformance.diff.statistics import Statistic

FACTOR = 12.0
"""A difference is a fault if it is this many times the rounding error of run a."""
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_OF_PRECISION = {"bf16": "bfloat16", "16-": "float16", "64-": "float64"}


@dataclass(frozen=True)
class Difference:
    """A tensor, or a loss, that differs.

    Attributes:
        name: Its name.
        size: The relative distance of the two runs.
        tolerance: The relative distance that is allowed.
        ratio: The factor of the second run's tensor to the first run's, if one explains it at all.
        ranks: The ranks of the second run whose values differ.
    """

    name: str
    size: float
    tolerance: float
    ratio: float = math.nan
    ranks: tuple[int, ...] = ()


@dataclass
class Finding:
    """The first difference.

    Attributes:
        step: The step, from 0.
        kind: ``rows``, ``weight``, ``output``, ``loss``, ``gradient``, ``clipped``, ``update`` or ``buffer``.
        differences: All differences of this kind in this step, in forward order.
        origin: The difference that is likely the first in time.
        loss: The difference of the loss, if it differs and all outputs agree.
    """

    step: int
    kind: str
    differences: list[Difference]
    origin: Difference
    loss: Difference | None = None


@dataclass
class Comparison:
    """The comparison of two runs.

    Attributes:
        steps: The number of steps that both runs began.
        finding: The first difference; None if the runs agree.
        table: The distance by kind, step and name, in multiples of the tolerance.
        largest: The largest relative distance within the tolerance, by kind.
        notes: Sentences about the comparison.
    """

    steps: int
    finding: Finding | None = None
    table: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def epsilon_of(precision: str, dtype: str = "float32") -> float:
    """Return the relative spacing of numbers in a precision such as ``bf16-mixed``."""
    name = next((value for key, value in _OF_PRECISION.items() if precision.startswith(key)), dtype)
    return max(_EPSILON.get(name, 2.0**-23), _EPSILON.get(dtype, 2.0**-23))


class Comparer:
    """Compares two runs.

    Args:
        a: The first run, the reference.
        b: The second run.
        twin: The float64 twin of the first; None allows some multiples of the precision's spacing.
        by_rank: True to compare each rank with the same rank, as of two runs of one side.
    """

    def __init__(self, a: Run, b: Run, twin: Run | None, *, by_rank: bool = False) -> None:
        self.a, self.b, self.twin, self._by_rank = a, b, twin, by_rank
        self.steps = min(a.begun, b.begun)
        self._order = _forward_order(twin or a, a)
        self._exact_losses = [] if twin is None else [twin.loss(step) for step in range(twin.finished)]
        # By chance the rounding errors of a step cancel in its loss, so the largest of all steps counts.
        pairs = zip(map(a.loss, range(a.begun)), self._exact_losses, strict=False)
        errors = (abs(x - y) / (abs(y) or 1.0) for x, y in pairs if x is not None and y is not None)
        self._loss_noise = max((error for error in errors if math.isfinite(error)), default=0.0)

    def compare(self) -> Comparison:
        """Compare all steps; the first difference is the finding."""
        found = Comparison(self.steps)
        for step in range(self.steps):
            differing = {kind: differences for kind, differences in self._step(step, found) if differences}
            if differing and found.finding is None:
                found.finding = self._finding(step, differing)
        return found

    def _finding(self, step: int, differing: Mapping[str, list[Difference]]) -> Finding:
        """Choose the first kind; the gradients say more than the loss."""
        kind, differences = next(iter(differing.items()))
        loss = None
        if kind == "loss" and "gradient" in differing:
            sees_outputs = bool(self.a.entries(step, "output")) and bool(self.b.entries(step, "output"))
            loss = differences[0] if sees_outputs else None
            kind, differences = "gradient", differing["gradient"]
        return Finding(step, kind, differences, self._origin(kind, differences), loss)

    def _step(self, step: int, found: Comparison) -> Iterator[tuple[str, list[Difference]]]:
        yield "rows", self._rows(step)
        if step == 0:
            yield "weight", self._tensors(step, "weight", found)
        yield "output", self._tensors(step, "output", found)
        yield "loss", self._loss(step, found)
        for kind in KINDS[1:]:
            yield kind, self._tensors(step, kind, found)

    def _rows(self, step: int) -> list[Difference]:
        """Compare the samples of all shares together."""
        mine, theirs = self.a.steps[step], self.b.steps[step]
        if mine.types != theirs.types:
            return []
        wanted = Counter(row for rank in self.a.shares_once().values() for row in mine.rows[rank])
        seen = Counter(row for rank in self.b.shares_once().values() for row in theirs.rows[rank])
        differing = (wanted - seen) + (seen - wanted)
        odd = [rank for rank, rows in theirs.rows.items() if any(row in differing for row in rows)]
        others = self._unlike_their_share(step)
        if not differing and not others:
            return []
        size = max(sum(differing.values()) / max(1, wanted.total()), len(others) / max(1, len(theirs.rows)))
        return [Difference("batch", size, 0.0, ranks=tuple(sorted({*odd, *others})))]

    def _unlike_their_share(self, step: int) -> list[int]:
        """Return the ranks whose samples are not those of the share that they say they have."""
        rows, first = self.b.steps[step].rows, self.b.shares_once()
        return [r for r, (index, _) in self.b.shares.items() if rows.get(r) != rows.get(first[index])]

    def _loss(self, step: int, found: Comparison) -> list[Difference]:
        mine, theirs = self.a.loss(step), self.b.loss(step)
        if mine is None or theirs is None:
            return []
        scale = abs(mine) or 1.0
        tolerance = FACTOR * max(self._loss_noise, 4 * (2.0**-23 if self._exact_losses else self._epsilon()))
        size = abs(theirs - mine) / scale
        self._remember(found, "loss", step, "loss", size, tolerance)
        if size <= tolerance:  # False for NaN
            return []
        if math.isnan(mine) and math.isnan(theirs):
            return []
        return [Difference("loss", size, tolerance, theirs / mine if mine else math.nan)]

    def _tensors(self, step: int, kind: str, found: Comparison) -> list[Difference]:
        mine, theirs = self.a.entries(step, kind), self.b.entries(step, kind)
        if (
            kind == "update"
            and self.b.steps[step].form == "partial"
            and not any(map(_moves, theirs.values()))
        ):
            return []  # an error came before the step of the optimizer
        exact = self.twin.entries(step, kind) if self.twin is not None and step < self.twin.finished else {}
        noises, scale = _noises(mine, exact)
        typical = median(noises.values()) if noises else 0.0
        differences = []
        for name in sorted(mine, key=lambda name: self._order.get((kind == "output", name), 1 << 30)):
            if name not in theirs or (kind == "output" and self._is_of_shares(mine[name], theirs[name])):
                continue
            noise = max(noises.get(name, 0.0), typical, self._floor(name, mine[name], exact))
            tolerance = max(FACTOR * noise, self._of_signs(step, name) if kind == "update" else 0.0)
            difference = _compare(name, mine[name], theirs[name], tolerance, scale, self._by_rank)
            if difference is not None:
                self._remember(found, kind, step, name, difference.size, difference.tolerance)
                if not difference.size <= difference.tolerance:
                    differences.append(difference)
        return differences

    def _of_signs(self, step: int, name: str) -> float:
        """Return the relative error of an adaptive optimizer's update by signs that rounding flips.

        Adam's first update has the sign of each gradient, and the size of the rate. Rounding errors flip the
        signs of gradients about zero: a share of the elements as large as the relative error of the gradient.
        """
        rates, gradient = self.a.steps[step].rates, self.a.entries(step, "gradient").get(name)
        if gradient is None or gradient.whole is None or not rates or "dampening" in rates[0]:
            return 0.0  # SGD has no such error
        exact = self.twin.entries(step, "gradient") if self.twin and step < self.twin.finished else {}
        noises, _ = _noises({name: gradient}, exact)
        count = max(1, gradient.whole.numel)
        flips = count * max([*noises.values(), self._floor(name, gradient, exact)])
        most = 3 * flips + 2 * math.sqrt(flips) + (flips > 1e-3)
        return 2 * math.sqrt(most / count)

    def _is_of_shares(self, *entries: Entry) -> bool:
        """Return True if ranks have outputs without rows that differ, such as the mean loss of each share."""
        return not self._by_rank and any(
            len(entry.owners) == 1 and len({piece.statistic for piece in entry.pieces}) > 1
            for entry in entries
        )

    def _floor(self, name: str, entry: Entry, exact: Mapping[str, Entry]) -> float:
        """Return the least relative error to expect: of sums in float32 if a twin knows the rest."""
        known = name in exact and exact[name].whole is not None
        return 4 * (2.0**-23 if known else self._epsilon(entry.dtype))

    def _epsilon(self, dtype: str = "float32") -> float:
        precisions = [str(run.facts.get("precision", "")) for run in (self.a, self.b)]
        return max(epsilon_of(precision, dtype) for precision in precisions)

    def _origin(self, kind: str, differences: Sequence[Difference]) -> Difference:
        """Return the difference that is likely the first in time.

        A fault of a module's backward changes its own gradients and those of all modules before it in forward
        order. Then the last of the differences from the first parameter on is the first in time.
        """
        if kind not in ("gradient", "clipped") or len(differences) < 2:
            return differences[0]
        order = {name: place for place, name in enumerate(self._parameters())}
        places = sorted(order[each.name] for each in differences if each.name in order)
        if places == list(range(len(places))) and len(places) < len(order):
            return max(differences, key=lambda each: order.get(each.name, -1))
        return differences[0]

    def _parameters(self) -> list[str]:
        names = [name for is_output, name in self._order if not is_output]
        return sorted(names, key=lambda name: self._order[False, name])

    def _remember(
        self, found: Comparison, kind: str, step: int, name: str, size: float, tolerance: float
    ) -> None:
        worth = size / tolerance if tolerance else (math.inf if size else 0.0)
        found.table.setdefault(kind, {}).setdefault(step, {})[name] = worth
        if worth <= 1:
            found.largest[kind] = max(found.largest.get(kind, 0.0), size)


def why_no_twin(a: Run, twin: Run) -> str:
    """Return why a float64 run is no twin of run a; empty if it is one.

    A twin may draw other random numbers, since those depend on the element type. Then its distance is no
    rounding error.
    """
    for kind in ("output", "gradient") if twin.finished and a.begun else ():
        mine = a.entries(0, kind)
        noises, _ = _noises(mine, twin.entries(0, kind))
        if not noises:
            continue
        spacing = max(epsilon_of(str(a.facts.get("precision", "")), mine[name].dtype) for name in noises)
        distance = median(noises.values())
        if distance > math.sqrt(spacing):
            return f"it differs by {distance:.2g} in step 0, as of other random numbers"
        return ""
    return "it has no tensor of run a"


def _noises(mine: Mapping[str, Entry], exact: Mapping[str, Entry]) -> tuple[dict[str, float], float]:
    """Return the relative rounding errors of run a by name, and the norm of the largest tensor."""
    noises = {}
    for name, entry in mine.items():
        whole, twin = entry.whole, exact[name].whole if name in exact else None
        if whole is not None and twin is not None and whole.norm:
            noises[name] = min(twin.distance(whole) / whole.norm, 1.0)
    norms = [entry.whole.norm for entry in mine.values() if entry.whole is not None]
    return noises, max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def _moves(entry: Entry) -> bool:
    return entry.whole is not None and entry.whole.norm > 0


def _compare(
    name: str, mine: Entry, theirs: Entry, noise: float, scale: float, by_rank: bool
) -> Difference | None:
    """Compare a tensor; None if there is nothing to compare."""
    reference = mine.whole
    if not mine.pieces and not theirs.pieces:
        return None
    if reference is None and mine.pieces:
        return None
    if not theirs.pieces or reference is None:
        present = reference or theirs.whole
        norm = present.norm if present is not None else 0.0
        return Difference(name, 1.0 if norm else 0.0, noise, 0.0)
    if theirs.shape != mine.shape or theirs.whole is None:
        return None
    floor = scale * 2.0**-23
    copies = {rank: copy for rank in theirs.ranks if (copy := theirs.of_rank(rank)) is not None}
    own = {rank: mine.of_rank(rank) or reference if by_rank else reference for rank in copies}
    sizes = {rank: _relative(own[rank], copy, floor) for rank, copy in copies.items()}
    ranks = tuple(rank for rank, size in sizes.items() if not size <= noise)
    worst = max(sizes, key=lambda rank: sizes[rank])
    return Difference(name, sizes[worst], noise, _ratio(own[worst], copies[worst], noise), ranks)


def _relative(reference: Statistic, other: Statistic, floor: float) -> float:
    distance = reference.distance(other)
    distance = max(distance, abs(reference.norm - other.norm) if other.square == other.square else math.inf)
    return max(0.0, distance - floor) / (max(reference.norm, floor) or 1.0)


def _ratio(reference: Statistic, other: Statistic, noise: float) -> float:
    """Return the factor from one tensor to the other if their sketches have one, and NaN otherwise."""
    square = sum(a * a for a in reference.sketch)
    if not square:
        return math.nan
    ratio = sum(a * b for a, b in zip(reference.sketch, other.sketch, strict=True)) / square
    rest = sum((b - ratio * a) ** 2 for a, b in zip(reference.sketch, other.sketch, strict=True))
    return ratio if rest <= (2 * noise * max(1.0, abs(ratio))) ** 2 * square else math.nan


def _forward_order(run: Run, a: Run) -> dict[tuple[bool, str], int]:
    """Return the place of each output and parameter in forward order."""
    outputs = list(run.entries(0, "output")) if run.finished else []
    order = {(True, name): place for place, name in enumerate(outputs)}
    parameters: Sequence[str] = a.facts.get("parameters") or list(a.entries(0, "weight") if a.steps else ())
    modules = {name: place for place, name in enumerate(outputs)}
    last = 0
    for index, name in enumerate(parameters):
        last = modules.get(name.rpartition(".")[0], last)
        order[False, name] = last * 10_000 + index
    return order
