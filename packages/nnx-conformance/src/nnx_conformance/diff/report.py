"""Print a result: one screen of text, data for JSON, and a sentence for a failed test."""

from __future__ import annotations

import math

from typing_extensions import TypedDict

from nnx_conformance.diff.record import Run
from nnx_conformance.diff.session import Result

_ORDER = ("rows", "weight", "output", "loss", "gradient", "clipped", "update", "buffer")


class SideReport(TypedDict):
    """One run.

    Attributes:
        name: The side, such as ``fsdp_auto@2``.
        steps: The number of finished steps.
        losses: The loss of each step; null where there is none.
        error: The error that ended it; empty if none did.
    """

    name: str
    steps: int
    losses: list[float | None]
    error: str


class VerdictReport(TypedDict):
    """The first difference.

    Attributes:
        step: The step, from 0.
        tensor: The parameter, module or buffer; ``batch`` or ``loss``.
        where: ``gradient``, ``clipped gradient``, ``update``, ``output`` and so on.
        kind: The kind of fault.
        sentence: The verdict in one line.
        cause: The likeliest cause.
        look_at: The option or the code to look at.
        ranks: The ranks of run b that differ; empty for all.
        ratio: The factor from run a to run b; null without one.
        others: The number of further tensors that differ alike.
        evidence: Further sentences.
    """

    step: int
    tensor: str
    where: str
    kind: str
    sentence: str
    cause: str
    look_at: str
    ranks: list[int]
    ratio: float | None
    others: int
    evidence: list[str]


class DiffReport(TypedDict):
    """The output of ``nnx diff --json``.

    Attributes:
        same: True if both runs finished and agree.
        compared_steps: The number of steps that both runs began.
        largest: The largest relative distance within the tolerance, by kind.
        verdict: The first difference; null if there is none.
        notes: Sentences about the runs.
    """

    same: bool
    a: SideReport
    b: SideReport
    compared_steps: int
    largest: dict[str, float]
    verdict: VerdictReport | None
    notes: list[str]


def as_dict(result: Result) -> DiffReport:
    """Return a result as plain data."""
    verdict = result.verdict
    return {
        "same": result.same,
        "a": _side(result.a),
        "b": _side(result.b),
        "compared_steps": result.compared.steps,
        "largest": {kind: size for kind, size in result.compared.largest.items() if math.isfinite(size)},
        "verdict": None
        if verdict is None
        else {
            "step": verdict.step,
            "tensor": verdict.tensor,
            "where": verdict.where,
            "kind": verdict.kind,
            "sentence": str(verdict),
            "cause": verdict.cause,
            "look_at": verdict.look_at,
            "ranks": list(verdict.ranks),
            "ratio": verdict.ratio if math.isfinite(verdict.ratio) else None,
            "others": verdict.others,
            "evidence": verdict.evidence,
        },
        "notes": [*result.notes, *result.compared.notes],
    }


def _side(run: Run) -> SideReport:
    losses = [run.loss(step) for step in range(run.begun)]
    finite = [loss if loss is not None and math.isfinite(loss) else None for loss in losses]
    return {"name": run.name, "steps": run.finished, "losses": finite, "error": run.error}


def as_text(result: Result) -> str:
    """Return a result as one screen of text."""
    verdict, compared = result.verdict, result.compared
    lines = [f"a  {_run(result.a)}", f"b  {_run(result.b)}", ""]
    if verdict is None:
        lines.append(agreement(result))
    else:
        lines += [*_table(result), "", f"{verdict.kind}: {verdict}", ""]
        lines += [f"  likely   {verdict.cause}", f"  look at  {verdict.look_at}"]
        lines += [f"  {sentence}" for sentence in verdict.evidence]
    notes = [*result.notes, *compared.notes]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def agreement(result: Result) -> str:
    """Return a sentence about runs that agree as far as they went."""
    compared, finished = result.compared, min(result.a.finished, result.b.finished)
    if not compared.steps:
        return "No step was compared."
    partial = f", and in step {finished} as far as it went" if compared.steps > finished else ""
    sizes = ", ".join(f"{kind} {size:.1e}" for kind, size in compared.largest.items() if size)
    return f"The runs agree in {_steps(finished)}{partial}, up to rounding{f' ({sizes})' if sizes else ''}."


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _run(run: Run) -> str:
    losses = [loss for step in range(run.begun) if (loss := run.loss(step)) is not None]
    shown = " ".join(f"{loss:.6g}" for loss in losses[:6])
    more = " ..." if len(losses) > 6 else ""
    return f"{run.name}: {_steps(run.finished)}{f', loss {shown}{more}' if losses else ''}"


def _table(result: Result) -> list[str]:
    """Return a line for each step and kind up to the first difference."""
    verdict, table = result.verdict, result.compared.table
    assert verdict is not None
    kinds = [kind for kind in _ORDER if kind in table]
    rows = ["step  " + "  ".join(f"{kind:>9}" for kind in kinds)]
    for step in range(min(verdict.step + 1, result.compared.steps)):
        cells = [_cell(table[kind].get(step, {})) for kind in kinds]
        rows.append(f"{step:>4}  " + "  ".join(f"{cell:>9}" for cell in cells))
    return rows


def _cell(worth: dict[str, float]) -> str:
    odd = sum(not value <= 1 for value in worth.values())
    return "" if not worth else f"{odd} differ" if odd else "equal"


def heat_map(result: Result) -> dict[str, dict[str, dict[int, float]]]:
    """Return the distances in multiples of the tolerance, by kind, tensor and step."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for kind in _ORDER:
        for step, worths in result.compared.table.get(kind, {}).items():
            for name, worth in worths.items():
                found.setdefault(kind, {}).setdefault(name, {})[step] = worth
    return found
