"""Show user code the sharded parameters of a module as unsharded, between FSDP2's collectives.

FSDP2 leaves DTensors on the module, and in a step the gathered weights of the running layer. Code for one
process expects neither. So every sharded parameter is guarded (`nnx_core.view.guard`). It reads as unsharded,
and writes reach the shards. Gradients of penalties are averaged over the ranks, and hooks get unsharded
gradients. Writes of a step to gathered weights are kept. FSDP2 itself, optimizers and checkpoints use the
DTensors in local mode.

This module handles the begin and end of steps and backwards, for all parameters of a module. `parts` handles
one parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nnx_core._torch_compat import current_backward
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.divergence import checksum
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import refuse_sparse_gradient
from nnx_core.view.guard import attributes_of, guard, guarded_mode, local_mode, unguard
from nnx_core.view.guarded_parameters import GuardedParameters
from nnx_fsdp._torch_compat import Unit, has_failed_backward, is_in_transform, refuse_split_backward
from nnx_fsdp.parts import ParameterPart, ShardedPart, gather


class Weights(GuardedParameters[ShardedPart, ParameterPart]):
    """All sharded parameters of one module. The constructor guards them.

    Args:
        module: A module that FSDP2 has sharded.
        units: All FSDP units of the module.
        plain: The user's own object of each sharded parameter.
        order: The order that the ranks agree on. A read on some ranks only is an error.
        watch_data: True to notice writes through ``data`` of gathered weights; False for compiled layers.
        is_watched: A function that returns True if the ranks compare writes.

    Attributes:
        modules: The modules of the units.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[Unit],
        plain: Mapping[nn.Parameter, nn.Parameter],
        *,
        order: CollectiveOrder | None = None,
        watch_data: bool = True,
        is_watched: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(order)
        refuse_split_backward()
        self._is_watched = is_watched
        self._written: dict[str, int] = {}
        self._module = module
        self._watch_data = watch_data
        self._in_step = False
        self._forwards: Counter[Unit] = Counter()  # since the last backward
        self._shared: set[Unit] = set()  # their gathered parameters have the attributes of the sharded ones
        self._assigned: list[ShardedPart] = []
        self._units = list(units)
        self.modules = list(dict.fromkeys(unit.module for unit in self._units))
        names = {parameter: name for name, parameter in module.named_parameters()}
        for unit in self._units:
            unit.watch_weights(
                gathering=self._refuse_gathering, gathered=self._begin_using, freeing=self._take_written
            )
            unit.before_reduction(partial(self._refuse_sparse, unit))
            unit.keep_when(partial(self._is_wanted, unit))
            for held in unit.parameters:
                sharded = held.sharded
                if sharded in plain:
                    part = ParameterPart(plain[sharded], held, self, names.get(sharded, "a parameter"))
                    self._guard(part)

    def _guard(self, part: ParameterPart) -> None:
        """Guard a parameter and the user's own object, because user code may hold it in a list."""
        sharded: Any = part.tensor
        vars(sharded).update(attributes_of(part.plain))
        self._parts[sharded] = part
        guard(sharded, part)
        guard(part.plain, part)

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return True if a parameter is one of these."""
        return parameter in self._parts

    def replace(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Accept other objects in the place of sharded parameters."""
        for old, new in replaced.items():
            part = self._parts.pop(old, None)
            if part is not None:
                part.forget()
                unguard(old)
                part.tensor = new
                self._parts[new] = part
                guard(new, part)
        self._shared.clear()

    def release(self) -> None:
        """Restore the class and attributes of the user's objects, before they get their values."""
        self.flush()
        for sharded, part in self._parts.items():
            unguard(part.plain)
            unguard(sharded)
            own = attributes_of(part.plain)
            for name in own:
                delattr(part.plain, name)
            vars(part.plain).update(attributes_of(sharded))
            part.release()
        for unit in self._units:
            unit.release()
        self._parts.clear()
        self._differentiated.clear()
        self._own_gradients.clear()
        self._assigned.clear()
        self._shared.clear()
        self._units.clear()
        self.modules.clear()

    @property
    def is_watched(self) -> bool:
        """True if the ranks compare writes to parameters."""
        return self._is_watched()

    def note_written(self, part: ShardedPart, written: Tensor | int) -> None:
        """Add the checksum of a write to a parameter, which must be the same on every rank."""
        self._written[part.name] = self._written.get(part.name, 0) + int(written)

    def take_notes(self) -> dict[str, int]:
        """Return the sum of the notes since the last call, by name of each parameter."""
        notes, self._written = self._written, {}
        return {part.name: notes.get(part.name, 0) for part in self._parts.values()}

    def before_gather(self, part: ShardedPart) -> None:
        """Check that all ranks gather the same parameter."""
        if self._order is not None:
            self._order.arrive(f"the reading of {part.name}, outside of its layer's forward")

    def flush(self) -> None:
        """Copy changes of gathered tensors back, and free them."""
        super().flush()
        self._assigned = [part for part in self._assigned if part.keeps_source()]

    def add_assigned(self, part: ShardedPart) -> None:
        """Remember a part whose ``data`` user code has set."""
        self._assigned.append(part)

    @contextmanager
    def step(self, *, inner_backwards: bool) -> Iterator[None]:
        """Context manager around a step.

        Args:
            inner_backwards: True if the backwards in it do not train, so that weights stay gathered after
                them.
        """
        self.begin_step()
        self._follow_parameters()
        self._in_step = inner_backwards
        try:
            yield
        finally:
            self._in_step = False

    def _follow_parameters(self) -> None:
        """Gather a parameter under its new name, if user code has moved it, as pruning does."""
        if all(part.held.is_in_place() for part in self._parts.values()):
            return
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, name))
        for sharded, part in self._parts.items():
            gathered = part.held.gathered
            found = [*places.get(sharded, ()), *(places.get(gathered, ()) if gathered is not None else ())]
            if found:
                part.held.places = found
            elif not part.held.is_in_place():
                raise UnsupportedError(
                    f"{part.name!r} was replaced by another object, or removed, while it is sharded.",
                    remedy="Write into it under `torch.no_grad()`, with `copy_` for example, or replace it "
                    "in `configure_model`.",
                )

    def _refuse_gathering(self, unit: Unit) -> None:
        if is_in_transform():
            raise UnsupportedError(
                f"the layer of {self._named(unit)} is called within a transform of torch.func that "
                "differentiates, such as grad or vjp, where FSDP2 cannot gather it.",
                remedy="Use `torch.autograd.grad`, or give the weights to functions of "
                "`torch.nn.functional`, or train under 'ddp'.",
            )
        if has_failed_backward(unit.module):
            raise UnsupportedError(
                f"the layer of {self._named(unit)} is called after a backward that failed in the same step "
                "and did not go through the strategy.",
                remedy="Call `self.manual_backward(loss)` instead of `loss.backward()`, or end the step.",
            )

    def _named(self, unit: Unit) -> str:
        names = [part.name for held in unit.parameters if (part := self._parts.get(held.sharded))]
        return " and ".join(names[:2])

    def _is_wanted(self, unit: Unit) -> bool:
        # What user code computes from gathered weights between two forwards goes backward between them.
        goes_on = self._in_backward and self._forwards[unit] > 1
        return self._in_step or goes_on or torch.is_grad_enabled()

    def _begin_using(self, unit: Unit) -> None:
        if torch.is_grad_enabled() and current_backward() < 0:
            self._forwards[unit] += 1
        is_watched = self._is_watched()
        if unit in self._shared and not is_watched:
            return
        for held in unit.parameters:
            gathered = held.gathered
            if gathered is not None and gathered.is_inference():
                raise UnsupportedError(
                    f"the layer of {self._named(unit)} is first called under torch.inference_mode(), so its "
                    "weights would never get gradients.",
                    remedy="Use `torch.no_grad()`.",
                )
            if gathered is not None and "_part" not in vars(gathered):
                held.share_attributes(watch_data=self._watch_data)
                held.gathered_version = gathered._version
            if gathered is not None and held.gathered_sum is None and is_watched:
                held.gathered_sum = checksum(gathered)
        self._shared.add(unit)

    def _refuse_sparse(self, unit: Unit) -> None:
        for held in unit.parameters:
            gradient = held.gradient_left
            part = self._parts.get(held.sharded)
            if gradient is not None and part is not None:
                refuse_sparse_gradient(gradient, part.name)

    def _take_written(self, unit: Unit) -> None:
        for held in unit.parameters:
            part = self._parts.get(held.sharded)
            if part is not None:
                part.take_written()

    def has_hooks(self) -> bool:
        """Return True if hooks read gradients, so that every backward must reduce them."""
        return bool(self._hooked())

    def _hooked(self) -> list[ParameterPart]:
        with local_mode():
            return [
                part
                for part in self._parts.values()
                if part.plain._backward_hooks or part.plain._post_accumulate_grad_hooks
            ]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context manager around a backward; it completes the gradients and then calls the hooks."""
        hooked = self._hooked()
        before: dict[ParameterPart, Tensor | None] = {}
        with local_mode():
            # A hook must see this backward's gradient alone. So accumulated gradients wait in `before` and
            # are added after the hooks.
            for part in hooked:
                before[part] = part.tensor.grad
                part.tensor.grad = None
        self._in_backward = True
        try:
            yield
            with local_mode():
                self._reduce_rest()
                self._add_own_gradients()
                for part in hooked:
                    self._call_hooks(part, before.pop(part))
        finally:
            self._in_backward = False
            self._forwards.clear()
            with local_mode():
                for part, gradient in before.items():  # an error left them: restore accumulated gradients
                    part.tensor.grad = gradient
        kept = [unit for unit in self._units if unit.end_keeping()]
        for unit in kept:
            unit.free()

    def free(self) -> None:
        """Keep only this rank's shards of the gathered units."""
        for unit in self._units:
            if unit.is_gathered:
                unit.free()

    def drop_unreduced_gradients(self) -> None:
        """Drop all unreduced gradients after a failed backward, because its own are not marked."""
        for unit in self._units:
            for held in unit.parameters:
                held.drop_unreduced_gradient()
        self._own_gradients.clear()

    def _reduce_rest(self) -> None:
        """Reduce gradients that came after their unit's reduction, as of a weight that others use."""
        for unit in self._units:
            if unit.reduces and any(held.has_gradient_left for held in unit.parameters):
                unit.reduce_rest()

    @torch.no_grad()
    def _call_hooks(self, part: ParameterPart, before: Tensor | None) -> None:
        gradient = part.tensor.grad
        if gradient is None:
            part.tensor.grad = before
            return
        hooks = list((part.plain._backward_hooks or {}).values())
        after = list((part.plain._post_accumulate_grad_hooks or {}).values())
        if hooks:
            whole = gather(gradient)  # type: ignore[arg-type]
            with guarded_mode():
                for hook in hooks:
                    answer = hook(whole)
                    whole = whole if answer is None else answer
            gradient = part.like(part.own(whole).clone())
            part.tensor.grad = gradient
        if before is not None:
            before._local_tensor.add_(gradient._local_tensor)  # type: ignore[attr-defined]
            part.tensor.grad = before
        with guarded_mode():
            for hook in after:
                hook(part.tensor)
