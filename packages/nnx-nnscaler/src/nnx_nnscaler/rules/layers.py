"""Split matrix products, attention, embeddings, convolutions, pools and normalization over channels."""

from __future__ import annotations

from collections.abc import Mapping

from nnx_nnscaler.ir.graph import Argument, Graph, Op, Ref, TensorMeta
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.rules.rule import (
    Call,
    Labels,
    Rule,
    Writer,
    aligned,
    argument_of,
    dim_labels,
    label_strategies,
    with_code,
)

__all__ = ["RULES"]

# Matrix products, sharded by rows, columns and batch dims, or along the summed dim.


_Inputs = Mapping[str, Labels | list[Labels]]

SUMMED = "row"
"""The label of the summed dim of a product: with it a weight is sharded by rows of its matrix."""


class _MatrixProduct(Rule):
    """The common rule of matrix products.

    Attributes:
        addend: The name of the argument that is added to the product; only one of the partial sums has it.
    """

    addend = ""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        inputs, output = self.labels(call)
        return label_strategies(call, inputs, [output], summed=[SUMMED])

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        """Return the labels of the arguments and of the result."""
        raise NotImplementedError

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        addend = argument_of(op, self.addend) if self.addend else None
        if strategy.outputs[0] != P or not isinstance(addend, Ref):
            return writer.call(op)
        return writer.call(with_code(op, **{self.addend: f"rt.once({writer.value(addend)})"}))


class _Linear(_MatrixProduct):
    addend = "bias"

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        leading = dim_labels(call, call.output.shape)[:-1]
        if len(call.shape("weight")) == 1:
            leading = dim_labels(call, call.output.shape)
            return {"input": (*leading, SUMMED), "weight": (SUMMED,), "bias": ()}, leading
        inputs = {"input": (*leading, SUMMED), "weight": ("column", SUMMED), "bias": ("column",)}
        return inputs, (*leading, "column")


class _Matmul(_MatrixProduct):
    """Products of stacks of matrices; dims before the last two are broadcast."""

    names = ("self", "other")

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        left, right = self.names
        output = list(dim_labels(call, call.output.shape))
        if len(call.shape(right)) > 1:
            output[-1] = "column"
        stack = len(output) - (len(call.shape(left)) > 1) - (len(call.shape(right)) > 1)
        rows = [output[stack]] if len(call.shape(left)) > 1 else []
        columns = ["column"] if len(call.shape(right)) > 1 else []
        return {
            left: self._stacked(call, left, output[:stack], [*rows, SUMMED]),
            right: self._stacked(call, right, output[:stack], [SUMMED, *columns]),
        }, tuple(output)

    def _stacked(self, call: Call, name: str, stack: list[str | None], matrix: list[str | None]) -> Labels:
        """Return the labels of one factor, whose stack may be broadcast."""
        shape = call.shape(name)
        own = len(shape) - len(matrix)
        wanted = call.output.hints[len(stack) - own : len(stack)]
        broadcast = [
            label if size == target else None
            for label, size, target in zip(stack[len(stack) - own :], shape[:own], wanted, strict=True)
        ]
        return (*broadcast, *matrix)


class _BatchedProduct(_Matmul):
    names = ("self", "mat2")


class _AddedProduct(_Matmul):
    """Products with an addend that is broadcast to them."""

    addend = "self"

    def __init__(self, left: str, right: str) -> None:
        self.names = (left, right)

    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        inputs, output = super().labels(call)
        addend = call.meta("self")
        assert addend is not None  # the schema requires it
        return {"self": aligned(output, call.output, addend), **inputs}, output


class _Outer(_MatrixProduct):
    def labels(self, call: Call) -> tuple[_Inputs, Labels]:
        output = dim_labels(call, call.output.shape)
        return {"self": output[:1], "vec2": output[1:]}, output


class _Einsum(Rule):
    """Products by an equation of letters, without ellipsis; a letter that no result has is summed."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        equation = str(call["equation"]).replace(" ", "")
        if "->" not in equation or "." in equation:
            return []
        left, _, right = equation.partition("->")
        terms = left.split(",")
        metas = call.metas("tensors")
        sizes: dict[str, int] = {}
        for term, meta in zip(terms, metas, strict=True):
            for letter, hint in zip(term, meta.hints, strict=True):
                sizes[letter] = max(hint, sizes.get(letter, 1))
        inputs: list[Labels] = [
            tuple(
                letter if hint == sizes[letter] else None
                for letter, hint in zip(term, meta.hints, strict=True)
            )
            for term, meta in zip(terms, metas, strict=True)
        ]
        summed = [letter for letter in sizes if letter not in right]
        if any(None in labels for labels in inputs):
            summed = []  # a letter that is broadcast and summed counts more often than the equation shows
        return label_strategies(call, {"tensors": inputs}, [tuple(right)], summed=summed)


_MATMUL, _BATCHED = _Matmul(), _BatchedProduct()

_PRODUCTS: dict[str, Rule] = {
    "aten.linear": _Linear(),
    "aten.matmul": _MATMUL,
    "aten.__matmul__": _MATMUL,
    "aten.mm": _BATCHED,
    "aten.bmm": _BATCHED,
    "aten.addmm": _AddedProduct("mat1", "mat2"),
    "aten.baddbmm": _AddedProduct("batch1", "batch2"),
    "aten.outer": _Outer(),
    "aten.einsum": _Einsum(),
}


# Attention, sharded by samples, by heads, or by queries.


class _Attention(Rule):
    """Attention: heads and samples are independent; a rank can also compute some queries with all keys.

    Keys and values may have fewer heads: each serves a run of query heads, so equal shards match. With
    dropout a rank needs its shard of the complete mask, so single operators replace the fused one.
    """

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        query, key = call.meta("query"), call.meta("key")
        if query is None or key is None or len(query.shape) < 3:
            return []
        labels = self._labels(call, query)
        together = tuple(
            label if own == other or (call["enable_gqa"] and label == "heads") else None
            for label, own, other in zip(labels[:-2], query.shape, key.shape, strict=False)
        )
        inputs: dict[str, Labels | list[Labels]] = {
            "query": labels,
            "key": (*together, None, None),
            "value": (*together, None, None),
        }
        mask = call.meta("attn_mask")
        if mask is not None:
            scores = TensorMeta((*query.shape[:-1], key.shape[-2]), mask.dtype)
            inputs["attn_mask"] = aligned(labels, scores, mask)
        cut = label_strategies(call, inputs, [labels])
        return [s for s in cut if call.given and all(p.groups == 1 for p in s.inputs)]

    def _labels(self, call: Call, query: TensorMeta) -> Labels:
        leading = list(dim_labels(call, query.shape)[:-2])
        if len(query.shape) > 3:
            leading[-1] = "heads"
        return (*leading, None if call["is_causal"] else "query", None)

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if not argument_of(op, "dropout_p"):
            return writer.call(op)
        arguments = [writer.value(argument_of(op, name)) for name in ("query", "key", "value", "attn_mask")]
        arguments.append(f"p={argument_of(op, 'dropout_p')}")
        for name in ("is_causal", "scale", "enable_gqa"):
            if argument_of(op, name):
                arguments.append(f"{name}={writer.value(argument_of(op, name))}")
        if strategy.outputs[0].is_shard:
            arguments.append(f"dim={strategy.outputs[0].dim}")
        return f"rt.attention({', '.join(arguments)})"


_ATTENTION: dict[str, Rule] = {"aten.scaled_dot_product_attention": _Attention()}


# Embeddings, sharded by samples, by columns, or by rows of the vocabulary.


_VOCABULARY = "vocabulary"


class _Embedding(Rule):
    """Embeddings by columns, or by rows: then each rank returns zeros for the rows of other ranks."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        if call["scale_grad_by_freq"] or call["sparse"]:
            return []  # these count over all samples, or have gradients that cannot be summed
        leading = dim_labels(call, call.output.shape)[:-1]
        inputs = {"weight": (_VOCABULARY, "column"), "indices": leading}
        found = label_strategies(call, inputs, [(*leading, "column")], summed=[_VOCABULARY])
        return [s for s in found if s.outputs[0] != P or s.inputs[0].groups == 1]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.outputs[0] != P:
            return writer.call(op)
        arguments = [writer.value(argument_of(op, name)) for name in ("weight", "indices")]
        padding = argument_of(op, "padding_idx")
        if padding != -1:
            arguments.append(f"padding_idx={padding}")
        return f"rt.embedding_rows({', '.join(arguments)})"

    def index_bound(self, op: Op, graph: Graph) -> int | None:
        return Call.of(op, graph, 1).shape("weight")[0]


_EMBEDDINGS: dict[str, Rule] = {"aten.embedding": _Embedding()}


# There is no halo exchange, which would split an image along its height.


_MADE, _USED = "output channels", "input channels"


class ConvolutionRule(Rule):
    """Convolutions, plain, grouped and transposed: by batch, output channels, input channels or groups."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        x, weight = call.shape("input"), call.shape("weight")
        batched: Labels = ("batch",) if len(x) == len(weight) else ()
        if call["groups"] == 1:
            transposed = op.target.startswith("aten.conv_transpose") or bool(call["transposed"])
            labels: dict[str, Labels | list[Labels]] = {
                "input": (*batched, _USED),
                "weight": (_USED, _MADE) if transposed else (_MADE, _USED),
                "bias": (_MADE,),
            }
            return label_strategies(call, labels, [(*batched, _MADE)], summed={_USED})
        by_batch = label_strategies(call, {"input": batched}, [batched])
        if call["groups"] % size:
            return by_batch
        channels = S(len(batched))
        by_group = {"input": channels, "weight": S(0), "bias": S(0)}
        return [*by_batch, call.strategy("groups", by_group, [channels])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.name == "groups":
            return writer.call(with_code(op, groups=str(argument_of(op, "groups") // writer.size)))
        bias = argument_of(op, "bias")
        if strategy.outputs == (P,) and bias is not None:
            return writer.call(with_code(op, bias=f"rt.once({writer.value(bias)})"))
        return writer.call(op)


class LeadingDimsRule(Rule):
    """Operators with the same work for every index of their leading dims: pools, interpolation.

    Args:
        trailing: The number of last dims of the operand that cannot be split.
        linear: True if the operator maps a sum of tensors to the sum of their results.
    """

    def __init__(self, trailing: int, *, linear: bool = False) -> None:
        self.trailing = trailing
        self.linear = linear

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        name = call.tensors()[0]
        leading = max(len(call.shape(name)) - self.trailing, 0)
        labels = tuple(_dim_name(dim, leading) for dim in range(leading))
        found = label_strategies(call, {name: labels}, [labels] * len(call.outputs))
        if self.linear:
            found.append(call.strategy("partial", {name: P}, [P] * len(call.outputs)))
        return found


class PadRule(Rule):
    """Padding: any dim without padding; partial sums if the padding is zeros or copies values."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        name = call.tensors()[0]
        padded = _padded_dims(call["pad"] or call["padding"], len(call.shape(name)))
        labels = tuple(None if dim in padded else f"dim{dim}" for dim in range(len(call.shape(name))))
        found = label_strategies(call, {name: labels}, [labels])
        constant = "pad" in call.given and call["mode"] in (None, "constant")
        if not (constant and call["value"]):
            found.append(call.strategy("partial", {name: P}, [P]))
        return found


class GridSampleRule(Rule):
    """Samples of images at the points of a grid: by batch, or by channels with a replicated grid."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        return [
            Strategy("batch", (S(0), S(0)), (S(0),)),
            Strategy("channels", (S(1), R), (S(1),)),
            Strategy("partial", (P, R), (P,)),
        ]


def _dim_name(dim: int, leading: int) -> str:
    """Return the name of a dim before the spatial ones, counted from these."""
    return {1: "channels", 2: "batch"}.get(leading - dim, f"dim{dim}")


def _padded_dims(pad: Argument, ndim: int) -> set[int]:
    """Return the dims that a list of paddings changes; it counts from the last dim, two numbers each."""
    return {ndim - 1 - index // 2 for index, amount in enumerate(pad) if amount != 0}


_CONVOLUTIONS = (
    *(f"conv{n}d" for n in (1, 2, 3)),
    *(f"conv_transpose{n}d" for n in (1, 2, 3)),
    "convolution",
)
_MAX_POOLS = ("max_pool{n}d", "adaptive_max_pool{n}d", "max_pool{n}d_with_indices")
_AVERAGE_POOLS = ("avg_pool{n}d", "adaptive_avg_pool{n}d", "_adaptive_avg_pool{n}d")
_INTERPOLATIONS = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_bicubic2d _upsample_bicubic2d_aa pixel_shuffle pixel_unshuffle",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}
_PADS = (
    "pad",
    "constant_pad_nd",
    *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)),
)

_OF_WINDOWS: dict[str, Rule] = {
    **{f"aten.{name}": ConvolutionRule() for name in _CONVOLUTIONS},
    **{f"aten.{name.format(n=n)}": LeadingDimsRule(n) for name in _MAX_POOLS for n in (1, 2, 3)},
    **{
        f"aten.{name.format(n=n)}": LeadingDimsRule(n, linear=True)
        for name in _AVERAGE_POOLS
        for n in (1, 2, 3)
    },
    **{
        f"aten.{name}": LeadingDimsRule(trailing, linear=True)
        for trailing, names in _INTERPOLATIONS.items()
        for name in names.split()
    },
    **{f"aten.{name}": PadRule() for name in _PADS},
    **{f"aten.{name}": GridSampleRule() for name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")},
}
"""The rule of every operator of this family."""


# Normalization over channels: batch norm, group norm, instance norm. Some strategies need a runtime function
# that keeps statistics right. Layer norm and RMS norm, whose statistics are within one row, are among the
# rules of `arithmetic`.


_BY_CHANNEL = {
    "input": S(1),
    "weight": S(0),
    "bias": S(0),
    "running_mean": S(0),
    "running_var": S(0),
}


class BatchNormRule(Rule):
    """Batch norm: by channels, or by batch and other dims with statistics over the complete unit.

    Running statistics are replicated buffers, so a runtime function updates them on every rank.
    """

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        over_unit = "batch_norm_over_unit" if call["training"] else ""
        dims = [dim for dim in range(len(call.shape("input"))) if dim != 1]
        found = [
            call.strategy("batch" if dim == 0 else f"dim{dim}", {"input": S(dim)}, [S(dim)], call=over_unit)
            for dim in dims
        ]
        if call["training"] and call["running_mean"] is not None:
            wanted = _BY_CHANNEL | {"running_mean": R, "running_var": R}
            return [*found, call.strategy("channels", wanted, [S(1)], call="batch_norm_of_channels")]
        return [*found, call.strategy("channels", _BY_CHANNEL, [S(1)])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if not strategy.call:
            return writer.call(op)
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        return f"rt.{strategy.call}({', '.join(writer.value(argument_of(op, name)) for name in names)})"


class GroupNormRule(Rule):
    """Group norm: by batch, or by complete groups of channels."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        by_batch = call.strategy("batch", {"input": S(0)}, [S(0)])
        if call["num_groups"] % size:
            return [by_batch]
        return [by_batch, call.strategy("groups", _BY_CHANNEL, [S(1)])]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:
        if strategy.name != "groups":
            return writer.call(op)
        return writer.call(with_code(op, num_groups=str(argument_of(op, "num_groups") // writer.size)))


class InstanceNormRule(Rule):
    """Instance norm: by batch and by channels, unless it updates running statistics."""

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        call = Call.of(op, graph, size)
        if call["use_input_stats"] and call["running_mean"] is not None:
            return []
        return [
            call.strategy("batch", {"input": S(0)}, [S(0)]),
            call.strategy("channels", _BY_CHANNEL, [S(1)]),
        ]


_OVER_IMAGES: dict[str, Rule] = {
    **_OF_WINDOWS,
    "aten.batch_norm": BatchNormRule(),
    "aten.group_norm": GroupNormRule(),
    "aten.instance_norm": InstanceNormRule(),
}
"""The rule of every operator of this family."""

RULES: dict[str, Rule] = {**_PRODUCTS, **_ATTENTION, **_EMBEDDINGS, **_OVER_IMAGES}
