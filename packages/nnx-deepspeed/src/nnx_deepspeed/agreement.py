"""Keep the ranks in agreement during a step, so that DeepSpeed never mixes up different tensors.

DeepSpeed fills its buckets in the order in which a rank's gradients are computed. Under stage 3 it gathers a
layer when a rank calls it. Ranks on different paths through the model would mix up gradients and weights:

- When backward begins, the ranks exchange which parameters each rank uses, and in which order it has called
  its layers. The first gradient waits for the answer. If the ranks agree, as they usually do, DeepSpeed
  reduces at once. If they differ, gradients stay in place until backward is over, missing gradients become
  zeros, and all are reduced in one order.
- A backward inside the backward, such as that of a reentrant checkpoint, computes gradients that this
  exchange does not announce. So if a parameter was not announced, the ranks exchange again which gradients
  exist.
- After backward, the ranks compare the order of their gradients, because weights used outside of their layers
  may have another order all the same. A difference is refused. The first backwards compare before the step;
  later ones compare when the next backward or a save begins, so that no step waits for the exchange.
- Under stage 3, nnx refuses a layer that only some ranks call, before its gather. It also refuses a weight
  that only some ranks read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nnx_base.ranks import is_distributed
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.divergence import Writes
from nnx_core.agree.parameter_usage import asked_anywhere, used_anywhere
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import refuse_sparse_gradient
from nnx_deepspeed._deepspeed_compat import (
    before_each_gather,
    defer_reduction,
    drop_stale_gradients,
    end_deferral,
    gradient_nodes,
    had_gradients,
    has_gradient,
    reduces_whole_gradients,
    release_touched,
    watch_gradients,
    will_be_used,
    zero_gradient,
)

_REMEDY = (
    "Call every layer on every rank, with a masked or empty input if need be, return a loss that depends on "
    "them, and read and write weights on every rank, or use a strategy that gathers no layers, such as "
    "'nnx_deepspeed_2' or 'nnscaler_zero'; persistence_threshold replicates small layers."
)
_INSIDE = "Recompute activations with `use_reentrant=False`, or use strategy 'fsdp_auto'."
_BITS = 32
_IMMEDIATE_CHECKS = 16
"""The number of first backwards that compare the order of gradients before the step, in an extra exchange."""


class Agreement:
    """Keeps the ranks in agreement while one engine runs its steps.

    Args:
        engine: DeepSpeed's engine.
        module: The user's module.
        parameters: The trained parameters with elements, in the same order on every rank.
        names: The names of all parameters.
        waits_to_reduce: True if DeepSpeed reduces nothing before a step's last backward, as in stage 1.
        writes: The checksums of values that user code writes into gathered parameters.

    Attributes:
        used: The parameters with a gradient on some rank.
        runs_backward: True while DeepSpeed's backward runs.
    """

    def __init__(
        self,
        engine: Any,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        names: Mapping[nn.Parameter, str],
        waits_to_reduce: bool,
        writes: Writes,
    ) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._parameters = parameters
        self._names = names
        self._waits_to_reduce = waits_to_reduce
        self._is_needed = not reduces_whole_gradients(self._zero)
        self._received: dict[int, None] = {}
        self._unannounced: frozenset[int] = frozenset()
        self._calls = self._last_order = self._ends = self._forwards = 0
        self._handles: list[RemovableHandle] = []
        self.used: set[nn.Parameter] = set()
        self.runs_backward = False
        self._order: CollectiveOrder | None = None
        self._inner_order: CollectiveOrder | None = None
        self._in_training = False
        self._shards_each_parameter = hasattr(self._zero, "fp16_groups")  # stage 3
        self._nodes: list[Any] | None = None
        self._apply_answer: Callable[[], None] = _nothing
        if not self._is_needed:
            return
        watch_gradients(self._zero, parameters, self._take_gradient, self._before_gradient)
        for number, layer in enumerate(module.modules()):
            if next(layer.parameters(recurse=False), None) is not None:
                self._handles.append(layer.register_forward_pre_hook(self._call_hook(number)))
        if is_distributed():
            order = CollectiveOrder(remedy=_REMEDY if self._shards_each_parameter else _INSIDE)
            if self._shards_each_parameter:
                order.begin("the set-up")  # user code may gather before the first step
                order.end()
                self._order = order
            else:
                self._inner_order = order
        if self._shards_each_parameter:
            before_each_gather(names, self._before_gather, lambda: self._forwards, writes)

    def remove(self) -> None:
        """Take the hooks off the layers and release the graph."""
        self._nodes = None
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Check the order of gathers around a user's step, or around a backward outside of one."""
        was_training, self._in_training = self._in_training, name == "training"
        order = self._order
        try:
            if order is None or order.in_step:
                yield
                return
            with order.reporting():
                order.begin(name)
                yield
                order.end()
        finally:
            self._in_training = was_training

    def _before_gather(self, name: str, is_for_user: bool) -> None:
        order = self._order
        if order is not None:  # also between steps, because one rank may call a layer alone there
            reader = ", which user code reads or writes" if is_for_user else ""
            order.arrive(f"the gather of {name}{reader}")

    @property
    def unused(self) -> list[nn.Parameter]:
        """The parameters with a gradient of None on all ranks."""
        return [parameter for parameter in self._parameters if parameter not in self.used]

    def _before_gradient(self, parameter: nn.Parameter) -> None:
        """Wait for the other ranks' answer before a gradient enters a bucket."""
        if parameter.grad is not None:
            refuse_sparse_gradient(parameter.grad, self._names[parameter])
        self._apply_answer()
        if not self.runs_backward:
            raise UnsupportedError(
                "a backward that DeepSpeed did not run computed a gradient, such as `loss.backward()`.",
                remedy="Call `self.manual_backward(loss)`, or `fabric.backward(loss)`.",
            )

    def _take_gradient(self, number: int) -> None:
        """Note a gradient that enters a bucket, which DeepSpeed may reduce before backward is over.

        Raises:
            UnsupportedError: The parameter has a gradient in a bucket already, or a backward inside this one
                computes different gradients on different ranks.
        """
        if number in self._received and number >= 0:
            raise UnsupportedError(
                f"{self._name(number)} got a second gradient in one backward, and DeepSpeed reduces the "
                "first at once: several reentrant checkpoints recompute its layer, or the model also "
                "calls it outside of one.",
                remedy=_INSIDE,
            )
        if number in self._unannounced:
            # Another rank may have no such gradient and would never join this bucket's reduction.
            self._arrive(f"the gradient of {self._name(number)}, from a backward inside the backward")
        self._received[number] = None

    def _arrive(self, where: str, *, cause: str = "") -> None:
        order = self._order or self._inner_order
        if order is not None:
            order.arrive(where, cause=cause)

    def _name(self, number: int) -> str:
        return self._names[self._parameters[number]]

    def finish_graph(self) -> None:
        """Wait for the other ranks' answer at the end of the graph, if no gradient has waited for it.

        Under stage 3 another rank may still gather a layer that this rank has not called.
        """
        self._apply_answer()
        if self._unannounced or self._order is not None:
            has_any = self._received or any(has_gradient(parameter) for parameter in self._parameters)
            cause = "" if has_any else ", as its loss depends on no weight"
            self._arrive("the end of the gradients", cause=cause)

    def backward(
        self, loss: Tensor, run: Callable[[], None], *, is_boundary: bool, in_one_go: bool = True
    ) -> None:
        """Run DeepSpeed's backward, which reduces gradients. `_backward` describes the arguments."""
        self.runs_backward = True
        try:
            self._backward(loss, run, is_boundary=is_boundary, in_one_go=in_one_go)
        finally:
            self.runs_backward = False

    def _backward(
        self, loss: Tensor, run: Callable[[], None], *, is_boundary: bool, in_one_go: bool = True
    ) -> None:
        """Keep the ranks in agreement while DeepSpeed's backward runs.

        Args:
            loss: The tensor that backward begins at.
            run: A function that runs backward.
            is_boundary: True if a step follows.
            in_one_go: True if backward goes through the model at most once.
        """
        # A single process without a graph gets torch's own error from `run`.
        without_ranks = not loss.requires_grad and not is_distributed()
        if not self._is_needed or without_ranks or (self._waits_to_reduce and not is_boundary):
            run()
            if is_boundary and not self._is_needed:
                self._add_used(used_anywhere(had_gradients(self._zero, self._parameters)))
            return
        backward = _Backward(self._engine, self._parameters)
        # torch answers which nodes a backward executes only while that backward runs, so the exchange begins
        # in a hook on the loss. It overlaps with the first layers; only the first gradient waits for it.
        announces = in_one_go and loss.requires_grad
        hook = loss.register_hook(lambda _: self._begin(backward)) if announces else None  # type: ignore[no-untyped-call]
        if not in_one_go:
            # A user's own `backward` may go through the graph twice, and no single hook announces that.
            backward.defer()
        try:
            with self.step("backward"), self._inner_order_checked():
                if not loss.requires_grad:
                    self._exchange(backward, [False] * len(self._parameters), has_graph=False)
                    self._apply_answer()  # raises, here and on the other ranks
                run()
                if hook is None:  # no announcement was possible: exchange the gradients that exist now
                    self._exchange(backward, [False] * len(self._parameters))
                self._apply_answer()
                # A backward inside may have computed more gradients than announced. The ranks agree on these
                # first, because `finish` reduces every used parameter and adds zeros for missing gradients.
                self._take_unannounced(backward)
                backward.finish()
                self._refuse_other_order()
                if self._shards_each_parameter:
                    release_touched(self._names)
        finally:
            self._apply_answer, self._unannounced = _nothing, frozenset()
            backward.release()
            if hook is not None:
                hook.remove()

    def _begin(self, backward: _Backward) -> None:
        nodes = self._nodes or gradient_nodes(self._parameters)
        if not self._shards_each_parameter:
            self._nodes = nodes  # stage 3 changes shapes, and a node keeps the shape that it was made for
        self._exchange(backward, will_be_used(nodes))

    def _exchange(self, backward: _Backward, used: Sequence[bool], *, has_graph: bool = True) -> None:
        """Start the exchange of the parameters that each rank uses, and of gradients that exist already."""
        has = [u or has_gradient(p) for u, p in zip(used, self._parameters, strict=True)]
        calls, self._calls = self._calls, 0
        order, self._last_order = self._last_order, 0
        missing = [not flag for flag in used]
        # One maximum over ranks answers "on some rank" for every flag. `has` and `missing` together show
        # whether ranks differ; so do a number's bits and their inverses.
        answer = asked_anywhere([*has, *missing, *_flags_of(calls), *_flags_of(order), not has_graph])

        def apply_answer() -> None:
            self._apply_answer = _nothing
            *flags, lacks_graph = answer()
            if lacks_graph:
                raise _no_graph(here=not has_graph)
            self._take_answer(backward, flags)

        self._apply_answer = apply_answer

    def _take_answer(self, backward: _Backward, flags: Sequence[bool]) -> None:
        """Defer the reduction if ranks use different parameters, or called layers in another order."""
        count = len(self._parameters)
        backward.anywhere, missing = flags[:count], flags[count : 2 * count]
        # If only some ranks use a parameter, the ranks' buckets would fill in different ways.
        is_mixed = any(a and m for a, m in zip(backward.anywhere, missing, strict=True))
        of_calls, of_order = flags[2 * count : -2 * _BITS], flags[-2 * _BITS :]
        if _differs(of_order):
            raise self._other_order("in the backward before this one")
        self._add_used(backward.anywhere)
        unused = [number for number, is_used in enumerate(backward.anywhere) if not is_used]
        if unused:
            # No gradient overwrites them in this step, so stage 3 would step with those of an earlier one.
            drop_stale_gradients(self._zero, [self._parameters[number] for number in unused])
        if is_mixed or _differs(of_calls):
            backward.defer()
        elif unused:
            self._unannounced = frozenset(unused)
            if self._inner_order is not None:
                self._inner_order.begin("a backward that may have another inside")

    @contextmanager
    def _inner_order_checked(self) -> Iterator[None]:
        """Compare gradients that a backward inside the backward computes, in stages 1 and 2."""
        order = self._inner_order
        if order is None:
            yield
            return
        with order.reporting():
            yield
            order.end()

    def _take_unannounced(self, backward: _Backward) -> None:
        """Count parameters as used if they got an unannounced gradient. Collective if some may have."""
        if all(backward.anywhere):
            return
        received = [
            number in self._received or has_gradient(parameter)
            for number, parameter in enumerate(self._parameters)
        ]
        anywhere = used_anywhere(received)
        backward.anywhere = [a or b for a, b in zip(backward.anywhere, anywhere, strict=True)]
        self._add_used(backward.anywhere)

    def _add_used(self, flags: Sequence[bool]) -> None:
        self.used.update(p for p, is_used in zip(self._parameters, flags, strict=True) if is_used)

    def _call_hook(self, number: int) -> Callable[..., None]:
        """Return a hook that notes the call of a layer: a function, so that a copy of the layer shares it."""

        def note(*_: Any) -> None:
            self._forwards += 1
            # A reentrant checkpoint calls its layers without grad, and they still count in a training step.
            if torch.is_grad_enabled() or self._in_training:
                self._calls = crc32(number.to_bytes(4, "little"), self._calls)

        return note

    def _refuse_other_order(self) -> None:
        # A checksum stands for the order: the next exchange carries it as bits, for any number of parameters.
        self._last_order = crc32(",".join(map(str, self._received)).encode())
        self._received.clear()
        self._ends += 1
        if self._ends <= _IMMEDIATE_CHECKS:
            self.refuse_other_order("in this backward", "nothing has stepped with them.")

    def refuse_other_order(
        self, when: str = "in the last backward", then: str = "the last step was wrong."
    ) -> None:
        """Compare the order of the last backward's gradients. Collective.

        Raises:
            UnsupportedError: The order differed between ranks.
        """
        order, self._last_order = self._last_order, 0
        if self._is_needed and _differs(used_anywhere(_flags_of(order))):
            raise self._other_order(when, then)

    @staticmethod
    def _other_order(when: str, then: str = "the last step was wrong.") -> UnsupportedError:
        return UnsupportedError(
            f"{when} the gradients had another order on one rank than on another, so DeepSpeed has "
            f"reduced different parameters together; {then}",
            remedy="Use weights in the same order on every rank, or call the layers that hold them; resume "
            "from the last checkpoint.",
        )


def _no_graph(*, here: bool) -> UnsupportedError:
    rank = f"of rank {dist.get_rank()}" if here else "of another rank"
    return UnsupportedError(
        f"the loss {rank} depends on no parameter, so that rank has no backward to reduce gradients in.",
        remedy="Return a loss that depends on the model on every rank, such as `0.0 * outputs.sum()`.",
    )


def _nothing() -> None:
    """Do nothing, as no answer is outstanding."""


def _flags_of(number: int) -> list[bool]:
    """Return a number's bits and their inverses, so that a maximum over ranks shows any difference."""
    bits = [bool(number >> bit & 1) for bit in range(_BITS)]
    return [*bits, *(not bit for bit in bits)]


def _differs(flags: Sequence[bool]) -> bool:
    return any(one and other for one, other in zip(flags[:_BITS], flags[_BITS:], strict=True))


class _Backward:
    """One backward, and whether its reduction is deferred to its end.

    Attributes:
        anywhere: One flag for each parameter: True if it has a gradient on some rank.
    """

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter]) -> None:
        self._engine, self._parameters = engine, parameters
        self._reduce: Callable[[], None] | None = None
        self.anywhere: Sequence[bool] = ()

    def defer(self) -> None:
        if self._reduce is None:
            self._reduce = defer_reduction(self._engine)

    def finish(self) -> None:
        """Reduce the deferred gradients. A gradient that only other ranks have counts as zero."""
        if self._reduce is None:
            return
        for parameter, is_used in zip(self._parameters, self.anywhere, strict=True):
            if is_used and not has_gradient(parameter):
                zero_gradient(self._engine.optimizer, parameter)
        self._reduce()
        self._reduce = None

    def release(self) -> None:
        """Stop deferring without a reduction, after an error."""
        if self._reduce is not None:
            end_deferral(self._engine)
