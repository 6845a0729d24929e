"""Relations between a reference tensor and a faulty one: factors, sums, slices, transposes, masks, rounding.

Each test returns a `Relation`, or None if it does not hold. All tensors are in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor


@dataclass(frozen=True)
class Relation:
    """A relation that holds.

    Attributes:
        kind: The kind of fault that it indicates.
        words: The relation that holds, as the end of a sentence about the tensor.
        ratio: The factor, or the share that is there.
    """

    kind: str
    words: str
    ratio: float = float("nan")


@dataclass(frozen=True)
class Case:
    """A faulty tensor with what it is compared with.

    Attributes:
        reference: The right tensor.
        observed: The faulty one, of the same shape.
        tolerance: The relative distance that rounding explains.
        candidates: The tensors that typical faults would give, by label.
        ranks: The number of ranks of the faulty run.
    """

    reference: Tensor
    observed: Tensor
    tolerance: float
    candidates: Mapping[str, Tensor]
    ranks: int

    def close(self, x: Tensor, y: Tensor, slack: float = 2.0) -> bool:
        """Return True if two tensors differ by rounding only."""
        scale = max(float(x.norm()), float(y.norm()))
        return float((x - y).norm()) <= slack * self.tolerance * scale

    def cut(self, region: tuple[slice, ...]) -> Case:
        """Return the case of a region."""
        shape = self.observed.shape
        candidates = {k: v[region] for k, v in self.candidates.items() if v.shape == shape}
        return replace(
            self, reference=self.reference[region], observed=self.observed[region], candidates=candidates
        )

    def equal(self) -> Tensor:
        """Return for each element whether it differs by rounding only."""
        size = self.reference.abs().square().mean().sqrt()
        allowed = 8 * self.tolerance * (self.reference.abs() + size)
        return (self.reference - self.observed).abs() <= allowed


def zero(case: Case) -> Relation | None:
    """All elements are zero, or not there."""
    if float(case.observed.norm()) > case.tolerance * float(case.reference.norm()) * 1e-3:
        return None
    return Relation("zero", "is zero", 0.0)


def factor(case: Case) -> Relation | None:
    """All elements have one factor."""
    square = float(case.reference.square().sum())
    ratio = float((case.reference * case.observed).sum()) / square if square else 0.0
    if not ratio or abs(ratio - 1) <= case.tolerance or not case.close(ratio * case.reference, case.observed):
        return None
    return Relation("factor", f"has the factor {ratio:.4g}", ratio)


def sums(case: Case) -> Relation | None:
    """Terms of a sum are missing or are there twice, or all of them give another sum."""
    terms = {k: v for k, v in case.candidates.items() if k.startswith(("share ", "slice "))}
    if len(terms) < 2 or any(term.shape != case.observed.shape for term in terms.values()):
        return None
    matrix = torch.stack([term.flatten() for term in terms.values()], 1)
    solved = torch.linalg.lstsq(matrix, case.observed.reshape(-1, 1), driver="gelsd").solution.flatten()
    fitted = (matrix @ solved).view_as(case.observed)
    if not case.close(fitted, case.observed):
        return None
    factors = [round(float(value), 3) + 0.0 for value in solved]  # no -0.0
    if max(map(abs, factors)) > len(terms) + 0.5:
        return None  # no reduction has such factors: a few elements are a combination of anything
    if max(factors) - min(factors) < 0.05:
        return _uneven(case, terms) if abs(factors[0] - 1) < 0.05 else None
    missing = [index for index, value in enumerate(factors) if abs(value) < 0.05]
    if missing:
        norm = float(case.reference.norm())
        return Relation(
            "missing sum",
            f"lacks the {_kind_of(terms)} of rank {', '.join(map(str, missing))} (ratio "
            f"{float(case.observed.norm()) / norm if norm else 0:.2g}, factors {factors})",
            1 - len(missing) / len(factors),
        )
    return Relation("summed twice", f"sums the ranks' {_kind_of(terms)}s with the factors {factors}")


def _uneven(case: Case, terms: Mapping[str, Tensor]) -> Relation | None:
    whole = torch.stack(list(terms.values())).sum(0)
    if case.close(whole, case.reference) or not case.close(whole, case.observed):
        return None
    return Relation(
        "uneven mean", f"is the mean of the ranks' {_kind_of(terms)}s, and not that of the whole batch"
    )


def _kind_of(terms: Mapping[str, Tensor]) -> str:
    return next(iter(terms)).split()[0]


def kept(case: Case) -> Relation | None:
    """A multiple of the step before was added, or is there instead."""
    earlier = case.candidates.get("before")
    if earlier is None or earlier.shape != case.observed.shape or not float(earlier.norm()):
        return None
    matrix = torch.stack([case.reference.flatten(), earlier.flatten()], 1)
    solved = torch.linalg.lstsq(matrix, case.observed.reshape(-1, 1), driver="gelsd").solution.flatten()
    own, old = (float(value) for value in solved)
    fitted = own * case.reference + old * earlier
    if not case.close(fitted, case.observed, 4.0) or abs(old) < 0.02:
        return None
    if abs(own) < 0.02:
        return Relation("stale", f"is {old:.3g} times the value of the step before", old)
    return Relation("kept", f"is {own:.3g} times the right value plus {old:.3g} times the step before", old)


def stale(case: Case) -> Relation | None:
    """It follows from the weights of the step before, or from one of them."""
    found = (
        _candidate(case, label, "stale weight", "is that of the weights of the step before")
        for label in case.candidates
        if label.startswith("stale")
    )
    return next((each for each in found if each is not None), None)


def evaluation(case: Case) -> Relation | None:
    """It is the output in evaluation."""
    return _candidate(case, "evaluation", "evaluation", "is that of the module in evaluation mode")


def transposed_weight(case: Case) -> Relation | None:
    """It follows from a transposed weight."""
    return _candidate(case, "transposed", "transposed", "is that of the transposed weight")


def _candidate(case: Case, label: str, kind: str, words: str) -> Relation | None:
    tensor = case.candidates.get(label)
    if tensor is None or tensor.shape != case.observed.shape:
        return None
    if case.close(tensor, case.reference) or not case.close(tensor, case.observed, 4.0):
        return None
    return Relation(kind, words)


def transposed(case: Case) -> Relation | None:
    """Two dims are exchanged, or the elements are laid out in another order of dims."""
    reference, observed = case.reference, case.observed
    if reference.dim() < 2 or reference.dim() > 5:
        return None
    for order in permutations(range(reference.dim())):
        turned = reference.permute(order)
        if order == tuple(range(reference.dim())):
            continue
        if case.close(turned.reshape(observed.shape), observed) and not case.close(reference, observed):
            return Relation("transposed", f"is transposed (dims {order})")
    return None


def moved(case: Case) -> Relation | None:
    """Blocks of the tensor are at other places, or one block is at several places."""
    equal = case.equal()
    wrong = ~equal
    if not bool(wrong.any()) or case.observed.dim() == 0:
        return None
    values = case.observed[wrong]
    pool, _ = case.reference.flatten().sort()
    place = torch.searchsorted(pool, values).clamp(1, max(1, pool.numel() - 1))
    near = torch.minimum((pool[place] - values).abs(), (pool[place - 1] - values).abs())
    size = float(case.reference.abs().square().mean().sqrt())
    found = (near <= 8 * case.tolerance * (values.abs() + size * 1e-2)) & (values.abs() > size * 1e-3)
    # By chance a value is near one of many: count only what chance does not explain.
    span = float(pool[-1] - pool[0]) or 1.0
    chance = min(0.9, 2 * pool.numel() * 8 * case.tolerance * size / span)
    share = float(found.double().mean())
    if share < max(0.8, chance + 0.05) or int(found.sum()) < 2:
        return None
    return Relation("wrong slice", f"has {share:.0%} of its wrong elements at other places of the right one")


def masked(case: Case) -> Relation | None:
    """Some elements are zero on one side only, or changed, and the others are equal."""
    equal = case.equal()
    share = float(equal.double().mean())
    tiny = float(case.reference.abs().square().mean().sqrt()) * 1e-6
    gone = (case.observed.abs() <= tiny) & (case.reference.abs() > tiny)
    come = (case.reference.abs() <= tiny) & (case.observed.abs() > tiny)
    wrong = ~equal
    explained = float((gone | come)[wrong].double().mean()) if bool(wrong.any()) else 0.0
    if explained > 0.95 and share > 0.02:
        return Relation("other mask", f"has {1 - share:.0%} of its elements zero on one side only", share)
    if explained > 0.2:
        scaled = ~(gone | come)
        if int(scaled.sum()) > 2:
            ratio = float(
                (case.reference * case.observed)[scaled].sum() / case.reference[scaled].square().sum()
            )
            if case.close(ratio * case.reference[scaled], case.observed[scaled]):
                return Relation("other mask", f"is masked, and the rest has the factor {ratio:.3g}", ratio)
    return None


def rounded(case: Case) -> Relation | None:
    """It was rounded to fewer bits."""
    start = case.candidates.get("weight")
    if start is not None and start.shape == case.observed.shape:
        after, right = start + case.observed, start + case.reference
        for dtype in (torch.float16, torch.bfloat16):
            exact = [bool((x.to(dtype).double() == x).all()) for x in (after.float(), right.float())]
            if exact == [True, False]:
                return Relation("precision", f"rounds the weight to {str(dtype).removeprefix('torch.')}")
    for dtype in (torch.float16, torch.bfloat16):
        bits = 2.0 ** (-11 if dtype is torch.float16 else -8)
        if bits < 4 * case.tolerance:
            continue
        as_stored = case.observed.float().to(dtype).double()
        if case.close(as_stored, case.observed, 0.05) and case.close(
            case.reference, case.observed, bits * 2 / case.tolerance
        ):
            return Relation("precision", f"is rounded to {str(dtype).removeprefix('torch.')}", bits)
    size = float((case.reference - case.observed).norm() / (case.reference.norm() or 1.0))
    if size < 2.0**-5:
        error = (case.reference - case.observed) / (case.reference.abs() + 1e-30)
        typical, most = (float(error.abs().quantile(share)) for share in (0.5, 0.9))
        even = typical > case.tolerance / 4 and most < 50 * typical
        if even and typical < 2.0**-5 and abs(float(error.sign().mean())) < 0.6:
            return Relation("precision", f"has relative errors of {typical:.2g}, as of fewer bits", typical)
    return None


def shifted(case: Case) -> Relation | None:
    """A constant was added."""
    difference = case.observed - case.reference
    if difference.numel() > 2 and float(difference.std()) <= 1e-3 * float(difference.mean().abs()):
        return Relation("shift", f"has {float(difference.mean()):.3g} added to each element")
    return None


TESTS: tuple[Callable[[Case], Relation | None], ...] = (
    zero,
    factor,
    stale,
    transposed_weight,
    evaluation,
    transposed,
    sums,
    kept,
    masked,
    moved,
    rounded,
    shifted,
)


_OF_REGIONS = (zero, factor, stale, transposed_weight, evaluation, sums, kept)


def relation(case: Case, region: tuple[slice, ...] | None = None) -> Relation | None:
    """Return the most telling relation that holds; None if none does.

    Args:
        case: The tensors.
        region: A region outside of which nothing differs; by default rows or columns are looked for.
    """
    region = region or _region(case)
    if region is not None and case.observed[region].numel() >= 4:
        found = _first(_OF_REGIONS, case.cut(region))
        if found is not None:
            return found
    return _first(TESTS, case)


def _first(tests: Sequence[Callable[[Case], Relation | None]], case: Case) -> Relation | None:
    return next((found for test in tests if (found := test(case)) is not None), None)


def _region(case: Case) -> tuple[slice, ...] | None:
    """Return consecutive rows, or columns, outside of which nothing differs."""
    wrong = ~case.equal()
    for dim in range(wrong.dim()):
        lines = wrong.movedim(dim, 0).reshape(wrong.shape[dim], -1).any(1)
        places = lines.nonzero().flatten()
        if not places.numel():
            return None
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == places.numel() < wrong.shape[dim]:
            return (*(slice(None),) * dim, slice(first, last + 1))
    return None
