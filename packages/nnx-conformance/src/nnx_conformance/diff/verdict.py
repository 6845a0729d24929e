"""Name the kind of the first difference, its likeliest cause, and the place to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nnx_base.box import Box
from nnx_conformance.diff.comparison import Comparison, Difference, Finding
from nnx_conformance.diff.record import Copies, Run, read_whole
from nnx_conformance.diff.relations import Case, Relation, relation

CAUSES = {
    "missing sum": ("a reduction over the ranks is missing", "the parameter's hook, group or bucket"),
    "summed twice": ("a term is added twice", "a second reduction, or a hook that is registered twice"),
    "uneven mean": (
        "each rank's loss divides by its own count, such as that of tokens without padding",
        "the divisor of the loss: the count of all ranks, divided by their number",
    ),
    "factor N": (
        "a mean is taken where a sum is, or twice",
        "the division by the number of ranks or batches",
    ),
    "stale weight": ("a copy of the weight is not refreshed", "the gather after the step, or a cached copy"),
    "wrong slice": ("elements are at another place", "offsets of shards, and the order of ranks"),
    "transposed": (
        "two dims are exchanged",
        "the layout of the weight, or a view in the place of a transpose",
    ),
    "other data": ("the ranks read other samples", "the sampler, the share of each rank, and the seed"),
    "other rate": ("the optimizer uses other options", "param groups, the scheduler, and weight decay"),
    "other mask": (
        "a mask, dropout, or the weight of a sample in the loss differs",
        "the attention mask, padding, random seeds, and the loss",
    ),
    "dropped gradient": ("the gradient is lost", "unused-parameter handling, checkpointing, and zero_grad"),
    "kept gradient": ("the gradient of an earlier step is kept", "zero_grad, and when it is called"),
    "precision": ("values are rounded to fewer bits", "the dtype of reductions, masters and autocast"),
    "clipping": ("gradients are clipped otherwise", "the norm: of all ranks, all groups, each element once"),
    "other start": ("the runs begin with other weights", "the broadcast of the initial weights, and seeds"),
    "batch statistics": ("each rank normalizes its own share", "sync_batchnorm=True, or another norm"),
    "random draws": (
        "the step draws random numbers, on each rank its own",
        "--no-dropout, or as many ranks on both sides",
    ),
    "not deterministic": (
        "the run differs from itself",
        "atomics, cuDNN, threads, and unseeded random numbers",
    ),
    "evaluation": ("a layer is in evaluation mode", "train() and eval() around the step"),
    "other value": ("no simple relation holds", "the operation that computes this tensor"),
}
"""For each kind: the likeliest cause, and where to look."""


@dataclass(frozen=True)
class Verdict:
    """The kind of a difference.

    Attributes:
        step: The step, from 0.
        tensor: The parameter, module or buffer.
        where: ``gradient``, ``update`` and so on.
        kind: A key of `CAUSES`.
        detail: The relation that holds, as the end of a sentence about the tensor.
        ranks: The ranks whose values differ; empty for all.
        ratio: The factor of run b to run a; NaN without one.
        others: The number of further tensors that differ in the same way and step.
        evidence: Further sentences.
    """

    step: int
    tensor: str
    where: str
    kind: str
    detail: str
    ranks: tuple[int, ...] = ()
    ratio: float = math.nan
    others: int = 0
    evidence: list[str] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """The likeliest cause."""
        return CAUSES[self.kind][0]

    @property
    def look_at(self) -> str:
        """The option or the code to look at."""
        return CAUSES[self.kind][1]

    def __str__(self) -> str:
        ranks = f"rank {', '.join(map(str, self.ranks))}: " if self.ranks else ""
        return f"step {self.step}, {self.tensor}: {ranks}the {self.where} {self.detail}"


def judge(a: Run, b: Run, compared: Comparison, *, whole: tuple[Path, Path] | None = None) -> Verdict | None:
    """Return the verdict on a comparison; None if the runs agree.

    Args:
        a: The first run.
        b: The second run.
        compared: The comparison.
        whole: The directories of second runs of the twin of `a`, and of `b`, with the culprit whole.
    """
    finding = compared.finding
    if finding is None:
        return None
    special = _special(a, b, finding)
    if special is not None:
        return special
    found: tuple[Relation | None, tuple[int, ...]] = (None, ())
    if whole is not None:
        found = _relate(finding, read_whole(whole[0]), read_whole(whole[1]), b)
    holds = found[0] or _from_ratio(finding.origin)
    return _conclude(a, b, finding, holds, found[1] or _odd_ranks(finding.origin, b))


def _odd_ranks(difference: Difference, b: Run) -> tuple[int, ...]:
    return difference.ranks if len(difference.ranks) < len(b.shares) else ()


def _special(a: Run, b: Run, finding: Finding) -> Verdict | None:
    """Judge what needs no tensor: samples, random draws, statistics of batches."""
    step, origin = finding.step, finding.origin
    ranks = _odd_ranks(origin, b)
    if finding.kind == "rows":
        detail = f"differs: {origin.size:.0%} of the samples are not those of run a"
        return Verdict(step, origin.name, "batch", "other data", detail, origin.ranks)
    count_a, count_b = (max(count for _, count in run.shares.values()) for run in (a, b))
    if finding.kind != "weight" and count_a != count_b:
        if a.steps[step].draws or b.steps[step].draws:
            detail = "cannot be compared: its step draws random numbers, and the numbers of ranks differ"
            return Verdict(step, origin.name, _where(finding), "random draws", detail, ranks)
        norms = set(a.facts.get("batch_norm", ())) | set(b.facts.get("batch_norm", ()))
        module = origin.name.rpartition(".")[0]
        if (finding.kind == "output" and origin.name in norms) or (
            finding.kind == "buffer" and module in norms
        ):
            name = origin.name if finding.kind == "output" else module
            detail = "comes from statistics of each rank's own share"
            return Verdict(step, name, _where(finding), "batch statistics", detail)
    return None


def _where(finding: Finding) -> str:
    return {"clipped": "clipped gradient", "weight": "initial weight"}.get(finding.kind, finding.kind)


def _from_ratio(origin: Difference) -> Relation | None:
    """Guess a relation from sketches, where the culprit is not there whole."""
    if math.isnan(origin.ratio):
        return None
    if origin.ratio == 0.0:
        return Relation("zero", "is zero", 0.0)
    return Relation("factor", f"has the factor {origin.ratio:.4g}", origin.ratio)


def _relate(
    finding: Finding,
    right: Mapping[tuple[int, str, str], Copies],
    wrong: Mapping[tuple[int, str, str], Copies],
    b: Run,
) -> tuple[Relation | None, tuple[int, ...]]:
    """Find the relation of the culprit's values, first of all ranks and then of the first odd rank."""
    step, name, kind = finding.step, finding.origin.name, finding.kind
    reference, observed = _value(right, step, kind, name), wrong
    if reference is None:
        return None, ()
    copies = _copies(observed, step, kind, name, b)
    if not copies:
        return Relation("zero", "is not there", 0.0), ()
    candidates = {
        key[1].removeprefix("candidate:"): value.of_rank(0)
        for key, value in right.items()
        if key[1].startswith("candidate:") and key[2] == name
    }
    before = _value(right, step - 1, kind, name)
    if before is not None:
        candidates["before"] = before
    if kind == "update":
        start = _value(right, step, "weight", name)
        if start is not None:
            candidates["weight"] = start
    tolerance = max(finding.origin.tolerance / 2, 1e-7)
    differing = {
        rank: copy for rank, copy in copies.items() if not _near(reference, copy, tolerance, finding.origin)
    }
    odd = _odd_boxes(observed, step, kind, name, reference, tolerance)
    rank, copy = next(iter((differing or copies).items()))
    ranks = tuple(differing) if len(differing) < len(copies) else ()
    region = None
    if len(odd) == 1:  # only one rank's slice differs
        (rank, box), copy = odd[0], copies[odd[0][0]]
        ranks, region = (rank,), box.slices
    return relation(Case(reference, copy, tolerance, candidates, len(b.shares)), region), ranks


def _near(reference: Tensor, copy: Tensor, tolerance: float, origin: Difference) -> bool:
    scale = float(reference.norm()) or 1.0
    return float((reference - copy).norm()) / scale <= max(tolerance, origin.tolerance)


def _value(
    found: Mapping[tuple[int, str, str], Copies], step: int, kind: str, name: str, rank: int = 0
) -> Tensor | None:
    """Return a whole tensor; an update is the difference of two weights."""
    if kind != "update":
        copies = found.get((step, kind, name))
        return None if copies is None or not copies.pieces else copies.of_rank(rank)
    before, after = (found.get((number, "weight", name)) for number in (step, step + 1))
    return None if before is None or after is None else after.of_rank(rank) - before.of_rank(rank)


def _copies(
    found: Mapping[tuple[int, str, str], Copies], step: int, kind: str, name: str, b: Run
) -> dict[int, Tensor]:
    key = (step, "weight" if kind == "update" else kind, name)
    ranks = sorted({rank for rank, _, _ in found[key].pieces}) if key in found else []
    values = {rank: _value(found, step, kind, name, rank) for rank in ranks}
    return {rank: value for rank, value in values.items() if value is not None}


def _odd_boxes(
    found: Mapping[tuple[int, str, str], Copies],
    step: int,
    kind: str,
    name: str,
    reference: Tensor,
    tolerance: float,
) -> list[tuple[int, Box]]:
    """Return the boxes that differ and their first ranks, if ranks hold different boxes."""
    copies = found[step, "weight" if kind == "update" else kind, name]
    owners: dict[Box, int] = {}
    for rank, box, _ in copies.pieces:
        owners.setdefault(box, rank)
    odd = []
    for box, rank in owners.items() if len(owners) > 1 else ():
        value = _value(found, step, kind, name, rank)
        assert value is not None
        mine, theirs = reference[box.slices], value[box.slices]
        if float((mine - theirs).norm()) > 2 * tolerance * (float(mine.norm()) or 1.0):
            odd.append((rank, box))
    return odd


def _conclude(a: Run, b: Run, finding: Finding, holds: Relation | None, ranks: tuple[int, ...]) -> Verdict:
    """Turn a relation into a kind, by what was compared and how many tensors have it."""
    kind, detail, ratio = "other value", f"differs by {finding.origin.size:.2g} of its norm", math.nan
    if holds is not None:
        kind, detail, ratio = _kind(finding, holds), holds.words, holds.ratio
    odd = kind in ("other value", "wrong slice")
    if finding.kind == "output" and odd and _reads_the_batch(a, finding):
        kind, detail = "other data", f"{detail}; it is the first of the forward, and its weights agree"
    rates = _rates(a, b, finding)
    if (
        finding.kind == "update"
        and rates
        and kind in ("other value", "factor N", "kept gradient", "precision")
    ):
        kind = "other rate"
    if finding.kind == "weight":
        kind = "other start"
    name, where = finding.origin.name, _where(finding)
    if finding.loss is not None and kind in (
        *("factor N", "uneven mean", "summed twice", "other value", "wrong slice"),
    ):
        if kind == "uneven mean":
            most = max(each.size for each in finding.differences)
            detail = (
                f"differs by {finding.loss.size:.2g}, and gradients by up to {most:.2g}: they are means of "
            )
            detail += "the ranks' shares, not of the whole batch"
        elif absent := _ranks_without_loss(b, finding.step):
            kind, ranks = "missing sum", absent
            detail = f"lacks the share of rank {', '.join(map(str, absent))}, whose loss is 0"
        elif kind != "factor N":
            kind, detail = "other mask", f"differs by {finding.loss.size:.2g}, and all outputs agree"
        name = where = "loss"
    return Verdict(
        finding.step,
        name,
        where,
        kind,
        detail,
        ranks,
        ratio,
        len(finding.differences) - 1,
        [*rates, *_spread(finding)],
    )


def _ranks_without_loss(b: Run, step: int) -> tuple[int, ...]:
    """Return the ranks with a loss of zero in a batch, if others have none."""
    without = tuple(rank for rank, losses in b.steps[step].losses.items() if 0.0 in losses)
    return without if len(without) < len(b.steps[step].losses) else ()


def _reads_the_batch(a: Run, finding: Finding) -> bool:
    """Return True if the culprit is the first module of the forward, whose input is the batch."""
    return next(iter(a.entries(finding.step, "output")), "") == finding.origin.name


_KINDS = {
    ("zero", "gradient"): "dropped gradient",
    ("zero", "clipped"): "clipping",
    ("zero", "update"): "stale weight",
    ("zero", "output"): "other mask",
    ("zero", "buffer"): "stale weight",
    ("factor", "clipped"): "clipping",
    ("factor", "update"): "other rate",
    ("kept", "update"): "other rate",
    ("stale", "update"): "other rate",
    ("kept", "buffer"): "other value",
    ("stale", "buffer"): "stale weight",
    ("kept", ""): "kept gradient",
    ("stale", ""): "kept gradient",
    ("other mask", "update"): "stale weight",
    ("factor", ""): "factor N",
    ("zero", ""): "other value",
    ("shift", ""): "other value",
}
"""The kind of a relation, by where it was found; an empty place stands for any other."""


def _kind(finding: Finding, holds: Relation) -> str:
    alone, twice = len(finding.differences) == 1, abs(holds.ratio - 2) < 0.02
    if holds.kind == "factor" and finding.kind == "gradient" and alone and twice:
        return "summed twice"
    places = ((holds.kind, finding.kind), (holds.kind, ""))
    return next((_KINDS[place] for place in places if place in _KINDS), holds.kind)


def _rates(a: Run, b: Run, finding: Finding) -> list[str]:
    """Return a sentence for each option of the optimizers that differs."""
    mine, theirs = a.steps[finding.step].rates, b.steps[finding.step].rates
    found = []
    for index, (x, y) in enumerate(zip(mine, theirs, strict=False)):
        for key in x:
            if key in y and x[key] != y[key]:
                found.append(f"{key} of param group {index} is {y[key]}, and {x[key]} in run a.")
    return found


def _spread(finding: Finding) -> list[str]:
    count = len(finding.differences)
    if count < 2:
        return []
    names = ", ".join(each.name for each in finding.differences[:3])
    return [f"{count} tensors differ in this step: {names}{' and more' if count > 3 else ''}."]


def wanted_whole(finding: Finding) -> list[tuple[int, str, str]]:
    """Return the tensors that a second run has to record whole for a verdict."""
    name, step, kind = finding.origin.name, finding.step, finding.kind
    if kind in ("rows", "loss"):
        return []
    if kind == "update":
        return [(number, "weight", name) for number in (step - 1, step, step + 1) if number >= 0]
    return [(number, kind, name) for number in (step - 1, step) if number >= 0]


def relation_of(left: Tensor, right: Tensor) -> Relation | None:
    """Return the relation of two tensors of checkpoints.

    Example:
        >>> relation_of(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])).ratio
        2.0
    """
    if left.shape != right.shape:
        return None
    return relation(Case(left.to(torch.float64), right.to(torch.float64), 1e-7, {}, 1))
