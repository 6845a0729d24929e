"""What the ranks agree on in a step, so that DeepSpeed never reduces or gathers different things together.

DeepSpeed fills its buckets in the order in which gradients come on a rank, and gathers a layer (stage 3)
where a rank comes to it. Ranks that go different ways through the model would mix up gradients and weights:

- As backward begins, the ranks exchange which parameters each of them uses, and in which order it has called
  its layers; the first gradient waits for the answer. Where these are the same, which is the rule, DeepSpeed
  goes on as it likes. Where they differ,
  gradients stay where they are until backward is over, missing ones become zeros, and all are reduced in one
  order.
- A backward inside the backward, as of a reentrant checkpoint, brings gradients of parameters that this
  announcement leaves out. So where it leaves some out, the ranks exchange again which gradients came.
- When backward is over, the ranks compare the order in which gradients came: weights that are used outside of
  their layers may have come in different ones all the same. This is refused: before the step in the first
  backwards, and from then on as the next backward begins, or a save, so that no step waits for it.
- Under stage 3 a layer that only some ranks come to is refused before its gather, and so is a weight that
  only some ranks read.
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
from nnx_core.agree.parameter_usage import asked_anywhere, used_anywhere
from nnx_core.agree.watch import Writes
from nnx_core.errors import UnsupportedError
from nnx_deepspeed._deepspeed_compat import (
    before_each_gather,
    drop_stale_gradients,
    ends_of_backward,
    has_gradient,
    have_sums,
    hold_back_reduction,
    reduce_at_once,
    reduces_whole_gradients,
    release_touched,
    watch_gradients,
    will_be_used,
    zero_gradient,
)

_REMEDY = (
    "Call every layer on every rank, with a masked or empty input if need be, return a loss that depends on "
    "them, and read and write weights on every rank, or use a strategy that gathers no layers, such as "
    "'nnx_deepspeed_2' or 'nnscaler_zero'; persistence_threshold keeps small layers whole."
)
_INSIDE = "Recompute activations with `use_reentrant=False`, or use strategy 'fsdp_auto'."
_BITS = 32
_CHECKED_AT_ONCE = 16
"""Backwards whose order of gradients is compared before the step, by an exchange of its own."""


class Agreement:
    """Keeps the ranks together while one engine runs its steps.

    Args:
        engine: DeepSpeed's.
        module: The user's.
        parameters: The trained ones that have elements, in an order that is the same on every rank.
        names: The names of all parameters.
        waits_to_reduce: True if nothing is reduced before a step's last backward, as in stage 1.
        writes: Sums up what user code writes into gathered parameters.

    Attributes:
        used: The parameters that have a gradient on some rank.
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
        self._came: dict[int, None] = {}
        self._unannounced: frozenset[int] = frozenset()
        self._calls = self._last_order = self._ends = self._forwards = 0
        self._handles: list[RemovableHandle] = []
        self.used: set[nn.Parameter] = set()
        self.runs_backward = False
        self._order: CollectiveOrder | None = None
        self._order_inside: CollectiveOrder | None = None
        self._in_training = False
        self._cuts_each_parameter = hasattr(self._zero, "fp16_groups")  # stage 3
        self._nodes: list[Any] | None = None
        self._settle: Callable[[], None] = _nothing
        if not self._is_needed:
            return
        watch_gradients(self._zero, parameters, self._take_gradient, self._before_gradient)
        for number, layer in enumerate(module.modules()):
            if next(layer.parameters(recurse=False), None) is not None:
                self._handles.append(layer.register_forward_pre_hook(self._noting(number)))
        if is_distributed():
            order = CollectiveOrder(remedy=_REMEDY if self._cuts_each_parameter else _INSIDE)
            if self._cuts_each_parameter:
                order.begin("the set-up")  # it knows of no collective before its first step
                order.end()
                self._order = order
            else:
                self._order_inside = order
        if self._cuts_each_parameter:
            before_each_gather(names, self._before_gather, lambda: self._forwards, writes)

    def remove(self) -> None:
        """Take the hooks off the layers, and hold nothing of a graph."""
        self._nodes = None
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Around what gathers layers: the user's step, and a backward that is not in the middle of one."""
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
        if order is not None:  # between steps too, where one rank may call a layer alone
            reader = ", which user code reads or writes" if is_for_user else ""
            order.arrive(f"the gather of {name}{reader}")

    @property
    def unused(self) -> list[nn.Parameter]:
        """The parameters whose gradient is None on all ranks."""
        return [parameter for parameter in self._parameters if parameter not in self.used]

    def _before_gradient(self) -> None:
        """A gradient is about to be put into a bucket."""
        self._settle()
        if not self.runs_backward:
            raise UnsupportedError(
                "a gradient came from a backward that DeepSpeed does not know of, such as `loss.backward()`.",
                remedy="Call `self.manual_backward(loss)`, or `fabric.backward(loss)`.",
            )

    def _take_gradient(self, number: int) -> None:
        """A gradient is put into a bucket now, which may be reduced before backward is over.

        Raises:
            UnsupportedError: The parameter has a gradient in a bucket already, or ranks differ in which
                gradients come from a backward inside this one.
        """
        if number in self._came and number >= 0:
            raise UnsupportedError(
                f"{self._name(number)} got a second gradient in one backward, and DeepSpeed reduces the "
                "first as it comes: its layer is recomputed by several reentrant checkpoints, or called "
                "beside one.",
                remedy=_INSIDE,
            )
        if number in self._unannounced:
            self._arrive(f"the gradient of {self._name(number)}, from a backward inside the backward")
        self._came[number] = None

    def _arrive(self, where: str, *, cause: str = "") -> None:
        order = self._order or self._order_inside
        if order is not None:
            order.arrive(where, cause=cause)

    def _name(self, number: int) -> str:
        return self._names[self._parameters[number]]

    def settle(self) -> None:
        """The graph is done: take the other ranks' answer, if no gradient has come that waited for it.

        Under stage 3 another rank may still gather a layer that this one has not come to.
        """
        self._settle()
        if self._unannounced or self._order is not None:
            has_any = self._came or any(has_gradient(parameter) for parameter in self._parameters)
            cause = "" if has_any else ", as its loss depends on no weight"
            self._arrive("the end of the gradients", cause=cause)

    def backward(
        self, loss: Tensor, run: Callable[[], None], *, is_boundary: bool, in_one_go: bool = True
    ) -> None:
        """Run DeepSpeed's backward, which reduces gradients; the arguments are those of `_backward`."""
        self.runs_backward = True
        try:
            self._backward(loss, run, is_boundary=is_boundary, in_one_go=in_one_go)
        finally:
            self.runs_backward = False

    def _backward(
        self, loss: Tensor, run: Callable[[], None], *, is_boundary: bool, in_one_go: bool = True
    ) -> None:
        """Keep the ranks together while DeepSpeed's backward runs.

        Args:
            loss: The tensor that it begins at.
            run: Runs it.
            is_boundary: True if a step follows.
            in_one_go: True if it goes through the model at most once.
        """
        without_ranks = not loss.requires_grad and not is_distributed()  # torch's own error will come
        if not self._is_needed or without_ranks or (self._waits_to_reduce and not is_boundary):
            run()
            if is_boundary and not self._is_needed:
                self._add_used(used_anywhere(have_sums(self._zero, self._parameters)))
            return
        backward = _Backward(self._engine, self._parameters)
        announces = in_one_go and loss.requires_grad
        hook = loss.register_hook(lambda _: self._begin(backward)) if announces else None  # type: ignore[no-untyped-call]
        if not in_one_go:
            backward.hold_back()
        try:
            with self.step("backward"), self._inside():
                if not loss.requires_grad:
                    self._exchange(backward, [False] * len(self._parameters), has_graph=False)
                    self._settle()  # which raises, here and on the other ranks
                run()
                if hook is None:
                    self._exchange(backward, [False] * len(self._parameters))
                self._settle()
                self._take_unannounced(backward)
                backward.finish()
                self._refuse_other_order()
                if self._cuts_each_parameter:
                    release_touched(self._names)
        finally:
            self._settle, self._unannounced = _nothing, frozenset()
            backward.release()
            if hook is not None:
                hook.remove()

    def _begin(self, backward: _Backward) -> None:
        nodes = self._nodes or ends_of_backward(self._parameters)
        if not self._cuts_each_parameter:
            self._nodes = nodes  # stage 3 changes shapes, and a node keeps the one that it was made for
        self._exchange(backward, will_be_used(nodes))

    def _exchange(self, backward: _Backward, used: Sequence[bool], *, has_graph: bool = True) -> None:
        """Let the ranks exchange what each uses, and what has a gradient already."""
        has = [u or has_gradient(p) for u, p in zip(used, self._parameters, strict=True)]
        calls, self._calls = self._calls, 0
        order, self._last_order = self._last_order, 0
        missing = [not one for one in used]
        answer = asked_anywhere([*has, *missing, *_flags_of(calls), *_flags_of(order), not has_graph])

        def settle() -> None:
            self._settle = _nothing
            *flags, lacks_graph = answer()
            if lacks_graph:
                raise _no_graph(here=not has_graph)
            self._take_answer(backward, flags)

        self._settle = settle

    def _take_answer(self, backward: _Backward, flags: Sequence[bool]) -> None:
        """Hold gradients back if ranks use other parameters, or have called layers in another order."""
        number = len(self._parameters)
        backward.anywhere, missing = flags[:number], flags[number : 2 * number]
        is_mixed = any(a and m for a, m in zip(backward.anywhere, missing, strict=True))
        of_calls, of_order = flags[2 * number : -2 * _BITS], flags[-2 * _BITS :]
        if _differs(of_order):
            raise self._other_order("in the backward before this one")
        self._add_used(backward.anywhere)
        unused = [place for place, is_used in enumerate(backward.anywhere) if not is_used]
        if unused:
            drop_stale_gradients(self._zero, [self._parameters[place] for place in unused])
        if is_mixed or _differs(of_calls):
            backward.hold_back()
        elif unused:
            self._unannounced = frozenset(unused)
            if self._order_inside is not None:
                self._order_inside.begin("a backward that may have another inside")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Stages 1 and 2: compare gradients that come from a backward inside the backward."""
        order = self._order_inside
        if order is None:
            yield
            return
        with order.reporting():
            yield
            order.end()

    def _take_unannounced(self, backward: _Backward) -> None:
        """Count parameters as used whose gradients came unannounced. Collective, if there may be any."""
        if all(backward.anywhere):
            return
        came = [
            number in self._came or has_gradient(parameter)
            for number, parameter in enumerate(self._parameters)
        ]
        anywhere = used_anywhere(came)
        backward.anywhere = [a or b for a, b in zip(backward.anywhere, anywhere, strict=True)]
        self._add_used(backward.anywhere)

    def _add_used(self, flags: Sequence[bool]) -> None:
        self.used.update(p for p, is_used in zip(self._parameters, flags, strict=True) if is_used)

    def _noting(self, number: int) -> Callable[..., None]:
        """A hook that notes the call of a layer: a function, which a copy of the layer shares."""

        def note(*_: Any) -> None:
            self._forwards += 1
            if torch.is_grad_enabled() or self._in_training:  # a reentrant checkpoint's forward has none
                self._calls = crc32(number.to_bytes(4, "little"), self._calls)

        return note

    def _refuse_other_order(self) -> None:
        self._last_order = crc32(",".join(map(str, self._came)).encode())
        self._came.clear()
        self._ends += 1
        if self._ends <= _CHECKED_AT_ONCE:
            self.refuse_other_order("in this backward", "nothing has stepped with them.")

    def refuse_other_order(
        self, when: str = "in the last backward", then: str = "the last step was wrong."
    ) -> None:
        """Compare the order of the gradients of the last backward. Collective.

        Raises:
            UnsupportedError: It was not the same on every rank.
        """
        order, self._last_order = self._last_order, 0
        if self._is_needed and _differs(used_anywhere(_flags_of(order))):
            raise self._other_order(when, then)

    @staticmethod
    def _other_order(when: str, then: str = "the last step was wrong.") -> UnsupportedError:
        return UnsupportedError(
            f"{when} the gradients came in another order on one rank than on another, so DeepSpeed has "
            f"reduced different parameters together; {then}",
            remedy="Use weights in the same order on every rank, or call the layers that hold them; resume "
            "from the last checkpoint.",
        )


def _no_graph(*, here: bool) -> UnsupportedError:
    whose = f"of rank {dist.get_rank()}" if here else "of another rank"
    return UnsupportedError(
        f"the loss {whose} depends on no parameter, so that rank has no backward to reduce gradients in.",
        remedy="Return a loss that depends on the model on every rank, such as `0.0 * outputs.sum()`.",
    )


def _nothing() -> None:
    """There is no answer to wait for."""


def _flags_of(number: int) -> list[bool]:
    """A number as bits, and inverted: by a maximum, ranks see any difference."""
    bits = [bool(number >> bit & 1) for bit in range(_BITS)]
    return [*bits, *(not bit for bit in bits)]


def _differs(flags: Sequence[bool]) -> bool:
    return any(one and other for one, other in zip(flags[:_BITS], flags[_BITS:], strict=True))


class _Backward:
    """One backward: what has a gradient on some rank, and whether gradients are held back until its end."""

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter]) -> None:
        self._engine, self._parameters = engine, parameters
        self._reduce: Callable[[], None] | None = None
        self.anywhere: Sequence[bool] = ()

    def hold_back(self) -> None:
        if self._reduce is None:
            self._reduce = hold_back_reduction(self._engine)

    def finish(self) -> None:
        """Reduce what was held back; what only other ranks have counts as zero."""
        if self._reduce is None:
            return
        for parameter, is_used in zip(self._parameters, self.anywhere, strict=True):
            if is_used and not has_gradient(parameter):
                zero_gradient(self._engine.optimizer, parameter)
        self._reduce()
        self._reduce = None

    def release(self) -> None:
        """After an error nothing is reduced."""
        if self._reduce is not None:
            reduce_at_once(self._engine)
