"""The cost model: seconds and bytes of what a plan may choose, for one rank of a unit.

`CostModel` is what a caller makes: hardware and how it is trained. `Prices` binds it to a graph and a mesh,
and answers for single operators, conversions and parameters; `plan.evaluation` sums a whole plan up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nnx_nnscaler.cost.hardware import Collective, Hardware
from nnx_nnscaler.cost.operators import ALIASES, Local, Saved, Work, base_name, saved_by, work_of
from nnx_nnscaler.cost.profiles import profile
from nnx_nnscaler.ir import Graph, Op, TensorMeta
from nnx_nnscaler.placement import Placement, R
from nnx_nnscaler.plan.conversion import Use, conversion
from nnx_nnscaler.plan.program_plan import Strategy
from nnx_nnscaler.rules.rule import outputs_of

__all__ = ["CostModel", "Price", "Prices", "Stored"]

BUCKET = 25 * 1024 * 1024
"""Bytes of a bucket of gradients, which are reduced together."""


class Stored(NamedTuple):
    """One way of storing a parameter.

    Attributes:
        placement: ``R`` or ``S``.
        synchronized: Whether its gradient is partial on every rank and summed by the reducer.
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
    """

    hardware: Hardware = profile("cpu")
    optimizer_states: int = 2
    state_bytes: int = 4
    master_bytes: int = 0

    def prices(self, graph: Graph, *, size: int, units: int = 1, zero: bool = False) -> Prices:
        """Prices for a graph on units of some ranks.

        Args:
            graph: What runs.
            size: Ranks of one unit.
            units: How many units share the work, each with its own batch.
            zero: Whether the units keep parameters, gradients and optimizer state in parts.
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
        dtype = outputs[0].dtype if outputs else "float32"
        calls = 0.4 if base_name(op) in ALIASES else 1.0
        seconds = calls * self.hardware.overhead + self._seconds(forward, dtype)
        if self.backward and any(local.differentiable for local in inputs):
            seconds += calls * self.hardware.overhead + self._seconds(backward, dtype)
        return Price(compute=seconds)

    def _seconds(self, work: Work, dtype: str) -> float:
        rates = self.hardware
        arithmetic = work.flops / rates.flops(dtype) + work.special / rates.special
        return max(work.nbytes / rates.bandwidth, arithmetic) + work.random / rates.random

    def saved(self, op: Op, strategy: Strategy) -> Saved:
        """What autograd keeps of an operator; nothing where no backward pass follows."""
        return saved_by(op, *self.locals_of(op, strategy)) if self.backward else Saved()

    # --- conversions ----------------------------------------------------------------------------

    def conversion(self, meta: TensorMeta, source: Placement, use: Use) -> Price:
        """What it costs to turn a value into what a consumer wants, there and back.

        Raises:
            ValueError: There is no such conversion.
        """
        change = conversion(source, use)
        if change is None:
            return Price()
        followed = self.backward and meta.differentiable
        if change.forward == "keep":
            return self._change(change.backward, meta) if followed else Price()
        price = self._change(change.forward, meta)
        return price.plus(self._change(change.backward, meta)) if followed else price

    def synchronized(self, meta: TensorMeta, target: Placement) -> Price:
        """What it costs to use a synchronized parameter where the gradient handed back is not partial.

        A replicated operator's gradient is divided by the ranks, that of a part is padded to the whole.
        """
        whole = self.local(meta, R).nbytes
        local = self.local(meta, target).nbytes
        return Price(compute=2 * self.hardware.overhead + (whole + 2 * local) / self.hardware.bandwidth)

    def _change(self, change: str, meta: TensorMeta) -> Price:
        whole = self.local(meta, R).nbytes
        if change == "keep":
            return Price(compute=0.4 * self.hardware.overhead)
        if change == "split":
            return Price(compute=self.hardware.overhead + 2 * whole / self.size / self.hardware.bandwidth)
        kind: Collective = change  # type: ignore[assignment]
        return Price(0.0, self._link.seconds(kind, whole, self.size), whole)

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

    def _reduction(self, local: Local, stored: Stored) -> Price:
        ranks = self.units * (self.size if stored.synchronized else 1)
        if ranks == 1:
            return Price()
        link = self.hardware.link(ranks, stride=1 if stored.synchronized else self.size)
        rate = link.throughput("all_reduce", ranks)
        if self.zero:
            outer = self.hardware.link(self.units, stride=self.size)
            rate = sum(outer.throughput(kind, self.units) for kind in ("all_gather", "reduce_scatter"))
            if stored.synchronized:
                rate += self._link.throughput("all_reduce", self.size) / self.units
        return Price(0.0, (1 - self.hardware.overlap) * local.nbytes * rate, local.nbytes)

    @cached_property
    def synchronization(self) -> Price:
        """What the first synchronized parameter costs: the start of a reduction that nothing else needs."""
        if self.units > 1 or not self.backward:
            return Price()
        return Price(0.0, (1 - self.hardware.overlap) * self._link.seconds("all_reduce", 4096, self.size))

    def kept(self, meta: TensorMeta, stored: Stored) -> int:
        """Bytes that a parameter takes all the time: itself, its gradient, the optimizer's state."""
        local = self.local(meta, stored.placement)
        model = self.model
        parts = self.units if self.zero else 1
        if not (self.backward and meta.differentiable):
            return -(-local.nbytes // parts) + (local.nbytes if parts > 1 else 0)
        state = model.optimizer_states * model.state_bytes + model.master_bytes
        in_parts = local.nbytes * 2 + local.numel * state
        # With ZeRO the gathered parameter stays until the backward pass is over.
        return -(-in_parts // parts) + (local.nbytes if parts > 1 else 0)
