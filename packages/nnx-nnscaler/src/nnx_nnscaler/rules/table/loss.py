"""Losses: cut by samples, with means over all of them, and cross entropy also by classes."""

from __future__ import annotations

from nnx_nnscaler.ir import Graph, Op, TensorMeta
from nnx_nnscaler.placement import P, R, S
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import Labels, aligned, dim_labels, is_floating, label_strategies
from nnx_nnscaler.rules.rule import Call, Rule, Writer, argument_of, targets

_NONE, _MEAN = 0, 1
"""How torch numbers reductions; 2 is a sum."""


class _ClassLoss(Rule):
    """A loss of scores over classes: ``(N, C, ...)`` against ``(N, ...)``.

    Args:
        mean: The runtime's function for a mean over samples in parts, of which unlike many may count.
    """

    def __init__(self, mean: str) -> None:
        self.mean = mean

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        scores, target = call.meta("self"), call.meta("target")
        if scores is None or target is None or len(scores.shape) < 2:
            return []
        labels = dim_labels(call, (scores.shape[0], *scores.shape[2:]))
        of_scores: Labels = (labels[0], None, *labels[1:])
        probabilities = is_floating(target)
        inputs: dict[str, Labels | list[Labels]] = {
            "self": of_scores,
            "target": of_scores if probabilities else labels,
        }
        whole = call["reduction"] == _NONE
        names = [label for label in labels if label is not None]
        found = label_strategies(call, inputs, [labels if whole else ()], summed=() if whole else names)
        return found if probabilities else [*found, *self.with_all_targets(call)]

    def with_all_targets(self, call: Call) -> list[Strategy]:
        """Strategies that cut the scores and leave targets, which are classes, whole."""
        return []

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.outputs[0] != P or argument_of(op, "reduction") != _MEAN:
            return writer.call(op)
        return _written(self.mean, op, writer, ("weight", "ignore_index", "label_smoothing"))

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        shape = Call.of(op, graph, 1).shape("self")
        return shape[min(1, len(shape) - 1)]


class _CrossEntropy(_ClassLoss):
    """Classes can be cut: ranks exchange maxima, sums and the targets' scores, never all scores."""

    def with_all_targets(self, call: Call) -> list[Strategy]:
        found = []
        if call["weight"] is None and is_floating(call.output):
            found.append(call.strategy("vocabulary", {"self": S(1)}, [R], call="vocabulary_cross_entropy"))
        if call["reduction"] == _MEAN:  # a rank knows without asking how many samples count
            found.append(call.strategy("targets", {"self": S(0)}, [P], call="cross_entropy_of_part"))
        return found

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.call:
            first = "reduction" if strategy.call == "vocabulary_cross_entropy" else "weight"
            return _written(strategy.call, op, writer, (first, "ignore_index", "label_smoothing"))
        return super().write(op, strategy, writer)


def _written(function: str, op: Op, writer: Writer, options: tuple[str, ...]) -> str:
    """A call of the runtime's function with the options that are not the usual ones."""
    usual = {"weight": None, "reduction": _MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    arguments = [writer.value(argument_of(op, name)) for name in ("self", "target")]
    for name in options:
        value = argument_of(op, name)
        if value is not None and value != usual[name]:
            arguments.append(f"{name}={writer.value(value)}")
    return f"rt.{function}({', '.join(arguments)})"


class _PairLoss(Rule):
    """A loss of every element, with broadcasting; means over equal parts are divided by their number."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        metas = {name: meta for name in call.tensors() if (meta := call.meta(name)) is not None}
        whole = _broadcast(list(metas.values()))
        labels = dim_labels(call, whole.shape)
        inputs: dict[str, Labels | list[Labels]] = {
            name: aligned(labels, whole, meta) for name, meta in metas.items()
        }
        reduced = call["reduction"] != _NONE
        names = [label for label in labels if label is not None]
        return label_strategies(call, inputs, [() if reduced else labels], summed=names if reduced else ())

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        call = writer.call(op)
        divided = strategy.outputs[0] == P and argument_of(op, "reduction") == _MEAN
        return f"{call} / {writer.size}" if divided else call


def _broadcast(metas: list[TensorMeta]) -> TensorMeta:
    """The shape that tensors are broadcast to."""
    ndim = max(len(meta.shape) for meta in metas)
    padded = [((1,) * (ndim - len(meta.shape)) + meta.shape) for meta in metas]
    shape = tuple(next((dim for dim in dims if dim != 1), 1) for dims in zip(*padded, strict=True))
    return TensorMeta(shape, metas[0].dtype)


_PAIR = _PairLoss()
_PAIRS = (
    "binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss "
    "smooth_l1_loss soft_margin_loss"
)
_NLL = _ClassLoss("nll_loss_mean")

RULES: dict[str, Rule] = {
    **dict.fromkeys(targets(_PAIRS), _PAIR),
    **dict.fromkeys(targets("nll_loss nll_loss2d nll_loss_nd"), _NLL),
    "aten.cross_entropy_loss": _CrossEntropy("cross_entropy_mean"),
}
