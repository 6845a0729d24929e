"""Functions on modules for all engines: layer classes, steps inside a forward, meta-device weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base.ranks import broadcast_tensor, is_distributed
from nnx_base.shard import Shard
from nnx_checkpoint.reading.state import OptimizerState
from nnx_core.errors import OptionError, UnsupportedError


class Layers:
    """The layers that an option selects, by classes or by names of classes.

    A name, for YAML files, is that of a class (``"Block"``) or the end of its full name
    (``"models.gpt.Block"``). Subclasses match, too.

    Args:
        value: A class or a name, or several; None selects no layers.
        option: The option, for messages.

    Raises:
        OptionError: An item is neither.

    Example:
        >>> nn.Linear(2, 2) in Layers(["nn.Linear", "Conv2d"], option="activation_checkpointing")
        True
    """

    def __init__(self, value: object, *, option: str) -> None:
        several = isinstance(value, Iterable) and not isinstance(value, (str, type))
        chosen: tuple[Any, ...] = tuple(cast("Iterable[Any]", value)) if several else (value,)
        self._option = option
        self._classes: tuple[type[nn.Module], ...] = ()
        self.names: tuple[str, ...] = ()
        for item in () if value is None else chosen:
            if isinstance(item, str):
                self.names += (item,)
            elif isinstance(item, type) and issubclass(item, nn.Module):
                self._classes += (item,)
            else:
                raise OptionError(
                    f"{option} holds {item!r}, which is not a module class.",
                    remedy="Pass a subclass of torch.nn.Module, or its name as 'Block' or 'module.Block'.",
                )

    def __contains__(self, module: nn.Module) -> bool:
        if isinstance(module, self._classes):
            return True
        return any(_is_called(cls, name) for name in self.names for cls in _classes_of(module))

    def __str__(self) -> str:
        return ", ".join([*(cls.__name__ for cls in self._classes), *self.names])

    def check(self, root: nn.Module) -> None:
        """Refuse names that match no module of a model.

        Args:
            root: The model.

        Raises:
            OptionError: A name matches no module; the message suggests the nearest class names.
        """
        found = {cls: None for module in root.modules() for cls in _classes_of(module)}
        for name in self.names:
            if any(_is_called(cls, name) for cls in found):
                continue
            own = [cls.__name__ for cls in dict.fromkeys(type(module) for module in root.modules())]
            near = get_close_matches(name.rpartition(".")[2], dict.fromkeys(own), n=3, cutoff=0.5)
            same = [f"{cls.__module__}.{cls.__qualname__}" for cls in found if cls.__name__ in near]
            raise OptionError(
                f"{self._option} names {name!r}, and no module of {type(root).__name__} is of such a class.",
                remedy=f"Did you mean {', '.join(map(repr, same))}?"
                if near
                else f"Use the name of a class that the model has: {', '.join(dict.fromkeys(own[1:9]))}.",
            )


def _classes_of(module: nn.Module) -> Iterator[type[nn.Module]]:
    """Yield the class of a module and its bases, up to `torch.nn.Module`."""
    for cls in type(module).__mro__:
        if cls is nn.Module:
            return
        if issubclass(cls, nn.Module):
            yield cls


def _is_called(cls: type[nn.Module], name: str) -> bool:
    """Return True if a class has a name, or a package exports it under that name, as ``torch.nn.Linear``."""
    if f".{cls.__module__}.{cls.__qualname__}".endswith(f".{name}"):
        return True
    package, _, last = name.rpartition(".")
    package = f"torch.{package}" if package.partition(".")[0] == "nn" else package
    return bool(package) and getattr(sys.modules.get(package), last, None) is cls


def refuse_layers(module: nn.Module, *, shares: int) -> None:
    """Refuse layers that would train other numbers, or fail during a run. It raises on all ranks or none.

    Args:
        module: The module to train, as the user built it.
        shares: The number of shares of the data.

    Raises:
        UnsupportedError: A layer is scripted and has parameters, or it renormalizes the rows that it reads
            while ranks read different rows.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule) and next(layer.parameters(), None) is not None:
            raise UnsupportedError(
                f"{name or 'the model'} was compiled by torch.jit, and has parameters, which cannot be "
                "exchanged or hooked.",
                remedy="Train the module that was given to `torch.jit.script`, and script it after training.",
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None and shares > 1:
            order = layer.norm_type
            raise UnsupportedError(
                f"{name or 'the model'} is an {type(layer).__name__} with max_norm={layer.max_norm}, which "
                "renormalizes the rows that a rank reads, in that rank's copy only.",
                remedy="Leave max_norm out, and renormalize all rows on all ranks in `on_train_batch_start`: "
                f"`with torch.no_grad(): self.{name}.weight.renorm_({order}, 0, {layer.max_norm})`.",
            )


def refuse_exchanged(
    module: nn.Module, names: Mapping[nn.Parameter, str], optimizers: Iterable[Optimizer]
) -> None:
    """Refuse a module whose trained parameters were replaced after the layout.

    Args:
        module: The laid-out module.
        names: The names of its parameters at the layout.
        optimizers: Its optimizers.

    Raises:
        UnsupportedError: An optimizer holds a parameter that is not in the module any more.
    """
    present = set(module.parameters())
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    lost = [name for parameter, name in names.items() if parameter in held and parameter not in present]
    if lost:
        raise UnsupportedError(
            f"the parameters of {lost[0].rpartition('.')[0] or 'the model'} were exchanged since training "
            f"began: {lost[0]!r} is not the one that the optimizer has.",
            remedy="Replace, tie or parametrize layers in `__init__` or `configure_model`.",
        )


@contextmanager
def forward_as(module: nn.Module, step: Callable[..., Any]) -> Iterator[None]:
    """Make the next call of the module run `step`, in a context; the step sees the module's own forward."""
    own = module.__dict__.get("forward")

    def restore() -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own

    def redirected(*args: Any, **kwargs: Any) -> Any:
        restore()
        return step(*args, **kwargs)

    module.forward = redirected
    try:
        yield
    finally:
        restore()


def materialize(module: nn.Module, device: torch.device, *, name: str) -> None:
    """Allocate a module's meta tensors on `device` and initialise them with ``reset_parameters``.

    Args:
        module: The module; tensors on other devices do not change.
        device: The device to move to.
        name: Its name in the model, for messages.

    Raises:
        UnsupportedError: A submodule has meta tensors and no ``reset_parameters``.
    """
    refuse_without_reset(module, name=name)
    for _, submodule in module.named_modules():
        if _has_meta(submodule):
            submodule.to_empty(device=device, recurse=False)
            with torch.no_grad():
                submodule.reset_parameters()


def refuse_without_reset(module: nn.Module, *, name: str) -> None:
    """Refuse a module that `materialize` cannot initialise, before any change of it.

    Args:
        module: The module.
        name: Its name in the model, for messages.

    Raises:
        UnsupportedError: A submodule has meta tensors and no ``reset_parameters``.
    """
    for submodule_name, submodule in module.named_modules():
        if _has_meta(submodule) and not callable(getattr(submodule, "reset_parameters", None)):
            where = ".".join(each for each in (name, submodule_name) if each) or "the root module"
            raise UnsupportedError(
                f"{where} ({type(submodule).__name__}) was built on the meta device and has no "
                "`reset_parameters()` to initialise its tensors with.",
                remedy="Give it that method, or build the model without `empty_init=True`.",
            )


def _has_meta(submodule: nn.Module) -> bool:
    own = (*submodule.parameters(recurse=False), *submodule.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers that are not sharded yet to the device, in place."""
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            if not isinstance(parameter, DTensor) and parameter.device != device:
                parameter.data = parameter.data.to(device)
    move_buffers_to(module, device)


def move_buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move the buffers to the device, in place."""
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if buffer.device != device:
                submodule._buffers[name] = buffer.to(device)


def move_to_host(module: nn.Module) -> None:
    """Move parameters and buffers to CPU memory; tensors on the meta device stay there."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # type: ignore[no-untyped-call]


def move_states(
    optimizers: Iterable[Optimizer], described: dict[Optimizer, OptimizerState], device: torch.device
) -> None:
    """Move the state of optimizers and its descriptions to a device; shared tensors are moved once.

    Args:
        optimizers: The optimizers whose state is moved.
        described: Descriptions of states; their shards are replaced by shards on the device.
        device: The device to move to.
    """
    moved: dict[tuple[Any, ...], Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            there = cast(DTensor, tensor.to(device))
            moved[_place(tensor.to_local())] = there.to_local()
            return there
        return moved.setdefault(_place(tensor), tensor.to(device))

    def move_shard(shard: Shard) -> Shard:
        return replace(shard, data=tuple(move(view) for view in shard.data))

    for optimizer in optimizers:
        for values in optimizer.state.values():
            values.update({name: move(v) for name, v in values.items() if isinstance(v, Tensor)})
    for optimizer, state in described.items():
        entries = {
            parameter: {name: move_shard(v) if isinstance(v, Shard) else v for name, v in values.items()}
            for parameter, values in state["state"].items()
        }
        described[optimizer] = OptimizerState(state=entries, param_groups=state["param_groups"])


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def lay_in_order(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Make parameters contiguous in place, such as channels-last ones: FSDP2 shards no others.

    Returns:
        For each changed parameter, a tensor on the meta device with its former strides.
    """
    strides = {}
    for parameter in parameters:
        if not (isinstance(parameter, DTensor) or parameter.is_contiguous()):
            strides[parameter] = torch.empty_like(parameter, device="meta", requires_grad=False)
            parameter.data = parameter.data.contiguous()
    return strides


def with_strides(value: Tensor, strided: Tensor | None) -> Tensor:
    """Undo `lay_in_order` for a parameter's value.

    Args:
        value: The contiguous value.
        strided: The result of `lay_in_order` for the parameter; None if it was contiguous.
    """
    return value if strided is None else torch.empty_like(strided, device=value.device).copy_(value)


@torch.no_grad()
def broadcast_module(module: nn.Module, *, through: torch.device | None = None) -> None:
    """Broadcast rank zero's values of the tensors that are not sharded yet. Collective.

    Args:
        module: The module.
        through: The device to copy each tensor to for its broadcast; None for its own.
    """
    if not is_distributed():
        return
    for tensor in _plain_tensors(module):
        there = tensor if through is None else tensor.detach().to(through)
        broadcast_tensor(there)
        if there.device != tensor.device:
            tensor.detach().copy_(there)


def _plain_tensors(module: nn.Module) -> Iterable[Tensor]:
    seen: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and id(tensor) not in seen and tensor.numel():
            seen.add(id(tensor))
            yield tensor


def leave_on_meta(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Replace a module's parameters by ones on the meta device, and mark them.

    Returns:
        The replacement of every parameter.
    """
    replaced = {old: _like(old, "meta") for old in module.parameters()}
    for new in replaced.values():
        new._nnx_left = True  # type: ignore[attr-defined]
    return _put(module, replaced)


def is_left(module: nn.Module) -> bool:
    """Return True if `leave_on_meta` has dropped the values of a parameter of this module."""
    return any(hasattr(parameter, "_nnx_left") for parameter in module.parameters())


def allocate_again(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Replace the parameters of `leave_on_meta` by uninitialized ones on CPU, to be broadcast or loaded.

    Returns:
        The replacement of every marked parameter.
    """
    replaced = {old: _like(old, "cpu") for old in module.parameters() if hasattr(old, "_nnx_left")}
    for new in replaced.values():
        del new._nnx_left  # type: ignore[attr-defined]
    return _put(module, replaced)


def _like(old: nn.Parameter, device: str) -> nn.Parameter:
    new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device), old.requires_grad)
    vars(new).update(vars(old))
    return new


def _put(module: nn.Module, replaced: dict[nn.Parameter, nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter in replaced:
                submodule._parameters[name] = replaced[parameter]
    return replaced
