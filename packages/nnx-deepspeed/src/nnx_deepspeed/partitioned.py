"""Parameters and gradients as user code sees them: whole, from the first touch on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_core.tensor_functions import Sees, what_it_sees
from nnx_deepspeed._deepspeed_compat import gather_for_user, is_cut
from nnx_deepspeed.partitions import Partitions

# --- parameters of stage 3 ------------------------------------------------------------------------
# Parameters of stage 3 as user code sees them: whole, from the first touch on.
#
# Outside of its layers' forward and backward a parameter is cut: a rank holds a flat part of it. Meanwhile
# it has a class of its own, `PartitionedParameter`. When user code computes with it, reads its data or
# writes into it, it is gathered and stays whole until the step goes on, which takes what was written. All
# ranks must do so. DeepSpeed's code and ours see the part.


_OF_A_PART = frozenset({Sees.LOCAL, Sees.MEMORY, Sees.GRADIENT, Sees.HOOK})
_local = torch._C.DisableTorchFunctionSubclass
_INNER = (
    *("deepspeed", "nnx_checkpoint", "nnx_core", "nnx_deepspeed"),
    *("torch.autograd", "torch.distributed", "torch.optim", "torch.utils"),
    *("lightning.pytorch.callbacks.weight_averaging", "lightning.pytorch.callbacks.stochastic_weight_avg"),
    *("pytorch_lightning.callbacks.weight_averaging", "pytorch_lightning.callbacks.stochastic_weight_avg"),
)
"""Modules whose code means this rank's part: averages are averages of parts."""


class PartitionedParameter(nn.Parameter):
    """A parameter that is cut. Parameters become it and cease to be it; none is made."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        sees = what_it_sees(func)
        if sees is Sees.ASSIGNS_GRADIENT:
            return assign_gradient(args[0], *args[1:] or (None,))
        if sees in _OF_A_PART or _is_inner(sys._getframe(1).f_globals.get("__name__", "")):
            with _local():
                return func(*args, **kwargs)
        cut = list(dict.fromkeys(_cut_in((args, kwargs))))
        if not cut:  # a copy that was never laid out
            with _local():
                return func(*args, **kwargs)
        if sees is Sees.SHAPE:
            like = torch.empty(cut[0].ds_shape, dtype=cut[0].dtype, device="meta")  # type: ignore[attr-defined]
            return func(like, *args[1:], **kwargs)
        gather_for_user(cut)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        gather_for_user([self])
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        gather_for_user([self])
        return self.__reduce_ex__(protocol)  # of the class that it has now


def assign_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set ``p.grad``, also where the parameter is a part or has another dtype than the gradient."""
    with _local():
        parameter.grad = None  # before it may be of another dtype
        if gradient is None:
            return
        present = parameter.data
        parameter.data = present.new_empty(()).expand(gradient.shape)
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        parameter.data = present


@cache
def _is_inner(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _INNER)


def _cut_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, PartitionedParameter):
        if is_cut(value):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _cut_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _cut_in(item)


# --- gradients ------------------------------------------------------------------------------------
# Gradients as PyTorch has them, whole and in ``p.grad``, while user code may look at them.
#
# DeepSpeed keeps the reduced gradients in flat partitions. They are gathered from there where somebody may
# look (`show`), and what user code left is written back before the step (`write_back`). From then on until
# they are dropped, gradients stay visible, and another backward adds to them, as in one process.


_ELEMENTS_AT_ONCE = 2**24
"""How many elements are gathered in one collective."""


class WholeGradients:
    """The gradients of a module that DeepSpeed trains, as user code sees them.

    Args:
        partitions: The partitions in which DeepSpeed keeps them.
        device: The device of the module.
    """

    def __init__(self, partitions: Partitions, *, device: torch.device) -> None:
        self._partitions = partitions
        self._device = device
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self.are_shown = False

    @torch.no_grad()
    def show(self, unused: Collection[nn.Parameter]) -> None:
        """Put the reduced gradients into ``p.grad``, added to what user code left there. Collective.

        Args:
            unused: The parameters that have none.
        """
        for parameter, gradient in self._gather(unused):
            earlier = self._earlier.pop(parameter, None)
            assign_gradient(parameter, gradient if earlier is None else earlier.add_(gradient))
        self.are_shown = True

    def put_aside(self) -> Collection[nn.Parameter]:
        """Before a backward: take the visible gradients away; they count again when it is over.

        Returns:
            The parameters that have one.
        """
        self._earlier = self._take()
        self.are_shown = False
        return self._earlier.keys()

    @torch.no_grad()
    def write_back(self) -> dict[nn.Parameter, Tensor] | None:
        """Before the step: give the partitions what user code left.

        Returns:
            What was visible, for `show_again`; None where every gradient is None, with which no step changes
            anything.
        """
        left = self._take()
        if self.are_shown and not left:
            return None
        parts = self._partitions.gradient_parts() if left or self._earlier else {}
        for parameter, (start, part) in parts.items():
            if parameter in left:
                part.copy_(left[parameter].reshape(-1).narrow(0, start, part.numel()))
            elif parameter in self._earlier:
                earlier = self._earlier[parameter].reshape(-1)
                part.add_(earlier.narrow(0, start, part.numel()))
        self._earlier = {}
        return left

    def show_again(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """After the step: gradients stay where they are until somebody drops them."""
        for parameter, gradient in gradients.items():
            assign_gradient(parameter, gradient)

    def forget(self) -> None:
        """Drop them."""
        self._take()
        self._earlier = {}
        self.are_shown = False

    def _take(self) -> dict[nn.Parameter, Tensor]:
        if not self.are_shown:
            return {}
        taken = {}
        for parameter in self._partitions.parameters():
            if parameter.grad is not None:
                taken[parameter] = parameter.grad
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
        return taken

    def _gather(self, unused: Collection[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = self._partitions.gradient_parts()
        for chunk in self._chunks(set(unused)):
            sizes = [self._partitions.shape(parameter).numel() for parameter in chunk]
            flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
            wholes = torch.split(flat, sizes)
            for parameter, whole in zip(chunk, wholes, strict=True):
                if parameter in parts:
                    start, part = parts[parameter]
                    whole.narrow(0, start, part.numel()).copy_(part)
            if dist.get_world_size() > 1:
                dist.all_reduce(flat)  # every element lies on one rank; adding zeros changes none
            for parameter, whole in zip(chunk, wholes, strict=True):
                yield parameter, whole.view(self._partitions.shape(parameter))

    def _chunks(self, unused: Collection[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        chunk: list[nn.Parameter] = []
        held = 0
        for parameter in self._partitions.parameters():
            if parameter in unused:
                continue
            numel = self._partitions.shape(parameter).numel()
            if chunk and held + numel > _ELEMENTS_AT_ONCE:
                yield chunk
                chunk, held = [], 0
            chunk.append(parameter)
            held += numel
        if chunk:
            yield chunk
