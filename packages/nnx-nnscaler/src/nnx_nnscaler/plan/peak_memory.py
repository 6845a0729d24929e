"""Predict the peak memory of a plan on one rank from the live tensors at every moment of a step.

The solver counts only parameters and autograd's saved tensors, which are linear in its choices. This walk
through forward and backward decides whether a plan keeps a memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from nnx_nnscaler.ir.graph import Op
from nnx_nnscaler.ir.placement import Placement, R, Strategy, uses_of
from nnx_nnscaler.plan.cost import Prices
from nnx_nnscaler.plan.flow import Assignment, Flow
from nnx_nnscaler.plan.work import ALIASES, Saved, base_name
from nnx_nnscaler.rules.rule import outputs_of

_Tensor = tuple[str, Placement]
"""A tensor in memory: the value whose storage it is, in a placement."""


def peak_memory(flow: Flow, assignment: Assignment, prices: Prices) -> int:
    """Return the largest number of bytes alive at one moment on one rank."""
    graph = flow.graph
    lasting = sum(prices.lasting(graph.metas[name], stored) for name, stored in assignment.stored.items())
    others = [name for name in graph.metas if name not in assignment.stored]
    lasting += sum(prices.local(graph.metas[name], R).nbytes for name in others)
    step = _Step(flow, assignment, prices)
    if not prices.backward:
        return lasting + step.forward()
    return lasting + max(step.forward(), step.backward(), _update(flow, assignment, prices))


def activations(flow: Flow, assignment: Assignment, prices: Prices) -> tuple[int, int]:
    """Return autograd's saved bytes of a batch, and the peak of all other tensors.

    The peak leaves out parameters and their gradients.
    """
    step = _Step(flow, assignment, prices)
    if not prices.backward:
        return 0, step.forward()
    kept = sum(step.kept_by_operator().values())
    return kept, max(step.forward(), step.backward(of_parameters=False)) - kept


def kept_by_operator(flow: Flow, assignment: Assignment, prices: Prices) -> Mapping[str, int]:
    """Return autograd's saved bytes, by the first operator that saves them."""
    return _Step(flow, assignment, prices).kept_by_operator()


def _update(flow: Flow, assignment: Assignment, prices: Prices) -> int:
    """Return the bytes during the optimizer step: gradients, and one temporary result."""
    # Without ZeRO, reduced gradients are views of the reduction buffers, which `lasting` counts.
    metas = flow.graph.metas
    gradients = [
        (prices.gradient(metas[name], stored), prices.is_reduced(stored))
        for name, stored in assignment.stored.items()
    ]
    own = sum(nbytes for nbytes, reduced in gradients if prices.zero or not reduced)
    return own + max((nbytes for nbytes, _ in gradients), default=0)


class _Step:
    """The tensors of one step, operator by operator."""

    def __init__(self, flow: Flow, assignment: Assignment, prices: Prices) -> None:
        self._flow = flow
        self._assignment = assignment
        self._prices = prices
        self._ops = list(flow.ops.values())
        self._made: list[list[_Tensor]] = []
        self._kept: list[set[_Tensor]] = []
        self._more: list[int] = []
        self._again: dict[str, dict[_Tensor, int]] = {}
        self._bytes: dict[_Tensor, int] = {}
        last: dict[_Tensor, int] = {}
        for index in range(len(self._ops)):
            used, made, kept, more = self._tensors(index)
            self._made.append(made)
            self._kept.append(kept)
            self._more.append(more)
            for tensor in (*used, *made):
                last[tensor] = index
        for name in flow.values():
            if any(not consumer.op for consumer in flow.values()[name]):
                last[flow.storage(name), R] = len(self._ops)
        self._last = last

    def _tensors(self, index: int) -> tuple[list[_Tensor], list[_Tensor], set[_Tensor], int]:
        """Return an operator's inputs and outputs, with conversions, its saved tensors, and further bytes."""
        op, flow = self._ops[index], self._flow
        strategy = self._assignment.choices[op.name]
        saved = self._prices.saved(op, strategy)
        self._count_recomputed(op, strategy, saved)
        inputs, outputs = self._prices.locals_of(op, strategy)
        used, made, kept = [], [], set()
        for position, (name, use) in enumerate(zip(op.operands(), uses_of(strategy), strict=True)):
            # Parameters and inputs in their own placement are counted as lasting.
            if name in flow.graph.metas and use.placement == self._assignment.placement(flow, name):
                continue
            tensor = (flow.storage(name), use.placement)
            used.append(tensor)
            # Not made by an operator before: a conversion makes it, once for all consumers.
            if tensor not in self._bytes:
                self._bytes[tensor] = inputs[position].nbytes
                made.append(tensor)
            if position in saved.operands:
                kept.add(tensor)
        if base_name(op) not in ALIASES and not (op.target == "module" and isinstance(op.output, tuple)):
            for name, local, placement in zip(
                self._results(op.name), outputs, strategy.outputs, strict=False
            ):
                tensor = (name, placement)
                self._bytes[tensor] = local.nbytes
                made.append(tensor)
                if saved.output:
                    kept.add(tensor)
        return used, made, kept, saved.more

    def _count_recomputed(self, op: Op, strategy: Strategy, saved: Saved) -> None:
        """Count the tensors that a recomputed submodule has again in its backward."""
        owner = self._prices.recomputed.get(op.name)
        if owner is None:
            return
        inside = self._prices.saved_in_backward(op, strategy)
        inputs, outputs = self._prices.locals_of(op, strategy)
        names, uses = op.operands(), uses_of(strategy)
        again = self._again.setdefault(owner, {})
        # Masks and statistics are no values of the graph, so they get a key of their own.
        again[f"{op.name}: more", R] = inside.more
        for at in set(inside.operands) - set(saved.operands):
            again[self._flow.storage(names[at]), uses[at].placement] = inputs[at].nbytes
        if inside.output:
            for name, local, placement in zip(
                self._results(op.name), outputs, strategy.outputs, strict=False
            ):
                again[name, placement] = local.nbytes

    def _results(self, name: str) -> list[str]:
        """Return the names of an operator's results."""
        picks = sorted(
            (source.position, pick) for pick, source in self._flow.picks.items() if source.name == name
        )
        count = len(outputs_of(self._flow.ops[name]))
        named = dict(picks)
        return [named.get(position, name) for position in range(count)]

    def kept_by_operator(self) -> dict[str, int]:
        """Return the bytes saved for backward, by the first operator that saves them."""
        keepers = self._keepers()
        return {
            op.name: self._more[index] + sum(self._bytes[t] for t in self._kept[index] if keepers[t] == index)
            for index, op in enumerate(self._ops)
        }

    def _keepers(self) -> dict[_Tensor, int]:
        """Return the first operator that saves each tensor."""
        # Backward runs in reverse order, so the first saver is the last to need it: then it is freed.
        keepers: dict[_Tensor, int] = {}
        for index, kept in enumerate(self._kept):
            for tensor in kept:
                keepers.setdefault(tensor, index)
        return keepers

    def forward(self) -> int:
        """Return the peak of the forward pass."""
        ends: dict[int, list[_Tensor]] = {}
        for tensor, index in self._last.items():
            ends.setdefault(index, []).append(tensor)
        lasting = set().union(*self._kept) if self._kept and self._prices.backward else set()
        alive = peak = 0
        for index in range(len(self._ops)):
            alive += sum(self._bytes[tensor] for tensor in self._made[index]) + self._more[index]
            peak = max(peak, alive)
            gone = [tensor for tensor in ends.get(index, []) if tensor not in lasting]
            alive -= sum(self._bytes.get(tensor, 0) for tensor in gone)
        return peak

    def backward(self, *, of_parameters: bool = True) -> int:
        """Return the peak of the backward pass: saved tensors, and live gradients.

        Args:
            of_parameters: False to leave out gradients of parameters.
        """
        keepers = self._keepers()
        alive = sum(self._bytes[tensor] for tensor in keepers) + sum(self._more)
        gradients: dict[str, int] = {}
        made: dict[str, int] = {}
        peak = alive
        for index in reversed(range(len(self._ops))):
            passing = self._add_gradients(index, gradients, made)
            owner = self._prices.recomputed.get(self._ops[index].name, "")
            again = sum(self._again.get(owner, {}).values())
            stay = sum(made.values()) if of_parameters else 0
            peak = max(peak, alive + again + passing + sum(gradients.values()) + stay)
            # The gradient of an output is used up by its operator's backward.
            for tensor in self._made[index]:
                gradients.pop(tensor[0], None)
            alive -= self._more[index]
            alive -= sum(self._bytes[tensor] for tensor in self._kept[index] if keepers[tensor] == index)
        return peak

    def _add_gradients(self, index: int, gradients: dict[str, int], made: dict[str, int]) -> int:
        """Add the gradients that an operator's backward makes.

        Args:
            index: The operator.
            gradients: The live gradients of activations.
            made: The gradients of parameters, which stay until the step.

        Returns:
            The bytes of gradients that live only during this operator's backward.
        """
        op, passing = self._ops[index], 0
        strategy = self._assignment.choices[op.name]
        inputs, _ = self._prices.locals_of(op, strategy)
        for name, local in zip(op.operands(), inputs, strict=True):
            if not local.differentiable:
                continue
            stored = self._assignment.stored.get(name)
            if stored is None:
                storage = self._flow.storage(name)
                gradients[storage] = max(gradients.get(storage, 0), local.nbytes)
                continue
            # With ZeRO only the local rows of a gradient stay; the full one lives until it is reduced.
            made[name] = self._prices.gradient(self._flow.graph.metas[name], stored)
            passing += 0 if made[name] == local.nbytes else local.nbytes
        return passing
