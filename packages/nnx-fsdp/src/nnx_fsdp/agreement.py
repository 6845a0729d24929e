"""Agree on the order of FSDP2's collectives and on the used parameters, on all ranks.

FSDP2 gathers a unit when its forward begins, and reduces the gradients that this rank has. If ranks use
different parameters, FSDP2 pairs the gathers of different units, and averages the gradient of one parameter
with that of another. `StepAgreement` prevents this:

- `CollectiveOrder` checks that every rank starts the same gather or reduction, before it starts.
- A unit reduces all of its trained parameters in backward, with zeros for those without a gradient.
- At the end of backward the ranks agree on the parameters that some rank used. A unit that reduces later
  fills zeros for these only. A parameter that no rank used keeps no gradient, as in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from nnx_base.ranks import is_distributed
from nnx_core._torch_compat import when_backward_ends
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.parameter_usage import asked_anywhere
from nnx_fsdp._torch_compat import (
    SHARDS_INTEGERS,
    HeldParameter,
    Unit,
    at_end_of_backward,
)

# `ReplicatedParameters` averages gradients of the parameters that FSDP2 cannot shard, as DDP does. These are
# the `unshardable` ones, and those that a module owns directly if its class cannot be extended, such as
# ``class Model(Generic[T], nn.Module)``.


def unshardable(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 cannot shard with the others of a unit.

    They have no dimension or no elements, or another trained dtype than most elements. With torch 2.11,
    integer parameters are unshardable too.

    Example:
        >>> layers = nn.Sequential(nn.Linear(3, 3, dtype=torch.bfloat16), nn.LayerNorm(3))
        >>> [name for name, p in layers.named_parameters() if p in unshardable(layers)]
        ['1.weight', '1.bias']
    """
    plain = [p for p in module.parameters() if not isinstance(p, DTensor)]
    elements: Counter[torch.dtype] = Counter()
    for parameter in plain:
        if parameter.requires_grad:
            elements[parameter.dtype] += parameter.numel()
    usual = max(elements, key=lambda dtype: elements[dtype], default=None)
    return {p for p in plain if p.ndim == 0 or p.numel() == 0 or _differs(p, usual)}


def _differs(parameter: nn.Parameter, usual: torch.dtype | None) -> bool:
    if parameter.requires_grad:
        return parameter.dtype != usual
    return not (SHARDS_INTEGERS or parameter.is_floating_point() or parameter.is_complex())


class ReplicatedParameters:
    """Averages gradients over the ranks at the end of each backward.

    Args:
        parameters: The parameters that every rank holds unsharded, in the same order on every rank.

    Attributes:
        used: True for each parameter that has a gradient on some rank; set before `average`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.used: Sequence[bool] = [False] * len(self._parameters)
        self._handles: list[RemovableHandle] = []

    @property
    def flags(self) -> list[bool]:
        """True for each parameter that has a gradient on this rank."""
        return [parameter.grad is not None for parameter in self._parameters]

    def watch(self, used: Callable[[], None]) -> None:
        """Call a function in every backward that reaches one of the parameters."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                register = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(lambda _: used()))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients of the used parameters over all ranks. Collective."""
        for parameter, is_used in zip(self._parameters, self.used, strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


REMEDY = (
    "Call every unit on every rank in the same order, with a masked input if necessary. Read weights and "
    "gradients on every rank, even if only one rank prints them. Or wrap the module that chooses between "
    "units as one unit, with auto_wrap_policy or a larger min_num_params. Or use 'nnscaler_zero' or "
    "'ddp_find_unused_parameters_true', which gather nothing in forward."
)


class StepAgreement:
    """Watches one root and its units.

    Args:
        root: A module that ``fully_shard`` was called on, after its units.
        units: All FSDP units of the root.
        replicated: The root's parameters that every rank holds unsharded.
        order: The order of collectives, shared by all roots of a backend.
        index: The index of this root among them.

    Attributes:
        synchronize: True if backward reduces gradients; False only accumulates them.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[Unit],
        replicated: ReplicatedParameters,
        order: CollectiveOrder,
        *,
        index: int = 0,
    ) -> None:
        self.synchronize = True
        self._order, self._replicated = order, replicated
        self._parameters: list[HeldParameter] = []
        self._used: set[HeldParameter] = set()
        self._filled: set[HeldParameter] = set()
        self._answer: Callable[[], list[bool]] | None = None
        self._ends = 0
        if not is_distributed():
            return
        of_which = f" of model {index}" if index else ""
        names = {module: name or "the root" for name, module in root.named_modules()}
        for module in names:
            if isinstance(module, FSDPModule):
                at_end_of_backward(module, self._begin, self._agree, self._finish)
        for unit in units:
            self._watch(unit, names[unit.module] + of_which)
        replicated.watch(self._begin_without_units)

    def _watch(self, unit: Unit, name: str) -> None:
        self._parameters += unit.parameters
        unit.watch_collectives(
            before_gather=partial(self._order.arrive, f"the gather of {name}"),
            before_reduction=partial(self._before_reduction, unit, f"the reduction of {name}'s gradients"),
        )

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Context manager around a step, or around a forward that a backward may follow."""
        self.forget()  # an error may have interrupted the last backward
        with self._order.reporting():
            with_gradients = torch.is_grad_enabled()
            self._order.begin(name if with_gradients and self.synchronize else f"{name}, without reductions")
            yield
            if not with_gradients:
                self._order.end()

    def forget(self) -> None:
        """Reset the state of a backward, after one has ended or failed."""
        self._used.clear()
        self._filled.clear()
        self._answer = None
        self._ends = 0

    def _begin(self) -> bool:
        """Count a root that a backward reached; return True for the first root of this backward."""
        self._ends += 1
        return self._ends == 1

    def _begin_without_units(self) -> None:
        """Do the same as `_begin`, if the backward reaches a replicated parameter before any unit."""
        if not self._ends and self._begin():
            when_backward_ends(self._agree)
            when_backward_ends(self._finish)

    def _before_reduction(self, unit: Unit, name: str) -> None:
        """Fill missing gradients, so that the unit reduces the same parameters on every rank.

        It runs during backward, and again at its end for the gradients that arrived late.
        """
        if not self.synchronize:
            return
        with_gradient = {parameter for parameter in unit.parameters if parameter.has_gradient}
        self._used |= with_gradient
        if len(with_gradient) < len(unit.parameters):
            with_gradient |= self._filled_of(p for p in unit.parameters if p not in with_gradient)
        unit.unify_gradients()
        if with_gradient:
            self._order.arrive(name)

    def _filled_of(self, parameters: Iterable[HeldParameter]) -> set[HeldParameter]:
        """Fill zeros for the parameters that may have a gradient on another rank; return these."""
        anywhere = None if self._answer is None else self._anywhere()
        filled = {p for p in parameters if p.is_trained and (anywhere is None or p in anywhere)}
        for parameter in filled:
            if not parameter.has_reduced_gradient:
                self._filled.add(parameter)
            parameter.fill()
        return filled

    def _agree(self) -> None:
        """Start to exchange the used parameters at the end of backward, before FSDP2 reduces the rest."""
        if not self.synchronize:
            return
        self._order.arrive("the end of backward")
        flags = [parameter in self._used or parameter.has_gradient for parameter in self._parameters]
        self._answer = asked_anywhere([*flags, *self._replicated.flags])

    def _anywhere(self) -> set[HeldParameter]:
        """Return the parameters that some rank used. Waits for the answers that `_agree` asked for."""
        assert self._answer is not None  # set by `_agree`
        return {p for p, is_used in zip(self._parameters, self._answer(), strict=False) if is_used}

    def _finish(self) -> None:
        """Drop the zeros of unused parameters and average replicated ones, after all reductions."""
        self._ends -= 1
        if self._ends:
            return
        if self._answer is not None:
            used = self._answer()
            if self._filled:
                for parameter in self._filled - self._anywhere():
                    parameter.drop_reduced_gradient()
            self._replicated.used = used[len(self._parameters) :]
            self._replicated.average()
        self.forget()
        self._order.end()
