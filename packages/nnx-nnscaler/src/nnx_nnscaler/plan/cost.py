"""The cost model: seconds and bytes of what a plan may choose, for one rank of a unit.

`CostModel` is what a caller makes: hardware and how it is trained. `Prices` binds it to a graph and a mesh,
and answers for single operators, conversions and parameters; `plan.evaluation` sums a whole plan up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nnx_core.machine.hardware import Collective, Hardware, profile
from nnx_nnscaler.ir.graph import Graph, Op, TensorMeta
from nnx_nnscaler.ir.placement import P, Placement, R, Strategy, Use, conversion
from nnx_nnscaler.plan.recompute import recomputed_owner
from nnx_nnscaler.rules.rule import outputs_of

# --- what operators do ----------------------------------------------------------------------------
# What single operators do: operations, bytes, and what autograd keeps of them until the backward pass.
#
# It owns counts; `hardware` has the rates. Counts are of one rank: shapes come in as that rank's local
# ones. An operator that is not listed counts as memory-bound, and as keeping all that goes into it.


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
"""Operators whose results share their operand's memory, as a rule."""

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
"""What an element of attention's scores takes, in elements of a special operator; measured on a CPU."""


class Local(NamedTuple):
    """One tensor as a rank holds it."""

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * bytes_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator does in one direction.

    Attributes:
        flops: Operations of matrix products.
        nbytes: Bytes read and written.
        special: Elements that take more than reading and writing.
        random: Random numbers drawn.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    special: float = 0.0
    random: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps of an operator.

    Attributes:
        operands: Positions of the operands that are kept.
        output: True if its results are kept.
        more: Further bytes: masks, statistics.
    """

    operands: tuple[int, ...] = ()
    output: bool = False
    more: int = 0


def base_name(op: Op) -> str:
    """``"linear"`` of ``"aten.linear.default"``."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]


def bytes_of(dtype: str) -> int:
    """Bytes of one element."""
    return _WIDTH.get(dtype, 1 if dtype.startswith("float8") else 4)


def work_of(op: Op, inputs: Sequence[Local], outputs: Sequence[Local], *, whole: int) -> tuple[Work, Work]:
    """What the forward and the backward pass of an operator do on one rank.

    Args:
        op: The operator.
        inputs: Its operands.
        outputs: Its results.
        whole: Elements of its results on all ranks together: so many random numbers are drawn, in order that
            the ranks stay in step.
    """
    name = base_name(op)
    followed = sum(local.differentiable for local in inputs)
    if name in ALIASES or (name in ("contiguous", "to") and not outputs):
        return Work(), Work()
    moved = float(sum(local.nbytes for local in (*inputs, *outputs)))
    flops = _flops(name, inputs, outputs)
    if flops:
        per_operand = 2.5 if name in _ATTENTION else float(min(followed, 2))
        # Besides its products, attention takes the softmax of its scores.
        scores = _SOFTMAX * flops / 4 / max(inputs[0].shape[-1], 1) if name in _ATTENTION else 0.0
        forward = Work(flops, moved, special=scores)
        return forward, Work(per_operand * flops, per_operand * moved, special=per_operand * scores)
    made = float(sum(local.numel for local in outputs))
    if name == "embedding":
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
    """What autograd keeps of an operator on one rank; nothing where no operand is followed."""
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
    return Saved(tuple(range(len(inputs))), output=name not in _SPECIAL)  # attention too


def _partners(name: str, inputs: Sequence[Local], followed: Sequence[int]) -> tuple[int, ...]:
    """Of a product, each factor is kept for the gradient of the other one."""
    factors = [0, 1] if len(inputs) > 1 else [0]
    if name in _ADD_MATMULS and len(inputs) > 2:
        factors = [1, 2]
    if len(factors) == 1:
        return tuple(factors) if name == "einsum" else ()
    first, second = factors
    kept = ([first] if second in followed else []) + ([second] if first in followed else [])
    return tuple(kept)


# --- prices ---------------------------------------------------------------------------------------
# Counts times the rates of the hardware.


_VIEW = 0.4
"""What a view costs, in operators of next to nothing; and what a function of autograd adds to its work."""
_FUNCTION = 1.5
_REDUCED = 1.5
"""What the reducer does for one gradient, likewise: two hooks, a copy, handing it out."""
_SMALL = 4096
"""Bytes of a collective that only costs its start."""
_IN_ROWS = 6.0
"""The same where ZeRO stores rows, and a parameter is looked up in what was gathered."""


class Stored(NamedTuple):
    """One way of storing a parameter.

    Attributes:
        placement: ``R`` or ``S``.
        synchronized: True if its gradient is partial on every rank and summed by the reducer.
    """

    placement: Placement
    synchronized: bool = False


class Price(NamedTuple):
    """What something costs on one rank.

    Attributes:
        compute: Seconds of computation, forward and backward.
        communication: Seconds of collectives, forward and backward.
        moved: Bytes of the tensors that collectives work on.
    """

    compute: float = 0.0
    communication: float = 0.0
    moved: float = 0.0

    @property
    def seconds(self) -> float:
        """All of its time."""
        return self.compute + self.communication

    def plus(self, other: Price) -> Price:
        """Both together."""
        return Price(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """How time and memory of a plan are predicted.

    Args:
        hardware: Rates and links; the published figures of a plain CPU by default.
        optimizer_states: Tensors that the optimizer keeps for each parameter: 2 for Adam, 0 for plain SGD.
        state_bytes: Bytes of each of their elements.
        master_bytes: Bytes for each element of a master copy of the parameters; 0 without.
        recompute: Patterns of names of submodules whose activations are recomputed in the backward pass.
    """

    hardware: Hardware = profile("cpu")
    optimizer_states: int = 2
    state_bytes: int = 4
    master_bytes: int = 0
    recompute: tuple[str, ...] = ()

    def prices(self, graph: Graph, *, size: int, units: int = 1, zero: bool = False) -> Prices:
        """Prices for a graph on units of some ranks.

        Args:
            graph: The graph that runs.
            size: Ranks of one unit.
            units: The number of units that share the work, each with its own batch.
            zero: True if the units keep parameters, gradients and optimizer state in parts.
        """
        return Prices(self, graph, size=size, units=units, zero=zero)


class Prices:
    """Prices of choices for one graph on one mesh; see `CostModel.prices`."""

    def __init__(self, model: CostModel, graph: Graph, *, size: int, units: int, zero: bool) -> None:
        self.model = model
        self.hardware = model.hardware
        self.graph = graph
        self.size = size
        self.units = units
        self.zero = zero and units > 1
        self.backward = graph.training
        self._link = self.hardware.link(size)
        patterns = model.recompute if self.backward else ()
        owners = ((op.name, recomputed_owner(op.module, patterns)) for op in graph.ops if patterns)
        self.recomputed: Mapping[str, str] = {name: owner for name, owner in owners if owner is not None}

    # --- operators ------------------------------------------------------------------------------

    def locals_of(self, op: Op, strategy: Strategy) -> tuple[list[Local], list[Local]]:
        """Operands and results as one rank holds them."""
        metas = [self.graph.meta(name) for name in op.operands()]
        return (
            [self.local(meta, placement) for meta, placement in zip(metas, strategy.inputs, strict=True)],
            [self.local(m, placement) for m, placement in zip(outputs_of(op), strategy.outputs, strict=True)],
        )

    def local(self, meta: TensorMeta, placement: Placement) -> Local:
        """A tensor as one rank holds it."""
        return Local(placement.local_shape(meta.hints, self.size), meta.dtype, meta.differentiable)

    def operator(self, op: Op, strategy: Strategy) -> Price:
        """What one rank spends on an operator."""
        inputs, outputs = self.locals_of(op, strategy)
        whole = sum(self.local(meta, R).numel for meta in outputs_of(op))
        forward, backward = work_of(op, inputs, outputs, whole=whole)
        more, more_back = extra_work(op, strategy, inputs, outputs, size=self.size)
        dtype = outputs[0].dtype if outputs else "float32"
        calls = _VIEW if base_name(op) in ALIASES else 1.0
        price = self._work(forward, more, dtype, calls)
        if op.name in self.recomputed:
            price = price.plus(price)
        if self.backward and any(local.differentiable for local in inputs):
            price = price.plus(self._work(backward, more_back, dtype, calls))
        return price

    def _work(self, work: Work, more: Extra, dtype: str, calls: float) -> Price:
        """An operator in one direction, with what the runtime's function adds."""
        rates = self.hardware
        arithmetic = work.flops / rates.flops(dtype) + work.special / rates.special
        seconds = max(work.nbytes / rates.bandwidth, arithmetic) + work.random / rates.random
        seconds += more.nbytes / rates.bandwidth + more.special / rates.special
        price = Price(compute=seconds + (calls + more.calls) * rates.overhead)
        for kind, whole in more.collectives:
            price = price.plus(self._collective(kind, whole))
        return price

    def _collective(self, kind: Collective, whole: float) -> Price:
        return Price(0.0, self._link.seconds(kind, whole, self.size), whole)

    def saved(self, op: Op, strategy: Strategy) -> Saved:
        """What autograd keeps of an operator; nothing where no backward pass follows.

        Of a submodule that is recomputed, what comes into it.
        """
        saved = self.saved_in_backward(op, strategy)
        owner = self.recomputed.get(op.name)
        if owner is None:
            return saved
        names = op.operands()
        return Saved(tuple(at for at in saved.operands if self.recomputed.get(names[at]) != owner))

    def saved_in_backward(self, op: Op, strategy: Strategy) -> Saved:
        """As `saved`; of a submodule that is recomputed, what is kept once it has been."""
        return saved_by(op, *self.locals_of(op, strategy)) if self.backward else Saved()

    # --- conversions ----------------------------------------------------------------------------

    def conversion(self, meta: TensorMeta, source: Placement, use: Use, *, again: bool = False) -> Price:
        """What it costs to turn a value into what a consumer wants, there and back.

        Args:
            meta: The value.
            source: The placement that it comes in.
            use: The placement that the consumer wants.
            again: True if it is made once more in the backward pass.

        Raises:
            ValueError: There is no such conversion.
        """
        change = conversion(source, use)
        if change is None:
            return Price()
        groups = use.placement.groups > 1 or source.groups > 1
        followed = self.backward and meta.differentiable
        if change.forward == "keep" and not followed:
            return Price()
        price = self._change(change.forward, meta, groups=groups)
        if again:
            price = price.plus(price)
        if not followed:
            return price
        function = Price(compute=_FUNCTION * self.hardware.overhead)
        return price.plus(function).plus(self._change(change.backward, meta, groups=groups))

    def synchronized(self, meta: TensorMeta, target: Placement) -> Price:
        """What it costs to use a synchronized parameter where the gradient handed back is not partial.

        A replicated operator's gradient is divided by the ranks, that of a part is padded to the whole.
        """
        whole = self.local(meta, R).nbytes
        local = self.local(meta, target).nbytes
        return Price(compute=2 * self.hardware.overhead + (whole + 2 * local) / self.hardware.bandwidth)

    def _change(self, change: str, meta: TensorMeta, *, groups: bool) -> Price:
        whole = self.local(meta, R).nbytes
        split = self.hardware.overhead + 2 * whole / self.size / self.hardware.bandwidth
        if change == "keep":
            return Price(compute=_VIEW * self.hardware.overhead)
        if change == "split":
            return Price(compute=split)
        if change == "all_to_all" and groups:  # is gathered and split
            return self._collective("all_gather", whole).plus(Price(compute=split))
        kind: Collective = change  # type: ignore[assignment]
        return self._collective(kind, whole)

    # --- parameters -----------------------------------------------------------------------------

    def parameter(self, meta: TensorMeta, stored: Stored) -> Price:
        """What it costs to reduce a parameter's gradient and to update it."""
        if not (self.backward and meta.differentiable):
            return Price()
        local = self.local(meta, stored.placement)
        updated = local.numel / (self.units if self.zero else 1)
        share = (1 + self.model.optimizer_states) / 3  # as measured with two states
        update = self.hardware.update_overhead + share * updated * self.hardware.update
        return Price(compute=update).plus(self._reduction(local, stored))

    def is_reduced(self, stored: Stored) -> bool:
        """Whether a parameter's gradient goes through the reducer."""
        return self.units > 1 or (stored.synchronized and self.size > 1)

    def _reduction(self, local: Local, stored: Stored) -> Price:
        if not self.is_reduced(stored):
            return Price()
        ranks = self.units * (self.size if stored.synchronized else 1)
        link = self.hardware.link(ranks, stride=1 if stored.synchronized else self.size)
        rate, calls, passes = link.throughput("all_reduce", ranks), _REDUCED, 3
        if self.zero:
            outer = self.hardware.link(self.units, stride=self.size)
            rate = sum(outer.throughput(kind, self.units) for kind in ("all_gather", "reduce_scatter"))
            calls, passes = _IN_ROWS, 6
            if stored.synchronized:
                rate += self._link.throughput("all_reduce", self.size) / self.units
        shown = 1 - self.hardware.overlap
        copying = passes * local.nbytes / self.hardware.bandwidth
        return Price(
            calls * self.hardware.overhead + shown * copying, shown * local.nbytes * rate, local.nbytes
        )

    @cached_property
    def synchronization(self) -> Price:
        """What the first synchronized parameter costs: the start of a reduction that nothing else needs."""
        if self.units > 1 or not self.backward:
            return Price()
        return self._start(("all_reduce",), self.size)

    @cached_property
    def standing(self) -> Price:
        """What a step costs whatever is chosen: the start of the reduction over units."""
        if self.units == 1 or not self.backward:
            return Price()
        kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
        return self._start(kinds if self.zero else ("all_reduce",), self.units, stride=self.size)

    def _start(self, kinds: Sequence[Collective], ranks: int, *, stride: int = 1) -> Price:
        link = self.hardware.link(ranks, stride=stride)
        shown = 1 - self.hardware.overlap
        return Price(0.0, shown * sum(link.seconds(kind, _SMALL, ranks) for kind in kinds))

    # --- memory ---------------------------------------------------------------------------------

    def lasting(self, meta: TensorMeta, stored: Stored) -> int:
        """Bytes that a parameter takes all the time: itself, its state, room for its reduction."""
        local = self.local(meta, stored.placement)
        parts = self.units if self.zero else 1
        # With ZeRO the gathered parameter stays until the backward pass is over.
        gathered = local.nbytes if parts > 1 else 0
        if not (self.backward and meta.differentiable):
            return -(-local.nbytes // parts) + gathered
        model = self.model
        state = model.optimizer_states * model.state_bytes + model.master_bytes
        room = local.nbytes if self.is_reduced(stored) else 0
        return -(-(local.nbytes + local.numel * state) // parts) + gathered + room

    def gradient(self, meta: TensorMeta, stored: Stored) -> int:
        """Bytes of a parameter's gradient, from when autograd has made it until the step."""
        if not (self.backward and meta.differentiable):
            return 0
        local = self.local(meta, stored.placement)
        return -(-local.nbytes // (self.units if self.zero else 1))

    def states(self, meta: TensorMeta, stored: Stored) -> int:
        """Bytes of a parameter, its gradient and its optimizer's state, where the most rows are stored."""
        local = self.local(meta, stored.placement)
        count, each = local.numel, bytes_of(local.dtype)
        if self.zero and local.shape:
            count = -(-local.shape[0] // self.units) * math.prod(local.shape[1:])
        if self.backward and meta.differentiable:
            each += each + self.model.optimizer_states * self.model.state_bytes + self.model.master_bytes
        return count * each

    def kept(self, meta: TensorMeta, stored: Stored) -> int:
        """Bytes that a parameter takes when its gradient is there."""
        return self.lasting(meta, stored) + self.gradient(meta, stored)


# --- rewritten -------------------------------------------------------------------------------------------
#
# What the runtime's own functions do besides the operator that they stand for.
#
# That is collectives, small operators and further passes over a tensor. It owns the counts, taken from the
# code in `nnx_nnscaler.runtime`; a function that is not listed does what its operator does.


@dataclass(frozen=True, slots=True)
class Extra:
    """Further work in one direction on one rank.

    Attributes:
        calls: Small operators.
        nbytes: Bytes that passes over large tensors read and write.
        special: Elements that take more than reading and writing.
        collectives: Kind and whole bytes of each.
    """

    calls: float = 0.0
    nbytes: float = 0.0
    special: float = 0.0
    collectives: tuple[tuple[Collective, float], ...] = ()


NOTHING = Extra()
_Both = tuple[Extra, Extra]
_SCALAR = 8.0


def extra_work(
    op: Op, strategy: Strategy, inputs: Sequence[Local], outputs: Sequence[Local], *, size: int
) -> _Both:
    """What comes on top of an operator in the forward and in the backward pass.

    Args:
        op: The operator.
        strategy: The strategy by which it is split.
        inputs: Its operands as one rank holds them.
        outputs: Its results likewise.
        size: Ranks of the unit.
    """
    if strategy.is_replicated and not strategy.call:
        return NOTHING, NOTHING
    of_call = _OF_CALLS.get(strategy.call)
    if of_call is not None:
        return of_call(inputs, size)
    if strategy.outputs and strategy.outputs[0] == P:
        of_summand = _OF_SUMMANDS.get(base_name(op))
        if of_summand is not None:
            return of_summand([*inputs, *outputs], size)
    return NOTHING, NOTHING


def _vocabulary_cross_entropy(inputs: Sequence[Local], size: int) -> _Both:
    scores = inputs[0]
    rows = scores.nbytes / max(scores.shape[1], 1)
    exchanged: tuple[tuple[Collective, float], ...] = (("all_gather", size * rows), ("all_reduce", 2 * rows))
    # Forward: the maxima, shifted scores, powers, their sum and the kept chances; backward: two passes.
    forward = Extra(calls=20, nbytes=8 * scores.nbytes, collectives=exchanged)
    return forward, Extra(calls=6, nbytes=4 * scores.nbytes)


def _batch_norm_over_unit(inputs: Sequence[Local], size: int) -> _Both:
    x = inputs[0]
    channels = 4.0 * (x.shape[1] if len(x.shape) > 1 else 1)
    # Forward: mean and variance, in a pass of their own. Backward: what flows through the statistics.
    forward = Extra(
        calls=12, nbytes=x.nbytes, special=x.numel, collectives=(("all_gather", 2 * size * channels),)
    )
    return forward, Extra(calls=14, nbytes=9 * x.nbytes, collectives=(("all_reduce", 2 * channels),))


def _batch_norm_of_channels(inputs: Sequence[Local], size: int) -> _Both:
    x = inputs[0]
    channels = 4.0 * size * (x.shape[1] if len(x.shape) > 1 else 1)
    return Extra(calls=8, collectives=(("all_gather", 2 * channels),)), NOTHING


def _mean_over_samples(tensors: Sequence[Local], size: int) -> _Both:
    """The samples that count are counted over all ranks."""
    return Extra(calls=6, collectives=(("all_reduce", _SCALAR),)), Extra(calls=3)


def _rows_of_a_table(tensors: Sequence[Local], size: int) -> _Both:
    """Rows of other ranks are looked up as the first one, and masked."""
    found = tensors[-1]
    return Extra(calls=8, nbytes=2 * found.nbytes), Extra(calls=1, nbytes=2 * found.nbytes)


_OF_CALLS: dict[str, Callable[[Sequence[Local], int], _Both]] = {
    "vocabulary_cross_entropy": _vocabulary_cross_entropy,
    "batch_norm_over_unit": _batch_norm_over_unit,
    "batch_norm_of_channels": _batch_norm_of_channels,
}
_OF_SUMMANDS: dict[str, Callable[[Sequence[Local], int], _Both]] = {
    "cross_entropy_loss": _mean_over_samples,
    "nll_loss": _mean_over_samples,
    "nll_loss2d": _mean_over_samples,
    "nll_loss_nd": _mean_over_samples,
    "embedding": _rows_of_a_table,
}
