"""Operators that work along some dims and leave the others alone: sums, norms, softmax, sorting, lookups."""

from __future__ import annotations

from collections.abc import Collection

from nnx_nnscaler.ir import Graph, Op, Ref, TensorMeta
from nnx_nnscaler.placement import P
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.labels import Labels, aligned, dim_labels, label_strategies, partial_strategy
from nnx_nnscaler.rules.rule import Call, Rule, Writer, placement_of, targets


class _Reduce(Rule):
    """Takes dims away, or leaves 1 of them; the others can be cut."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        before = call.meta("self")
        if before is None:
            return []
        labels = dim_labels(call, before.shape)
        reduced = _reduced(call, len(labels))
        kept = [None if index in reduced else label for index, label in enumerate(labels)]
        after = tuple(kept) if call["keepdim"] else tuple(label for label in kept if label is not None)
        if any(len(after) != len(meta.shape) for meta in call.outputs):
            return []
        operand = labels if self.sums else tuple(kept)
        summed = [label for index, label in enumerate(labels) if index in reduced and label is not None]
        found = label_strategies(call, {"self": operand}, [after] * len(call.outputs), summed=summed)
        return [*found, *(partial_strategy(call, ["self"]) if self.sums else [])]

    sums = False
    """Whether it is linear, so that sums over parts are partial sums."""


class _Sum(_Reduce):
    sums = True


class _Mean(_Sum):
    """Means over equal parts are partial sums once they are divided by the number of parts."""

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        call = writer.call(op)
        divided = strategy.outputs[0] == P and placement_of(op, strategy, "self").is_shard
        return f"{call} / {writer.size}" if divided else call


def _reduced(call: Call, ndim: int) -> Collection[int]:
    dims = call["dim"]
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return range(ndim)
    return {call.dim(dim, ndim) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}


class _Along(Rule):
    """Works along one dim of a tensor and keeps the number of dims; all others can be cut."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        before = call.meta("self")
        if before is None:
            return []
        dim = call.dim(call["dim"], len(before.shape))
        labels = dim_labels(call, before.shape)
        whole = tuple(None if index == dim else label for index, label in enumerate(labels))
        return label_strategies(call, {"self": whole}, [whole] * len(call.outputs))


class _Trailing(Rule):
    """Works along the last dims; the leading ones can be cut.

    Args:
        operand: Name of the argument.
        trailing: Number of dims that stay whole; by default the length of ``normalized_shape``.
    """

    def __init__(self, operand: str, trailing: int | None = None) -> None:
        self.operand = operand
        self.trailing = trailing

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        trailing = len(call["normalized_shape"]) if self.trailing is None else self.trailing
        labels = dim_labels(call, call.output.shape)
        whole = (*labels[: len(labels) - trailing], *[None] * trailing)
        return label_strategies(call, {self.operand: whole}, [whole])


class _Similarity(Rule):
    """Compares along one dim of two tensors that are broadcast to each other."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        first, second = call.meta("x1"), call.meta("x2")
        if first is None or second is None or len(first.shape) != len(second.shape):
            return []
        after = dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"], len(first.shape))
        sizes = [*call.output.shape[:dim], first.shape[dim], *call.output.shape[dim:]]
        whole = TensorMeta(tuple(sizes), first.dtype)
        labels: Labels = (*after[:dim], None, *after[dim:])
        if first.hints[dim] != second.hints[dim]:
            return []
        inputs: dict[str, Labels | list[Labels]] = {
            "x1": aligned(labels, whole, first),
            "x2": aligned(labels, whole, second),
        }
        return label_strategies(call, inputs, [after])


class _OneHot(Rule):
    """A dim of classes behind the others."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)[:-1]
        return label_strategies(call, {"self": labels}, [(*labels, None)]) if call["num_classes"] > 0 else []

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        return int(Call.of(op, graph, 1)["num_classes"])


class _Gather(Rule):
    """Looks up along one dim by an index of the same number of dims."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        shape, labels = call.shape("self"), dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"])
        alike = [
            index != dim and own == made
            for index, (own, made) in enumerate(zip(shape, call.output.hints, strict=True))
        ]
        index = tuple(
            label if same or d == dim else None
            for d, (label, same) in enumerate(zip(labels, alike, strict=True))
        )
        table = tuple(label if same else None for label, same in zip(labels, alike, strict=True))
        found = label_strategies(call, {"self": table, "index": index}, [index])
        return [*found, *partial_strategy(call, ["self"])]

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        call = Call.of(op, graph, 1)
        return call.shape("self")[call.dim(call["dim"])]


class _IndexSelect(Rule):
    """Picks along one dim, by an index of one dim, which can be cut itself."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        dim = call.dim(call["dim"])
        table: Labels = tuple(None if index == dim else label for index, label in enumerate(labels))
        found = label_strategies(call, {"self": table, "index": (labels[dim],)}, [labels])
        return [*found, *partial_strategy(call, ["self"])]

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        call = Call.of(op, graph, 1)
        return call.shape("self")[call.dim(call["dim"])]


class _Prelu(Rule):
    """A slope for every channel."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        labels = dim_labels(call, call.output.shape)
        slopes = labels[1:2] if isinstance(call["weight"], Ref) and call.shape("weight") != (1,) else (None,)
        return label_strategies(call, {"self": labels, "weight": slopes}, [labels])


_REDUCE, _ALONG = _Reduce(), _Along()

_REDUCING = (
    "all amax amin any argmax argmin linalg_vector_norm logsumexp max.default max.dim median.dim min.dim "
    "nanmedian.dim norm prod std std_mean var var_mean aminmax count_nonzero"
)
_WORKING_ALONG = (
    "argsort cummax cummin cumprod cumsum kthvalue log_softmax logcumsumexp softmax sort topk "
    "_softmax _log_softmax _safe_softmax glu"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(targets(_REDUCING), _REDUCE),
    **dict.fromkeys(targets(_WORKING_ALONG), _ALONG),
    "aten.sum": _Sum(),
    "aten.mean": _Mean(),
    "aten.layer_norm": _Trailing("input"),
    "aten.rms_norm": _Trailing("input"),
    "aten.tril": _Trailing("self", 2),
    "aten.triu": _Trailing("self", 2),
    "aten.cosine_similarity": _Similarity(),
    "aten.one_hot": _OneHot(),
    "aten.gather": _Gather(),
    "aten.index_select": _IndexSelect(),
    "aten.prelu": _Prelu(),
}
