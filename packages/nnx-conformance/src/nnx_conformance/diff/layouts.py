"""Find parameters, gradients and buffers by name, as the shards that this rank holds, under any engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nnx_base.box import Box
from nnx_base.shard import Shard, shard_of
from nnx_core.backend import Backend

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that torch's wrappers add."""


class Layout(ABC):
    """Where the tensors of a model are."""

    module: nn.Module

    @abstractmethod
    def weights(self) -> dict[str, Shard]:
        """Return this rank's shards of the parameters."""

    @abstractmethod
    def buffers(self) -> dict[str, Shard]:
        """Return this rank's shards of the buffers."""

    @abstractmethod
    def gradients(self) -> dict[str, Shard | None]:
        """Return this rank's shards of the gradients; None for a parameter without one."""

    def unsharded(self) -> Any:
        """Return a context in which the other methods work. Collective for some layouts."""
        return nullcontext()

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every submodule by its name in the user's model."""
        for name, module in self.module.named_modules():
            yield plain_name(name), module


def plain_name(name: str) -> str:
    """Return a name without the parts that torch's wrappers add.

    Example:
        >>> plain_name("_fsdp_wrapped_module.layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name


class PlainLayout(Layout):
    """Plain tensors and DTensors, as under ``ddp``, FSDP2 and in one process.

    Args:
        module: The model; ``DistributedDataParallel`` and FSDP wrappers are looked through.
    """

    def __init__(self, module: nn.Module) -> None:
        self.wrapped = module
        self.module = module.module if isinstance(module, DistributedDataParallel) else module

    def weights(self) -> dict[str, Shard]:
        """Return the parameters."""
        return {plain_name(name): shard_of(p) for name, p in self.module.named_parameters()}

    def buffers(self) -> dict[str, Shard]:
        """Return the buffers."""
        return {plain_name(name): shard_of(buffer) for name, buffer in self.module.named_buffers()}

    def gradients(self) -> dict[str, Shard | None]:
        """Return the gradients in ``p.grad``."""
        return {
            plain_name(name): None if p.grad is None else shard_of(p.grad)
            for name, p in self.module.named_parameters()
            if p.requires_grad
        }

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Unshard the flat parameters of FSDP 1, of which a rank holds ranges without a shape."""
        if not any(isinstance(module, FullyShardedDataParallel) for module in self.wrapped.modules()):
            yield
            return
        with FullyShardedDataParallel.summon_full_params(self.wrapped, writeback=False, with_grads=True):
            yield


class BackendLayout(Layout):
    """The layout that an `nnx.Backend` describes.

    Args:
        backend: The engine.
        module: The laid-out module.
    """

    def __init__(self, backend: Backend[Any], module: nn.Module) -> None:
        self.backend, self.module = backend, module

    def weights(self) -> dict[str, Shard]:
        """Return the parameters as a checkpoint would have them: an engine may keep masters elsewhere."""
        names = {name for name, _ in self.module.named_parameters()}
        state = self.backend.model_state(self.module)
        return {name: shard for name, shard in state.tensors.items() if name in names}

    def buffers(self) -> dict[str, Shard]:
        """Return the persistent buffers."""
        names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        state = self.backend.model_state(self.module)
        return {name: shard for name, shard in state.tensors.items() if name not in names}

    def gradients(self) -> dict[str, Shard | None]:
        """Return the gradients that user code reads in ``p.grad``; the engine has published them."""
        found: dict[str, Shard | None] = {}
        weights = self.weights()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                found[name] = (
                    None if gradient is None else self._shard(gradient, parameter, weights.get(name))
                )
        return found

    def _shard(self, gradient: Tensor, parameter: nn.Parameter, weight: Shard | None) -> Shard:
        described = shard_of(gradient)
        if isinstance(gradient, DTensor) or weight is None or described.shape == weight.shape:
            return described
        like = self.backend.shard(gradient, parameter=parameter)
        if like.shape == weight.shape:
            return like
        if [tuple(gradient.shape)] == [box.size for box in weight.boxes]:
            return Shard(weight.shape, gradient.dtype, weight.boxes, (gradient.detach(),))
        return described


def rows(tensor: Tensor, *, batch: int, share: tuple[int, int]) -> Shard:
    """Describe a module's output as a shard of the output for the global batch: a block of its rows.

    Args:
        tensor: The output.
        batch: The number of this share's samples.
        share: The number of this share, and of all shares.
    """
    index, count = share
    if count == 1 or tensor.dim() == 0 or not batch or tensor.shape[0] % batch:
        return shard_of(tensor)
    size = tuple(tensor.shape)
    box = Box((index * size[0], *(0,) * (len(size) - 1)), size)
    return Shard((count * size[0], *size[1:]), tensor.dtype, (box,), (tensor.detach(),))
