"""Count operations, bytes and saved tensors of single operators on one rank.

Shapes are the local ones of the rank; `hardware` has the rates for the counts. An operator that is not listed
counts as memory-bound, and as saving all its operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nnx_nnscaler.ir.graph import Op

_WIDTH = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "float16": 2,
    "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALIASES = _names(
    """getitem view _unsafe_view reshape transpose permute t T mT numpy_T unsqueeze squeeze expand
    expand_as view_as slice select split split_with_sizes chunk narrow alias detach detach_ unflatten
    flatten unbind movedim swapaxes lift_fresh_copy"""
)
"""Operators whose results usually share their operand's memory."""


_ADD_MATMULS = _names("addmm baddbmm addbmm addmv")


_MATMULS = _names("linear mm matmul bmm mv dot einsum") | _ADD_MATMULS


_ATTENTION = _names("scaled_dot_product_attention")


_CONVOLUTIONS = _names("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")


_SPECIAL = _names(
    """gelu silu exp log tanh sigmoid erf softmax _softmax log_softmax _log_softmax cross_entropy_loss pow
    rsqrt sin cos softplus mish elu logsumexp log1p expm1 hardswish"""
)


_RANDOM = _names("dropout native_dropout feature_dropout bernoulli rand randn rand_like randn_like")


_NORMS = _names("layer_norm native_layer_norm rms_norm _fused_rms_norm batch_norm group_norm instance_norm")


_SAVES_NOTHING = ALIASES | _names(
    """add sub neg sum mean cat stack clone contiguous to _to_copy type_as masked_fill where pad
    constant_pad_nd repeat embedding index_select gather roll flip cumsum tril triu eq ne lt le gt ge
    logical_not logical_and bitwise_and bitwise_not argmax add_ copy_ arange zeros ones full empty
    zeros_like ones_like full_like scalar_tensor eye"""
)


_SAVES_OUTPUT = _names(
    "softmax _softmax log_softmax _log_softmax tanh sigmoid exp relu relu_ rsqrt sqrt reciprocal"
)


_SOFTMAX = 3.0
"""The work of one attention score, in elements of a special operator; measured on a CPU."""


class Local(NamedTuple):
    """The local tensor of one rank."""

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.numel * bytes_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an operator in one direction.

    Attributes:
        flops: The operations of matrix products.
        nbytes: The bytes read and written.
        special: The elements with expensive functions, such as exp.
        random: The random numbers drawn.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    special: float = 0.0
    random: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors that autograd saves of an operator.

    Attributes:
        operands: The indices of the saved operands.
        output: True if its results are saved.
        more: The bytes of masks and statistics.
    """

    operands: tuple[int, ...] = ()
    output: bool = False
    more: int = 0


def base_name(op: Op) -> str:
    """Return the name of an operator: ``"linear"`` of ``"aten.linear.default"``."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def bytes_of(dtype: str) -> int:
    """Return the bytes of one element."""
    return _WIDTH.get(dtype, 1 if dtype.startswith("float8") else 4)


def work_of(op: Op, inputs: Sequence[Local], outputs: Sequence[Local], *, whole: int) -> tuple[Work, Work]:
    """Return the work of an operator's forward and backward on one rank.

    Args:
        op: The operator.
        inputs: The local operands.
        outputs: The local results.
        whole: The elements of its full results. A random operator draws a number for each of them on every
            rank, so that the random states of all ranks stay equal.
    """
    name = base_name(op)
    followed = sum(local.differentiable for local in inputs)
    if name in ALIASES or (name in ("contiguous", "to") and not outputs):
        return Work(), Work()
    moved = float(sum(local.nbytes for local in (*inputs, *outputs)))
    flops = _flops(name, inputs, outputs)
    if flops:
        # The backward of a product has one product for each operand that needs a gradient. Attention computes
        # its scores again and has four more products: five to the two of its forward.
        per_operand = 2.5 if name in _ATTENTION else float(min(followed, 2))
        # Attention also computes the softmax of its scores.
        scores = _SOFTMAX * flops / 4 / max(inputs[0].shape[-1], 1) if name in _ATTENTION else 0.0
        forward = Work(flops, moved, special=scores)
        return forward, Work(per_operand * flops, per_operand * moved, special=per_operand * scores)
    made = float(sum(local.numel for local in outputs))
    if name == "embedding":
        # A lookup reads only the rows that it returns, but backward writes a dense gradient of the table.
        moved = 2.0 * sum(local.nbytes for local in outputs)
        table = inputs[0].nbytes if inputs and inputs[0].differentiable else 0
        return Work(nbytes=moved), Work(nbytes=moved + table)
    special = max(made, float(inputs[0].numel) if inputs else 0.0) if name in _SPECIAL | _NORMS else 0.0
    drawn = float(whole) if name in _RANDOM and _draws(op) else 0.0
    backward = Work(nbytes=moved, special=2 * special) if followed else Work()
    return Work(nbytes=moved, special=special, random=drawn), backward


def _draws(op: Op) -> bool:
    if base_name(op) not in ("dropout", "native_dropout", "feature_dropout"):
        return True
    return len(op.args) < 3 or (bool(op.args[2]) and op.args[1] != 0)


def _flops(name: str, inputs: Sequence[Local], outputs: Sequence[Local]) -> float:
    made = sum(local.numel for local in outputs)
    if name in _MATMULS:
        first = 1 if name in _ADD_MATMULS and len(inputs) > 2 else 0
        return 2.0 * made * (inputs[first].shape[-1] if inputs[first].shape else 1)
    if name in _ATTENTION and len(inputs) >= 3:
        query, key = inputs[0], inputs[1]
        return 4.0 * query.numel * key.shape[-2]
    if name in _CONVOLUTIONS and len(inputs) >= 2:
        weight = inputs[1]
        pixels = inputs[0].numel if "transpose" in name else made
        return 2.0 * pixels * weight.numel / max(weight.shape[0], 1)
    return 0.0


def saved_by(op: Op, inputs: Sequence[Local], outputs: Sequence[Local]) -> Saved:
    """Return autograd's saved tensors of an operator on one rank; none if no operand needs a gradient."""
    name = base_name(op)
    followed = [position for position, local in enumerate(inputs) if local.differentiable]
    if not followed or name in _SAVES_NOTHING:
        return Saved()
    if name in _RANDOM or name == "cross_entropy_loss":
        mask = sum(local.numel for local in outputs) if _draws(op) else 0
        return Saved(more=mask if name in _RANDOM else inputs[0].nbytes)
    if name in _SAVES_OUTPUT:
        return Saved(output=True)
    if name in _MATMULS | _CONVOLUTIONS | {"mul", "div"}:
        return Saved(_partners(name, inputs, followed))
    if name in _NORMS:
        return Saved((0,))
    # Attention saves its result too.
    return Saved(tuple(range(len(inputs))), output=name not in _SPECIAL)


def _partners(name: str, inputs: Sequence[Local], followed: Sequence[int]) -> tuple[int, ...]:
    """Return the saved operands of a product: each factor, if the other one needs a gradient."""
    factors = [0, 1] if len(inputs) > 1 else [0]
    if name in _ADD_MATMULS and len(inputs) > 2:
        factors = [1, 2]
    if len(factors) == 1:
        return tuple(factors) if name == "einsum" else ()
    first, second = factors
    kept = ([first] if second in followed else []) + ([second] if first in followed else [])
    return tuple(kept)
