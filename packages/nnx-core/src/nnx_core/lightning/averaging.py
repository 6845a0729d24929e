"""Lightning's averaging callbacks on a model that an engine has laid out.

`WeightAveraging`, its subclasses and `StochasticWeightAveraging` average into a copy of the module that they
make before the layout. Here that copy gets tensors with the layout of the module, so the callback's own code,
which works tensor by tensor, averages, swaps and copies shards. Its saving and loading of state dicts uses
handles instead. After the stage the copy is unsharded again.

This module owns the copy, and replaces methods of the callback during a stage. The callback decides when and
how to average, and `nnx_core.lightning.checkpoint` the form of a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from nnx_base.ranks import (
    all_gather_object,
    broadcast_tensor,
    control_group,
    is_distributed,
)
from nnx_base.shard import Shard
from nnx_checkpoint.reading.loading import load_model
from nnx_checkpoint.reading.state import ModelState, as_state_dict, describe_model
from nnx_core.backend import Backend
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.compat import AVERAGE, CURRENT, STATE, average_of, averaging_callbacks, copies_only
from nnx_core.lightning.strategy_checkpoint import gather_full, restore_model
from nnx_core.view.guard import as_stored
from nnx_core.view.modules import leave_on_meta, move_to_host

_UPDATING = ("on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end")
_PUBLISHING = ("on_validation_epoch_start", "on_train_end")
"""The hooks in which the callbacks read or write the module's parameters, and those in which they copy the
average into the module."""
_LOADING = ("on_load_checkpoint", "load_state_dict")
"""The methods in which they load weights from a checkpoint, in Lightning's order."""


class Averages:
    """The averaging callbacks of one Trainer.

    Args:
        backend: The engine.
    """

    def __init__(self, backend: Backend[Any]) -> None:
        self._backend = backend
        self._averages: list[_Average] = []
        self._routes: list[_Route] = []
        self._loads: list[tuple[Any, str, tuple[Any, ...]]] = []

    def prepare(self, root: str, trainer: Any) -> None:
        """Make the callbacks copy the module without its weights, and postpone their loads to the layout.

        An unsharded copy would use device memory, which the model may not fit in.
        """
        for callback in averaging_callbacks(trainer):
            if trainer.state.fn == "fit" and copies_only(root, callback):
                self._routes.append(_Route(callback, "setup", _copy_lightly))
            self._routes += [_Route(callback, n, partial(self._load_later, callback, n)) for n in _LOADING]

    def _load_later(self, callback: Any, name: str, own: Callable[..., None], *args: Any) -> None:
        self._loads.append((callback, name, args))

    def lay_out(self, trainer: Any, module: nn.Module) -> None:
        """Lay each callback's copy out like the module, and run the postponed loads. Collective.

        Args:
            trainer: The Trainer with the callbacks.
            module: The module, laid out and with the weights of the checkpoint.

        Raises:
            UnsupportedError: A callback averages another model than the module.
        """
        light = [route.owner for route in self._routes if route.name == "setup"]
        self._unroute()
        for callback in averaging_callbacks(trainer):
            average = average_of(callback)
            used = trainer.state.fn == "fit" or isinstance(average, AveragedModel)
            if average is not None and used:
                has_weights = not any(callback is owner for owner in light)
                self._averages.append(_Average(callback, average, module, self._backend, has_weights))
        loads, self._loads = self._loads, []
        for callback, name, args in loads:
            getattr(callback, name)(*args)

    def give_back(self, *, gather: bool) -> None:
        """Restore the callbacks' own methods, and unsharded tensors on CPU. Collective.

        Args:
            gather: False after an error of this rank alone: the tensors stay sharded.
        """
        self._unroute()
        self._loads.clear()
        for average in self._averages:
            average.give_back(gather=gather)
        self._averages.clear()

    def _unroute(self) -> None:
        for route in self._routes:
            route.remove()
        self._routes.clear()


class _Route:
    """A method replaced on one object.

    Args:
        owner: The object.
        name: The name of the method.
        instead: The replacement; its first argument is the object's own method.
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self.owner, self.name = owner, name
        self._was = {name: vars(owner)[name]} if name in vars(owner) else {}
        setattr(owner, name, partial(instead, getattr(owner, name)))

    def remove(self) -> None:
        """Restore the object's own method."""
        delattr(self.owner, self.name)
        vars(self.owner).update(self._was)


def _copy_lightly(setup: Callable[..., None], trainer: Any, module: nn.Module, stage: str) -> None:
    """Run a callback's ``setup``, in which copies of the module have no weights."""
    module.__dict__["__deepcopy__"] = partial(_copy_without_weights, module)
    try:
        setup(trainer, module, stage)
    finally:
        del module.__dict__["__deepcopy__"]


def _copy_without_weights(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = _holding(tensor, torch.empty(0, dtype=tensor.dtype))  # not meta: it is moved
    hook = module.__dict__.pop("__deepcopy__")
    try:
        return copy.deepcopy(module, memo)
    finally:
        module.__dict__["__deepcopy__"] = hook


def _holding(like: Tensor, data: Tensor) -> Tensor:
    """Return data as a parameter if `like` is one, else as a plain tensor."""
    if isinstance(like, nn.Parameter):
        return nn.Parameter(data, requires_grad=like.requires_grad)
    return data


class _Average:
    """The copy that one callback averages into, with the layout of the module.

    Args:
        callback: The callback.
        average: The module that it averages into.
        module: The laid-out module.
        backend: The engine.
        has_weights: True if the copy has weights.
    """

    def __init__(
        self, callback: Any, average: nn.Module, module: nn.Module, backend: Backend[Any], has_weights: bool
    ) -> None:
        self._callback, self._average = callback, average
        self._module, self._backend = module, backend
        self._copy = average.module if isinstance(average, AveragedModel) else average
        self._prefix = "" if self._copy is average else "module."
        self._refuse_another_model()
        # The first update copies the module's weights; only later ones read the copy's own.
        self._has_begun = has_weights and isinstance(average, AveragedModel) and bool(average.n_averaged > 0)
        self._lay_out()
        self._laid_out = list(module.parameters())
        self._average_apart()
        self._routes = [_Route(callback, name, self._update) for name in _UPDATING]
        self._routes += [_Route(callback, name, self._publish) for name in _PUBLISHING]
        self._routes += [
            _Route(callback, "state_dict", self._save),
            _Route(callback, "on_save_checkpoint", self._save),
            _Route(callback, "load_state_dict", self._load_state_dict),
            _Route(callback, "on_load_checkpoint", self._on_load_checkpoint),
        ]

    def _refuse_another_model(self) -> None:
        mine, theirs = ({name for name, *_ in _tensors(module)} for module in (self._copy, self._module))
        if mine != theirs:
            names = ", ".join(sorted(mine ^ theirs)[:8])
            raise UnsupportedError(
                f"{type(self._callback).__name__} averages into a module with other parameters or buffers "
                f"than the one that is trained; they differ in {names}.",
                remedy="Average into a copy of the LightningModule, as Lightning's own callbacks do.",
            )

    def _lay_out(self) -> None:
        """Replace every tensor of the copy; tied tensors of the module are tied in the copy."""
        self._like: dict[Tensor, Tensor] = {}
        made: dict[Tensor, Tensor] = {}
        for (_, held, name), (_, current_held, _) in zip(
            _tensors(self._copy), _tensors(self._module), strict=True
        ):
            current = current_held[name]
            if current not in made:
                made[current] = self._laid_out_like(current, held[name])
                self._like[made[current]] = current
            held[name] = made[current]

    def _laid_out_like(self, current: Tensor, old: Tensor) -> Tensor:
        device = getattr(self._callback, "_device", None)
        with as_stored(current):
            data = current.detach().to(device=device or current.device, dtype=old.dtype, copy=True)
        new = _holding(old, data)
        if self._has_begun:
            self._shard_like(new, current).fill_from(old.detach())
        return new

    def _shard_like(self, tensor: Tensor, current: Tensor) -> Shard:
        parameter = current if isinstance(current, nn.Parameter) else None
        return self._backend.shard(tensor, parameter=parameter)

    def _shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        current = self._like.get(tensor)
        return self._backend.shard(tensor) if current is None else self._shard_like(tensor, current)

    def _state(self) -> ModelState:
        """Handles on the average, by the names of the module. Collective."""
        self._sync_buffers()
        return describe_model(self._copy, self._shard)

    def _average_apart(self) -> None:
        """Average sharded and plain tensors in separate calls: operations on lists cannot mix them."""
        average: Any = self._average
        if not isinstance(average, AveragedModel):
            return
        self._own_function = average.multi_avg_fn
        function = average.multi_avg_fn
        if function is None and average.avg_fn is None and self._backend.context.device.type != "cpu":
            # torch's default there
            function = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        if function is not None:
            average.multi_avg_fn = partial(_apart, function)

    def give_back(self, *, gather: bool) -> None:
        """Restore the callback; gather the tensors if the other ranks can, too."""
        for route in self._routes:
            route.remove()
        if isinstance(self._average, AveragedModel):
            self._average.multi_avg_fn = self._own_function
        if gather:
            self._gather()

    def _gather(self) -> None:
        """Gather every tensor of the copy in CPU memory. Collective."""
        tensors = list(self._like)
        shards = [self._shard(tensor) for tensor in tensors]
        replicated = [
            shard.is_whole and not isinstance(t, DTensor) for t, shard in zip(tensors, shards, strict=True)
        ]
        by_rank = all_gather_object(replicated, control_group())
        everywhere = [all(ranks) for ranks in zip(*by_rank, strict=True)]
        full: dict[Tensor, Tensor] = {}
        for tensor, shard, is_replicated in zip(tensors, shards, everywhere, strict=True):
            gather = partial(_unsharded, tensor, shard)
            kept = None
            if not is_replicated:
                kept = self._backend.at_end(gather, shape=shard.shape, dtype=shard.dtype)
            full[tensor] = _holding(tensor, tensor.detach().cpu() if kept is None else kept)
        for _, held, name in _tensors(self._copy):
            held[name] = full[held[name]]
        if not self._backend.keeps_weights:
            leave_on_meta(self._copy)
        move_to_host(self._average)

    def _update(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a hook that iterates over the module's parameters."""
        if any(a is not b for a, b in zip(self._module.parameters(), self._laid_out, strict=False)):
            self._backend.model_state(self._module)  # reshard after a forward without backward
        with as_stored(*self._module.parameters()):
            return own(*args, **kwargs)

    def _publish(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a hook that copies the average into the module."""
        self._sync_buffers()
        return self._update(own, *args, **kwargs)

    def _sync_buffers(self) -> None:
        """Broadcast rank zero's average of the buffers, because each rank averages its own."""
        if not is_distributed():
            return
        for buffer in self._copy.buffers():
            if not isinstance(buffer, DTensor):
                values = buffer.to(self._backend.context.device)
                broadcast_tensor(values)
                buffer.copy_(values)

    def _save(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a hook that saves the average's state dict, with handles instead of tensors."""
        handles = {f"{self._prefix}{name}": handle for name, handle in as_state_dict(self._state()).items()}
        rest = {}
        if isinstance(self._average, AveragedModel):
            rest["n_averaged"] = self._average.n_averaged.detach()
        with _answering(self._average, "state_dict", {**rest, **handles}):
            return own(*args, **kwargs)

    def _on_load_checkpoint(
        self, own: Callable[..., Any], trainer: Any, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Restore module and average in place, and pass the callback their restored state."""
        averaged = CURRENT in checkpoint and STATE in checkpoint
        if averaged:
            self._restore(checkpoint["state_dict"])
            restore_model(self._backend, self._module, checkpoint[CURRENT], strict=True)
        shown = {"state_dict": _own_state_dict(self._copy if averaged else self._module)}
        if averaged:
            shown[CURRENT] = _own_state_dict(self._module)
        read = {name: checkpoint[name] for name in shown}
        checkpoint.update(shown)
        try:
            with as_stored(*self._module.parameters()):
                own(trainer, module, checkpoint)
        finally:
            checkpoint.update(read)

    def _load_state_dict(self, own: Callable[..., None], state: dict[str, Any]) -> None:
        """Restore the average of a callback that keeps it in its own state."""
        if state.get(AVERAGE) is not None:
            self._restore(state[AVERAGE])
            state = {**state, AVERAGE: _own_state_dict(self._copy)}
        own(state)

    def _restore(self, source: Mapping[str, Any]) -> None:
        state = self._state()
        load_model(self._copy, state, source, strict=True, group=control_group())


def _tensors(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Return every parameter and buffer, sorted: its full name, the dict that holds it, its name there."""
    found = [
        (f"{prefix}.{name}".lstrip("."), held, name)
        for prefix, submodule in module.named_modules(remove_duplicate=False)
        for held in (submodule._parameters, submodule._buffers)
        for name, value in held.items()
        if value is not None
    ]
    return iter(sorted(found, key=lambda item: item[0]))


def _own_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return a module's own state dict: loading it into the module changes nothing."""
    with as_stored(*module.parameters()):
        return dict(module.state_dict())


def _apart(
    function: Callable[..., None], averages: Sequence[Tensor], current: Sequence[Tensor], count: Any
) -> None:
    for sharded in (True, False):
        chosen = [i for i, tensor in enumerate(averages) if isinstance(tensor, DTensor) is sharded]
        if chosen:
            function([averages[i] for i in chosen], [current[i] for i in chosen], count)


def _unsharded(tensor: Tensor, shard: Shard) -> Tensor:
    """Gather a tensor on every rank, in CPU memory. Collective."""
    if isinstance(tensor, DTensor):
        sharded: Any = tensor.detach()
        full: Tensor = sharded.to(sharded.device_mesh.device_type).full_tensor()
        return full.cpu()
    return gather_full(shard, everywhere=True)  # type: ignore[no-any-return]


@contextmanager
def _answering(owner: Any, method: str, answer: Any) -> Iterator[None]:
    """Make a method return a fixed answer, in a context."""
    route = _Route(owner, method, lambda own, *args, **kwargs: answer)
    try:
        yield
    finally:
        route.remove()
