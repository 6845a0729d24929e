"""Replay a recorded step as one rank of a strategy runs it, and count its bytes.

`Replay` is a rank of `ddp` without its buckets. An engine derives from it: it says what a rank stores of a
parameter, and allocates in the methods below what it gathers and sends. The class of an engine is named by
`nnx_core.names.spec.StrategySpec.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnx_core.planning.estimate import Estimate, Memory, World
from nnx_core.planning.trace import Event, Kind, Parameter, Trace

__all__ = ["Replay"]


class Replay:
    """A rank that stores the complete model.

    Args:
        trace: The step on one process.
        world: The ranks.
        options: The options of the strategy.

    Attributes:
        trace: The step on one process.
        world: The ranks.
        memory: The bytes of this rank.
        bar: The relative uncertainty of a traced step.

    Example:
        >>> from nnx_core.planning.trace import Trace
        >>> trace = Trace(events=(), parameters={"w": Parameter("w", (8, 2), 4, state=128)})
        >>> Replay(trace, World(size=2)).run().peak
        256
    """

    bar: float = 0.02

    def __init__(self, trace: Trace, world: World, options: Mapping[str, Any] | None = None) -> None:
        self.trace, self.world, self.options = trace, world, dict(options or {})
        self.memory = Memory()
        self.notes: list[str] = []
        self._alive: dict[int, int] = {}
        self._handlers: dict[Kind, Callable[[str], None]] = {
            Kind.USE: self.use,
            Kind.SAVE: self.save,
            Kind.UNSAVE: self.unsave,
            Kind.ENTER: self.enter,
            Kind.LEAVE: self.leave,
            Kind.ENTER_BACKWARD: self.enter_backward,
            Kind.LEAVE_BACKWARD: self.leave_backward,
        }

    @classmethod
    def traced_precision(cls, precision: str) -> str:
        """Return the precision to trace the model with, if the engine casts weights by itself."""
        return precision

    # The bytes of one parameter on this rank, between steps.

    def stored(self, parameter: Parameter) -> int:
        """Return the bytes of a parameter."""
        return parameter.nbytes

    def stored_gradient(self, parameter: Parameter) -> int:
        """Return the bytes of the gradient of a trained parameter, after backward."""
        return self.stored(parameter)

    def stored_state(self, parameter: Parameter) -> int:
        """Return the bytes of a parameter's optimizer state."""
        return parameter.state + parameter.scalars

    def stepped(self) -> list[int]:
        """Return the bytes of each tensor that the optimizer steps."""
        return [self.stored(parameter) for parameter in self.trained]

    # The step.

    def begin(self) -> None:
        """Allocate the tensors that exist before a step."""
        parameters = self.trace.parameters.values()
        self.memory.add("parameters", sum(map(self.stored, parameters)))
        self.memory.add("buffers", self.trace.buffers)
        self.memory.add("optimizer", sum(map(self.stored_state, self.trained)))
        self.memory.add("activations", self.trace.batch)
        self.memory.add("gradients", self.gradients)

    def end_forward(self) -> None:
        """Free the gradients of the step before, as ``zero_grad`` does."""
        self.memory.add("gradients", -self.memory.device["gradients"])

    def begin_forward(self) -> None:
        """Called at the start of the forward."""

    def begin_backward(self) -> None:
        """Called at the start of the backward, after ``zero_grad``."""

    def make(self, nbytes: int) -> int:
        """Return the bytes of this rank for a tensor that the step on one process makes."""
        return nbytes

    def use(self, name: str) -> None:
        """Called when an operator reads a parameter."""

    def save(self, name: str) -> None:
        """Called when autograd keeps a parameter for backward; there may be several for one parameter."""

    def unsave(self, name: str) -> None:
        """Called when one use of a parameter is no longer kept for backward."""

    def enter(self, name: str) -> None:
        """Called before the forward of a module."""

    def leave(self, name: str) -> None:
        """Called after the forward of a module."""

    def enter_backward(self, name: str) -> None:
        """Called when the gradient of a module's output is complete."""

    def leave_backward(self, name: str) -> None:
        """Called when the gradient of a module's input is complete."""

    def gradient(self, name: str, nbytes: int) -> None:
        """Called with a complete gradient, whose bytes count as gradients."""

    def end_backward(self) -> None:
        """Called after backward."""

    def step(self) -> None:
        """Allocate and free the temporary bytes of the optimizer's step."""
        sizes = self.stepped()
        cost = self.trace.optimizer
        temporary = cost.temporary(sum(sizes), max(sizes, default=0))
        self.memory.add_briefly("temporary", temporary)

    def end_step(self) -> None:
        """Called after the optimizer's step."""

    def save_checkpoint(self) -> None:
        """Copy this rank's state to host memory for `async_save`; a plain save streams tensor by tensor."""
        if self.options.get("async_save"):
            copied = self.memory.device["parameters"] + self.memory.device["optimizer"]
            if self.world.accelerator == "cpu":
                self.memory.add_briefly("temporary", copied)
            else:
                self.memory.add_host(copied)
                self.memory.add_host(-copied)

    def load_checkpoint(self) -> None:
        """Fill parameters and optimizer state, tensor by tensor, before the first gradient exists."""
        for kind in ("gradients", "activations"):
            self.memory.add(kind, -self.memory.device[kind])
        largest = max(map(self.stored, self.trace.parameters.values()), default=0)
        self.memory.add_briefly("temporary", largest)

    def copy_by_gloo(self, nbytes: int) -> None:
        """Count the copy that gloo makes of a collective's tensor (on CPU)."""
        if self.world.accelerator == "cpu":
            self.memory.add_briefly("communication", nbytes)

    @property
    def gradients(self) -> int:
        """The bytes of all gradients on this rank, after backward."""
        return sum(map(self.stored_gradient, self.trained))

    @property
    def trained(self) -> list[Parameter]:
        """The parameters that get gradients."""
        return [parameter for parameter in self.trace.parameters.values() if parameter.trained]

    def run(self) -> Estimate:
        """Replay the step and return the estimate."""
        self.begin()
        self.memory.begin("forward")
        self.begin_forward()
        for event in self.trace.events:
            self._replay(event)
        self.end_backward()
        self.memory.begin("step")
        self.step()
        self.end_step()
        self.memory.begin("save")
        self.save_checkpoint()
        self.memory.begin("load")
        self.load_checkpoint()
        sources = dict.fromkeys(self.memory.device, self.trace.source) | {"communication": "formula"}
        return Estimate(
            phases=self.memory.end(),
            sources=sources,
            notes=tuple(self.notes),
            bar=self.bar if self.trace.source == "traced" else 0.5,
        )

    def _replay(self, event: Event) -> None:
        kind = event.kind
        if kind is Kind.MAKE:
            self._alive[event.storage] = self.make(event.nbytes)
            self.memory.add("activations", self._alive[event.storage])
        elif kind is Kind.FREE:
            if event.storage in self._alive:
                self.memory.add("activations", -self._alive.pop(event.storage))
        elif kind is Kind.GRADIENT:
            nbytes = self._alive.pop(event.storage, 0)
            self.memory.add("activations", -nbytes)
            self.memory.add("gradients", nbytes)
            self.gradient(event.name, nbytes)
        elif kind is Kind.PHASE:
            if event.name == "backward":
                self.end_forward()
                self.memory.begin("backward")
                self.begin_backward()
        else:
            self._handlers[kind](event.name)
