"""Split annotated operators: strategies follow from the annotation and are tried before use."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from nnx_nnscaler.ir.graph import Graph, Op, TensorMeta, hint_of, refs_in
from nnx_nnscaler.ir.placement import R, Strategy
from nnx_nnscaler.rules.annotation_grammar import Annotation, AnnotationError
from nnx_nnscaler.rules.rule import Rule, Writer, argument_of, bound, operator_of, outputs_of, with_code
from nnx_nnscaler.rules.trial import DRAWS, Trial, draw, runner

_MOST_ELEMENTS = 2**20
_RULE_REMEDY = (
    "Correct the annotation: mark dims that the operator mixes with '^', dims that it sums over with '+'."
)
_logger = logging.getLogger("nnx.nnscaler")


def arguments_of(target: str) -> list[str]:
    """Return the names of the arguments of a torch operator, in order."""
    return [argument.name for argument in operator_of(target)._schema.arguments]


class AnnotatedRule(Rule):
    """The rule of one annotated operator.

    Args:
        annotation: The author's annotation.
    """

    def __init__(self, annotation: Annotation) -> None:
        self.annotation = annotation
        self._tried: dict[str, list[Strategy]] = {}

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
        metas = [graph.meta(name) for name in op.operands()]
        key = repr((list(bound(op).items()), metas, outputs_of(op), size))
        if key not in self._tried:
            found = self._proposed(op, graph, size)
            self._try(op, metas, found, size)
            self._tried[key] = found
        return self._tried[key]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:  # noqa: D102
        return writer.call(self._local(op, strategy, writer.size))

    def _local(self, op: Op, strategy: Strategy, size: int) -> Op:
        """Return the call of each rank: an argument with the size of the split dim gets the shard's size."""
        given = bound(op).get(strategy.name)
        return with_code(op, **{strategy.name: str(given // size)}) if type(given) is int else op

    def _proposed(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        """Return a strategy for every name that can be split evenly and as one placement."""
        tensors = _tensors(op, graph, len(self.annotation.operands))
        annotation = _without_leading(self.annotation, tensors)
        sizes = _sizes(annotation, op, tensors)
        names = arguments_of(op.target)
        found = []
        for name in annotation.names():
            placements = annotation.placements(name, sizes)
            if placements is None or name not in sizes or sizes[name] % size:
                continue
            of_arguments = dict(zip(names, placements[0], strict=False))
            inputs = [of_arguments.get(n, R) for n, value in bound(op).items() for _ in refs_in(value)]
            found.append(Strategy(name, tuple(inputs), tuple(placements[1])))
        return found

    def _try(self, op: Op, metas: Sequence[TensorMeta], strategies: Sequence[Strategy], size: int) -> None:
        """Run the proposed strategies on synthetic data.

        Raises:
            AnnotationError: A strategy gives another result than the unsharded operator.
        """
        run = runner(op)
        if run is None or not strategies:
            return
        if sum(math.prod(meta.hints) for meta in metas) > _MOST_ELEMENTS:
            _logger.warning("annotation of %s: not checked, because the operator is too large", op.target)
            return
        for seed, kind in enumerate(DRAWS):
            trial = _trial(op, metas, kind, seed)
            if trial is None:
                return
            for strategy in strategies:
                local = runner(self._local(op, strategy, size)) or run
                if problem := trial.disagreement(local, strategy, size):
                    raise AnnotationError(
                        f"annotation {self.annotation.text!r} of {op.target} is wrong: with "
                        f"{strategy.name!r} split, {problem}{_at(op)}.",
                        remedy=_RULE_REMEDY,
                    )


def _trial(op: Op, metas: Sequence[TensorMeta], kind: str, seed: int) -> Trial | None:
    """Run the unsharded operator on random data, in float64 if its kernel can; None if no kernel runs."""
    run = runner(op)
    bound_of_indices = min((extent for meta in metas for extent in meta.hints if extent > 1), default=1)
    for wide in (True, False):
        generator = torch.Generator().manual_seed(seed)
        operands = [draw(m.hints, getattr(torch, m.dtype), kind, bound_of_indices, generator) for m in metas]
        if not wide:
            operands = [t.to(getattr(torch, m.dtype)) for t, m in zip(operands, metas, strict=True)]
        try:
            return None if run is None else Trial.of(run, operands, generator)
        except Exception as error:  # a kernel of a third party may raise anything
            problem = error
    _logger.warning(
        "annotation of %s: not checked, because the operator cannot run here (%s)", op.target, problem
    )
    return None


_Tensors = list[tuple[str, list[TensorMeta]]]


def _tensors(op: Op, graph: Graph, count: int) -> _Tensors:
    """Return the name and the tensors of each argument that the annotation lists."""
    given = bound(op)
    names = arguments_of(op.target)[:count]
    return [(name, [graph.meta(ref) for ref in refs_in(given.get(name))]) for name in names]


def _without_leading(annotation: Annotation, tensors: _Tensors) -> Annotation:
    """Return the annotation with ``*`` replaced by its dims in the operands."""
    for index, (_, metas) in enumerate(tensors):
        for meta in metas:
            count = annotation.leading(index, len(meta.shape))
            if count is not None:
                return annotation.expanded(max(count, 0))
    return annotation.expanded(0)


def _sizes(annotation: Annotation, op: Op, tensors: _Tensors) -> dict[str, int]:
    """Return the size of every name for the traced sample.

    Raises:
        AnnotationError: The operands or results have other dims than the annotation.
    """
    found = {
        name: value
        for name in annotation.names() + sorted(annotation.fixed)
        if name in arguments_of(op.target) and type(value := argument_of(op, name)) is int
    }
    listed = list(zip(annotation.operands, tensors, strict=False))
    pairs = [(dims, meta, f"argument {name!r}") for dims, (name, metas) in listed for meta in metas]
    results = outputs_of(op)
    if len(results) != len(annotation.results):
        raise _mismatch(annotation, op, f"it returns {len(results)} results")
    pairs += [(d, m, f"result {i}") for i, (d, m) in enumerate(zip(annotation.results, results, strict=True))]
    for _ in range(2):  # the second pass uses sizes from all tensors
        for dims, meta, where in pairs:
            _note_sizes(found, annotation, op, dims, meta, where)
    return found


def _note_sizes(
    found: dict[str, int], annotation: Annotation, op: Op, dims: Any, meta: TensorMeta, where: str
) -> None:
    if dims is None:
        raise _mismatch(annotation, op, f"{where} is a tensor where the annotation has '?'")
    if len(dims) != len(meta.shape) and not (dims == () and meta.hints == (1,)):
        raise _mismatch(annotation, op, f"{where} has shape {list(meta.hints)}")
    for dim, extent in zip(dims, meta.shape, strict=False):
        size = hint_of(extent)
        unknown = [name for name in dim.names if name not in found]
        known = math.prod(found[name] for name in dim.names if name in found)
        expected = size if unknown else (known if dim.number is None else dim.number)
        if size != expected or size % known:
            raise _mismatch(annotation, op, f"{where} has shape {list(meta.hints)}")
        # A composed dim whose first factor depends on the batch has no fixed number of groups.
        if len(unknown) == 1 and (len(dim.names) == 1 or isinstance(extent, int)):
            found[unknown[0]] = size // known


def _at(op: Op) -> str:
    return f" ({op.source})" if op.source else ""


def _mismatch(annotation: Annotation, op: Op, problem: str) -> AnnotationError:
    return AnnotationError(
        f"annotation {annotation.text!r} does not fit {op.target}: {problem}{_at(op)}.",
        remedy="Correct the annotation, or the call.",
    )
