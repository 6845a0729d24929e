"""Make fake models, batches and optimizers of what a user plans: a class, a module, a batch shape."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from nnx_core._torch_compat import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves, tree_map_only
from nnx_core.errors import OptionError
from nnx_core.view.modules import Layers

__all__ = [
    "DTYPES",
    "PRECISIONS",
    "batch_maker",
    "batch_size",
    "convert",
    "converted_batch",
    "default_batch",
    "fake_batch",
    "fake_module",
    "loss_of",
    "optimizers_of",
    "recomputing",
    "repeated_layers",
    "scaled_batch",
    "unpacked_sequences",
]

DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}
"""The dtype of the weights of each precision that converts them."""
PRECISIONS = (*DTYPES, "16-mixed", "bf16-mixed")


def fake_module(mode: FakeTensorMode, module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return a module of fake tensors: the result of a function, or a copy of a module.

    Args:
        mode: The fake mode, which is active.
        module: A module, whose weights are neither copied nor changed, or a function that makes one.
    """
    if not isinstance(module, nn.Module):
        with _Zeros():  # type: ignore[no-untyped-call]
            made = module()
    else:
        tensors = (*module.parameters(), *module.buffers())
        memo: dict[int, Any] = {id(tensor): _fake(mode, tensor) for tensor in tensors}
        trainer = vars(module).get("_trainer")
        if trainer is not None:
            memo[id(trainer)] = None
        made = copy.deepcopy(module, memo)
    configure = getattr(made, "configure_model", None)
    if callable(configure):
        configure()
    return made


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor on the CPU, also of one on the meta device or on a GPU."""
    if tensor.device.type == "cpu":
        return mode.from_tensor(tensor)
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads every element as zero, for initializations that draw values until they fit."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, unless it reads an element."""
        if str(func) == "aten._local_scalar_dense.default":
            return False if args[0].dtype is torch.bool else 0
        return func(*args, **(kwargs or {}))


def convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters and buffers of a fake module; ``module.to`` cannot."""
    memo: dict[Tensor, Tensor] = {}
    for submodule in module.modules():
        for held in (submodule._parameters, submodule._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if tensor not in memo:
                    other = tensor.detach().to(dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    memo[tensor] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
                held[name] = memo[tensor]  # type: ignore[assignment]


def converted_batch(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating-point tensors at another dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def fake_batch(mode: FakeTensorMode, batch: Any) -> Any:
    """Return a batch with fake tensors in the place of real ones."""
    return tree_map_only(Tensor, lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t), batch)


def default_batch(module: nn.Module) -> Any:
    """Return ``example_input_array``, or the first batch of ``train_dataloader``.

    Raises:
        OptionError: The module has neither.
    """
    loader = getattr(module, "train_dataloader", None)
    example = getattr(module, "example_input_array", None)
    if example is not None:
        return example
    try:
        loaded = loader() if callable(loader) else None
    except Exception:  # Lightning's default raises
        loaded = None
    if loaded is None:
        raise OptionError(
            f"{type(module).__name__} has neither example_input_array nor train_dataloader.",
            remedy="Give the batch of one device: --batch 4x1024, or nnx.plan(module, batch).",
        )
    return next(iter(loaded))


def batch_size(batch: Any) -> int:
    """Return the number of samples: the first dim of the first tensor."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return int(sizes[0]) if sizes else 1


def scaled_batch(batch: Any, factor: int) -> Any:
    """Return a batch with `factor` times the samples, of fake tensors."""
    size = batch_size(batch)

    def scaled(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != size:
            return tensor
        return tensor.new_empty((factor * size, *tensor.shape[1:]))

    return tree_map_only(Tensor, scaled, batch)


def loss_of(module: nn.Module) -> Callable[[Any], Tensor]:
    """Return the function from a batch to the loss: ``training_step``, or the forward's own loss."""
    step = getattr(module, "training_step", None)
    return partial(_loss, partial(_first_step, step) if callable(step) else partial(_called, module))


def _first_step(step: Callable[..., Any], batch: Any) -> Any:
    """Call ``training_step`` as Lightning does: with the index by position, if it takes one."""
    return step(batch, 0) if len(inspect.signature(step).parameters) > 1 else step(batch)


def _called(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def _loss(step: Callable[[Any], Any], batch: Any) -> Tensor:
    result = step(batch)
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    elif getattr(result, "loss", None) is not None:
        result = result.loss
    if isinstance(result, Tensor):
        return result if result.dim() == 0 else result.float().mean()
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise OptionError(
            f"the step returns {type(result).__name__} without a tensor to differentiate.",
            remedy="Return the loss from `training_step`, or give labels with the batch.",
        )
    return sum((tensor.float().mean() for tensor in tensors[1:]), tensors[0].float().mean())


def optimizers_of(module: nn.Module, *, lists: bool, default: str = "AdamW") -> list[Optimizer]:
    """Return the module's optimizers; ``torch.optim``'s `default` if it has none.

    Args:
        module: The module.
        lists: True if optimizers update lists of tensors at once, as they do on cuda by default.
        default: The name of a class of ``torch.optim``.
    """
    configure = getattr(module, "configure_optimizers", None)
    found = list(_optimizers(configure())) if callable(configure) else []
    if not found:
        made = getattr(torch.optim, default, None)
        if made is None:
            raise OptionError(
                f"torch.optim has no {default!r}.", remedy="Name a class of torch.optim, such as AdamW."
            )
        found = [made([p for p in module.parameters() if p.requires_grad], lr=1e-3)]
    for optimizer in found:
        for group in optimizer.param_groups:
            if lists and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    return found


def _optimizers(value: Any) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        yield from _optimizers(value.get("optimizer"))
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _optimizers(entry)


@contextmanager
def recomputing(module: nn.Module, layers: Layers) -> Iterator[None]:
    """Recompute the activations of layers, within a context."""
    layers.check(module)
    found = [layer for layer in module.modules() if layer in layers]
    for layer in found:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in found:
            del layer.forward


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Let transformers (5.23) take no sequence for packed, within a context.

    It reads the positions to see it. Fake ones have no values, so it would build a mask that a run skips.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if hasattr(masks, "find_packed_sequence_indices"):
        with mock.patch.object(masks, "find_packed_sequence_indices", return_value=None):
            yield
    else:
        yield


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the outermost layers that stand beside others of their class in a container."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in module.modules():
        if container in inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(container.children())
        for layer in children:
            same = sum(type(other) is type(layer) for other in children)
            if same > 1 and next(layer.parameters(), None) is not None:
                found.append(layer)
                inside.update(layer.modules())
    return found


def batch_maker(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Callable[[nn.Module], Any]:
    """Return the function from a model to its batch of these shapes."""

    def tensor(module: nn.Module, dtype: str, shape: tuple[int, ...]) -> Any:
        if not dtype:
            embeds = any(isinstance(part, torch.nn.Embedding) for part in module.modules())
            dtype = "int64" if embeds and len(shape) <= 2 else "float32"
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise OptionError(
                f"torch has no dtype {dtype!r}.", remedy="Write a dtype of torch, as in float32:8x3,int64:8."
            )
        return torch.zeros(shape, dtype=kind)

    def make(module: nn.Module) -> Any:
        tensors = [tensor(module, dtype, shape) for dtype, shape in shapes]
        names = inspect.signature(module.forward).parameters
        if len(tensors) == 1 and not hasattr(module, "training_step") and "input_ids" in names:
            return {"input_ids": tensors[0]} | ({"labels": tensors[0]} if "labels" in names else {})
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    return make
