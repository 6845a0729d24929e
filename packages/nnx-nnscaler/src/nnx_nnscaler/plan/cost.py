"""The cost model: seconds and bytes of a plan's options, for one rank of a unit.

`CostModel` describes the hardware and the training. `Prices` binds it to a graph and a mesh, and prices
single operators, conversions and parameters. `plan.evaluation` sums up a complete plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nnx_core.machine.hardware import Collective, Hardware, profile
from nnx_nnscaler.ir.graph import Graph, Op, TensorMeta
from nnx_nnscaler.ir.placement import Placement, R, Strategy, Use, conversion
from nnx_nnscaler.plan.extra_work import Extra, extra_work
from nnx_nnscaler.plan.recompute import recomputed_owner
from nnx_nnscaler.plan.work import ALIASES, Local, Saved, Work, base_name, bytes_of, saved_by, work_of
from nnx_nnscaler.rules.rule import outputs_of

# Constants in units of one small operator's overhead.


_VIEW = 0.4
"""The cost of a view."""
_FUNCTION = 1.5
"""The overhead of an autograd function, besides its work."""
_REDUCED = 1.5
"""The reducer's overhead for one gradient: two hooks, a copy, and setting it."""
_IN_ROWS = 6.0
"""The reducer's overhead for one parameter that ZeRO stores in rows and gathers."""
_SMALL = 4096
"""The bytes of a collective so small that only its start costs time."""


class Stored(NamedTuple):
    """The storage of a parameter.

    Attributes:
        placement: The placement, ``R`` or ``S``.
        synchronized: True if its gradient is partial on every rank and summed by the reducer.
    """

    placement: Placement
    synchronized: bool = False


class Price(NamedTuple):
    """A cost on one rank.

    Attributes:
        compute: The seconds of computation, forward and backward.
        communication: The seconds of collectives, forward and backward.
        moved: The bytes of the tensors in collectives.
    """

    compute: float = 0.0
    communication: float = 0.0
    moved: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of its times."""
        return self.compute + self.communication

    def plus(self, other: Price) -> Price:
        """Return the sum of two prices."""
        return Price(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The figures that predict time and memory of a plan.

    Args:
        hardware: The rates and links; by default the published figures of a plain CPU.
        optimizer_states: The number of state tensors per parameter: 2 for Adam, 0 for plain SGD.
        state_bytes: The bytes of each of their elements.
        master_bytes: The bytes of each element of FP32 master weights; 0 without them.
        recompute: The name patterns of submodules whose activations are recomputed in backward.
    """

    hardware: Hardware = profile("cpu")
    optimizer_states: int = 2
    state_bytes: int = 4
    master_bytes: int = 0
    recompute: tuple[str, ...] = ()

    def prices(self, graph: Graph, *, size: int, units: int = 1, zero: bool = False) -> Prices:
        """Return the prices for a graph on a mesh.

        Args:
            graph: The graph that runs.
            size: The number of ranks of one unit.
            units: The number of units, each with its own batch.
            zero: True if the units shard parameters, gradients and optimizer state.
        """
        return Prices(self, graph, size=size, units=units, zero=zero)


class Prices:
    """The prices of options for one graph on one mesh; see `CostModel.prices`."""

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

    def locals_of(self, op: Op, strategy: Strategy) -> tuple[list[Local], list[Local]]:
        """Return the local operands and results of one rank."""
        metas = [self.graph.meta(name) for name in op.operands()]
        return (
            [self.local(meta, placement) for meta, placement in zip(metas, strategy.inputs, strict=True)],
            [self.local(m, placement) for m, placement in zip(outputs_of(op), strategy.outputs, strict=True)],
        )

    def local(self, meta: TensorMeta, placement: Placement) -> Local:
        """Return the local tensor of one rank."""
        return Local(placement.local_shape(meta.hints, self.size), meta.dtype, meta.differentiable)

    def operator(self, op: Op, strategy: Strategy) -> Price:
        """Return one rank's cost of an operator."""
        inputs, outputs = self.locals_of(op, strategy)
        whole = sum(self.local(meta, R).numel for meta in outputs_of(op))
        forward, backward = work_of(op, inputs, outputs, whole=whole)
        more, more_back = extra_work(op, strategy, inputs, outputs, size=self.size)
        dtype = outputs[0].dtype if outputs else "float32"
        calls = _VIEW if base_name(op) in ALIASES else 1.0
        price = self._work(forward, more, dtype, calls)
        # Backward runs the forward of a recomputed submodule again.
        if op.name in self.recomputed:
            price = price.plus(price)
        if self.backward and any(local.differentiable for local in inputs):
            price = price.plus(self._work(backward, more_back, dtype, calls))
        return price

    def _work(self, work: Work, more: Extra, dtype: str, calls: float) -> Price:
        """Return the price of one direction of an operator, with the extra work of the runtime."""
        rates = self.hardware
        arithmetic = work.flops / rates.flops(dtype) + work.special / rates.special
        # Memory traffic overlaps with arithmetic (a roofline); passes of the runtime come on top.
        seconds = max(work.nbytes / rates.bandwidth, arithmetic) + work.random / rates.random
        seconds += more.nbytes / rates.bandwidth + more.special / rates.special
        price = Price(compute=seconds + (calls + more.calls) * rates.overhead)
        for kind, whole in more.collectives:
            price = price.plus(self._collective(kind, whole))
        return price

    def _collective(self, kind: Collective, whole: float) -> Price:
        return Price(0.0, self._link.seconds(kind, whole, self.size), whole)

    def saved(self, op: Op, strategy: Strategy) -> Saved:
        """Return autograd's saved tensors of an operator; none if no backward follows.

        A recomputed submodule saves only the values that enter it.
        """
        saved = self.saved_in_backward(op, strategy)
        owner = self.recomputed.get(op.name)
        if owner is None:
            return saved
        names = op.operands()
        return Saved(tuple(at for at in saved.operands if self.recomputed.get(names[at]) != owner))

    def saved_in_backward(self, op: Op, strategy: Strategy) -> Saved:
        """Return the saved tensors during backward, when recomputed submodules have run again."""
        return saved_by(op, *self.locals_of(op, strategy)) if self.backward else Saved()

    def conversion(self, meta: TensorMeta, source: Placement, use: Use, *, again: bool = False) -> Price:
        """Return the cost of converting a value for a consumer, forward and backward.

        Args:
            meta: The value.
            source: The placement of its producer.
            use: The placement that the consumer needs.
            again: True if backward repeats the conversion, in a recomputed submodule.

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
        """Return the cost of using a synchronized parameter with a gradient that is not partial.

        The gradient becomes partial: that of a replicated operator is divided by the ranks, and that of a
        shard is padded to the full shape.
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
        # With groups the runtime gathers and splits instead.
        if change == "all_to_all" and groups:
            return self._collective("all_gather", whole).plus(Price(compute=split))
        kind: Collective = change  # type: ignore[assignment]
        return self._collective(kind, whole)

    def parameter(self, meta: TensorMeta, stored: Stored) -> Price:
        """Return the cost of reducing a parameter's gradient and updating it."""
        if not (self.backward and meta.differentiable):
            return Price()
        local = self.local(meta, stored.placement)
        updated = local.numel / (self.units if self.zero else 1)
        # The hardware's figure was measured with two states.
        share = (1 + self.model.optimizer_states) / 3
        update = self.hardware.update_overhead + share * updated * self.hardware.update
        return Price(compute=update).plus(self._reduction(local, stored))

    def is_reduced(self, stored: Stored) -> bool:
        """Return True if a parameter's gradient goes through the reducer."""
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
        # The rest of the reduction is hidden behind backward.
        shown = 1 - self.hardware.overlap
        copying = passes * local.nbytes / self.hardware.bandwidth
        return Price(
            calls * self.hardware.overhead + shown * copying, shown * local.nbytes * rate, local.nbytes
        )

    @cached_property
    def synchronization(self) -> Price:
        """Return the cost of the first synchronized parameter: the start of a reduction."""
        if self.units > 1 or not self.backward:
            return Price()
        return self._start(("all_reduce",), self.size)

    @cached_property
    def standing(self) -> Price:
        """Return the fixed cost of a step: the start of the reduction over units."""
        if self.units == 1 or not self.backward:
            return Price()
        kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
        return self._start(kinds if self.zero else ("all_reduce",), self.units, stride=self.size)

    def _start(self, kinds: Sequence[Collective], ranks: int, *, stride: int = 1) -> Price:
        link = self.hardware.link(ranks, stride=stride)
        shown = 1 - self.hardware.overlap
        return Price(0.0, shown * sum(link.seconds(kind, _SMALL, ranks) for kind in kinds))

    def lasting(self, meta: TensorMeta, stored: Stored) -> int:
        """Return the bytes of a parameter that last: the parameter, its state, its reduction buffer."""
        local = self.local(meta, stored.placement)
        parts = self.units if self.zero else 1
        # With ZeRO the gathered parameter stays until the end of backward.
        gathered = local.nbytes if parts > 1 else 0
        if not (self.backward and meta.differentiable):
            return -(-local.nbytes // parts) + gathered
        model = self.model
        state = model.optimizer_states * model.state_bytes + model.master_bytes
        room = local.nbytes if self.is_reduced(stored) else 0
        return -(-(local.nbytes + local.numel * state) // parts) + gathered + room

    def gradient(self, meta: TensorMeta, stored: Stored) -> int:
        """Return the bytes of a parameter's gradient until the optimizer step."""
        if not (self.backward and meta.differentiable):
            return 0
        local = self.local(meta, stored.placement)
        return -(-local.nbytes // (self.units if self.zero else 1))

    def states(self, meta: TensorMeta, stored: Stored) -> int:
        """Return the bytes of a parameter, its gradient and optimizer state on the rank with most rows."""
        local = self.local(meta, stored.placement)
        count, each = local.numel, bytes_of(local.dtype)
        if self.zero and local.shape:
            count = -(-local.shape[0] // self.units) * math.prod(local.shape[1:])
        if self.backward and meta.differentiable:
            each += each + self.model.optimizer_states * self.model.state_bytes + self.model.master_bytes
        return count * each

    def kept(self, meta: TensorMeta, stored: Stored) -> int:
        """Return the bytes of a parameter while it has a gradient."""
        return self.lasting(meta, stored) + self.gradient(meta, stored)
