"""Run one DeepSpeed engine with the user's module and optimizer, from set-up to removal."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from types import MethodType
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core.agree.divergence import Writes
from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.optimizers.own_optimizers import OwnOptimizers
from nnx_core.optimizers.step_arguments import with_closure
from nnx_core.view.guard import local_mode
from nnx_core.view.hidden_optimizer_state import HiddenState
from nnx_core.view.modules import lay_in_order, move_buffers_to, with_strides
from nnx_deepspeed._deepspeed_compat import (
    align_ids,
    disable_loss_scaling,
    forget_gradients,
    gather_persistent,
    hide_partitions,
    is_replicated,
    local_gradient_hooks,
    locally,
    mark_empty_as_available,
    overwritten_gradients,
    release_touched,
    reload_weights,
    remove_from_module,
    restart_backward_count,
    share_masters,
    show_partitions,
    skip_plain_tensors,
    take_assigned,
    update_persistent_shards,
    watch_backward,
    weights_and_masters,
    without_module_move,
    without_weight_broadcast,
)
from nnx_deepspeed.agreement import Agreement
from nnx_deepspeed.config import (
    FixedModel,
    refuse_other_dtypes,
    refuse_sparse,
    refuse_unfit,
    with_fitting_buckets,
)
from nnx_deepspeed.partitions import (
    FlatGradients,
    FrozenValues,
    GatheredGradients,
    Partitions,
    ShardedParameter,
    follow,
    were_written,
)
from nnx_deepspeed.unused import UnusedParameters, shadow_for_partitions

__all__ = ["ZeroEngine"]

T = TypeVar("T")


class ZeroEngine:
    """A module that DeepSpeed trains.

    Args:
        module: The module, which the engine moves and shards in place. Its parameters stay the same objects.
        optimizer: The user's optimizer; it keeps the module's parameters and steps through the engine.
        config: The config for ``deepspeed.initialize``.
        rank: This rank.
        local_rank: This rank's number on its node.
        device: The device of the module. Stage 3 moves each parameter when it shards it.
        writes: The checksums of values that user code writes into parameters.

    Raises:
        UnsupportedError: DeepSpeed cannot train this module with this optimizer.
        OptionError: DeepSpeed refuses the config.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        config: Mapping[str, Any],
        rank: int,
        local_rank: int,
        device: torch.device,
        writes: Writes,
    ) -> None:
        refuse_unfit(optimizer, config=config, device=device)
        refuse_other_dtypes(module)
        refuse_sparse(module)
        self.module, self.optimizer, self._writes = module, optimizer, writes
        self._groups = [g for g in optimizer.param_groups if any(p.requires_grad for p in g["params"])]
        self._number_of_groups = len(optimizer.param_groups)
        self._attributes = {parameter: set(vars(parameter)) for parameter in module.parameters()}
        self._attributes_of_modules = {submodule: set(vars(submodule)) for submodule in module.modules()}
        self._strides = lay_in_order(module.parameters())
        exact = _exact_weights(module, config)
        self.shadow = shadow_for_partitions(optimizer)
        align_ids()
        skip_plain_tensors()
        fitting = with_fitting_buckets(config, module)
        self._engine = _initialize(module, self.shadow, fitting, device=device, local_rank=local_rank)
        self._deepspeed_attributes = {p: set(vars(p)) - self._attributes[p] for p in module.parameters()}
        self._is_boundary = self._has_reduced = self._has_failed = False
        self.set_boundary(True)
        self.zero: Any = self._engine.optimizer
        share_masters(self.zero)
        disable_loss_scaling(self.zero)
        self.partitions = Partitions(self.zero, rank=rank, module=module, frozen=FrozenValues(exact))
        self.partitions.load_exact(exact)
        self.partitions.import_state(optimizer, self.shadow)
        self._empty = [p for p in module.parameters() if hasattr(p, "ds_numel") and not p.ds_numel]
        if self.partitions.shards_each_parameter:
            show_partitions(self._engine, ShardedParameter)
            watch_backward(self.zero, self._refuse_inner_backward)
        self._names = names = {parameter: name for name, parameter in module.named_parameters()}
        self._fixed = FixedModel(module)
        self._original_data = _data_by_parameter(module)
        trained = [p for p in self.partitions.parameters() if self.partitions.shape(p).numel()]
        self.agreement = Agreement(
            self._engine,
            module,
            trained,
            names=names,
            waits_to_reduce=config["zero_optimization"]["stage"] == 1,
            writes=writes,
        )
        self.gathered_gradients = GatheredGradients(self.partitions, device=device)
        self._unused = UnusedParameters(self.partitions, self.shadow, names=names)
        self._versions = self._current_versions()
        self.state = HiddenState(optimizer, "it is in DeepSpeed's flat partitions")
        self._own_optimizers = OwnOptimizers(module, lambda: [optimizer], engine="DeepSpeed")
        self._zero_grad = optimizer.zero_grad
        optimizer.zero_grad = MethodType(self._routed_zero_grad, optimizer)  # type: ignore[method-assign]

    def _routed_zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        self.gathered_gradients.forget()
        self._zero_grad(set_to_none=set_to_none)
        self._forget_reduced()
        if set_to_none:
            self.agreement.used.clear()

    def _forget_reduced(self) -> None:
        with local_mode():
            self.zero.zero_grad()
            forget_gradients(self.zero)
        self._has_reduced = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module through DeepSpeed's hooks."""
        if torch.is_grad_enabled():
            self._refuse_after_failure()
        with local_mode():
            self._refuse_changes()
            # The order matters: shards take every value that user code wrote, before a gather overwrites it.
            self._release_touched()
            self._take_assigned()
            update_persistent_shards(self.zero)
            gather_persistent(self.zero)
            mark_empty_as_available(self._empty)
        with self.agreement.step("training" if torch.is_grad_enabled() else "evaluation"):
            return self._engine(*args, **kwargs)

    def _refuse_inner_backward(self) -> None:
        if torch.is_grad_enabled() or not self.agreement.runs_backward:
            raise UnsupportedError(
                "DeepSpeed's stage 3 allows one backward through its layers; this step computes gradients "
                "inside, as `torch.autograd.grad` does, or differentiates twice.",
                remedy="Raise persistence_threshold, which replicates layers, or use 'nnx_deepspeed_2'.",
            )

    def _refuse_after_failure(self) -> None:
        if self._has_failed:
            raise UnsupportedError(
                "a backward ended with an error that was caught, and DeepSpeed's buckets hold some of its "
                "gradients.",
                remedy="Let the error end the run and resume from the last checkpoint, skip the batch before "
                "its backward, or use strategy 'nnscaler_zero'.",
            )

    def _refuse_changes(self) -> None:
        if len(self.optimizer.param_groups) != self._number_of_groups:
            raise UnsupportedError(
                "a param group was added while training; DeepSpeed's partitions are fixed when it starts.",
                remedy="Give all parameters to the optimizer in `configure_optimizers`, or use 'fsdp_auto'.",
            )
        self._fixed.refuse_changes()

    def set_boundary(self, is_boundary: bool) -> None:
        """Set whether a step follows the next backward."""
        self._is_boundary = is_boundary
        self._engine.set_gradient_accumulation_boundary(is_boundary)

    def backward(
        self,
        loss: Tensor,
        run: Callable[..., None],
        *,
        retain_graph: bool = False,
        in_one_go: bool = True,
    ) -> None:
        """Compute gradients and add them up; the last backward before a step reduces them into partitions.

        Args:
            loss: The tensor that backward begins at.
            run: A function that runs backward from a tensor, with ``retain_graph``.
            retain_graph: True if another backward through this graph follows.
            in_one_go: True if `run` goes through the model at most once.

        Raises:
            UnsupportedError: Another backward would need weights that stage 3 has released.
        """
        self._refuse_kept_graph(retain_graph)
        self._refuse_after_failure()
        mark_empty_as_available(self._empty)
        if self.gathered_gradients.are_shown:
            present = self.gathered_gradients.hide()
            self._forget_reduced()
            self.agreement.used = set(present)
        # A backward after a reduction overwrites the reduced gradients in stages 1 and 2. User code may call
        # backward twice before a step, so the earlier gradients are cloned and added afterwards.
        earlier = [tensor.clone() for tensor in overwritten_gradients(self.zero)] if self._has_reduced else []
        if self._has_reduced:
            restart_backward_count(self.zero)

        def run_through_engine() -> None:
            # DeepSpeed calls `loss.backward`. `run` calls backward of this view, so that it does not recurse.
            with torch.enable_grad():
                begin = loss.view_as(loss)

            def run_graph(**kwargs: Any) -> None:
                run(begin, **kwargs)
                self.agreement.finish_graph()  # before DeepSpeed reduces the last bucket

            loss.backward = run_graph  # type: ignore[method-assign, assignment] # DeepSpeed calls it
            try:
                self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
            finally:
                del loss.backward

        self._has_failed = True  # until backward returns: after an error the buckets are unusable
        with self._own_optimizers.in_backward():
            self.agreement.backward(
                loss, run_through_engine, is_boundary=self._is_boundary, in_one_go=in_one_go
            )
        self._has_failed = False
        if earlier:
            for tensor, before in zip(overwritten_gradients(self.zero), earlier, strict=True):
                tensor.add_(before)
        self._has_reduced = self._is_boundary
        if self._has_reduced:
            self.partitions.drop_gradients(self.agreement.unused)

    def _refuse_kept_graph(self, retain_graph: bool) -> None:
        if retain_graph and self.partitions.shards_each_parameter:
            raise UnsupportedError(
                "DeepSpeed's stage 3 goes through a graph once; this backward has retain_graph=True.",
                remedy="Add the losses and call backward once, or use 'nnx_deepspeed_2' or 'fsdp_auto'.",
            )

    @cached_property
    def _takes_closure(self) -> bool:
        """True if the user's step takes a closure, in which DeepSpeed's step runs."""
        return "closure" in with_closure(type(self.optimizer).step, lambda: None)[1]

    def step(self, step: Callable[..., T], closure: Callable[[], Any] | None) -> T:
        """Run the user's optimizer step with its hooks and closure, and DeepSpeed's own step inside it."""

        def closure_and_step() -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad(), self.state.user_code():
                    loss = closure()
            visible.update(self._step())
            return loss

        if not self._takes_closure:
            raise UnsupportedError(
                f"`{type(self.optimizer).__qualname__}.step` takes no closure, and DeepSpeed's own step runs "
                "in one.",
                remedy="Define `step(self, closure=None)`, and call the closure before the update.",
            )
        visible: dict[nn.Parameter, Tensor] = {}
        with self.state.stepping():
            result = step(closure=closure_and_step)  # `p.grad` is None, so the user's own update does nothing
        self.gathered_gradients.show_again(visible)
        return result

    def _step(self) -> dict[nn.Parameter, Tensor]:
        """Let DeepSpeed step, and return the gradients that user code sees."""
        self._refuse_after_failure()
        self._checksum_replicas()
        if not self._has_reduced:  # every gradient is None: a step changes nothing
            if self.gathered_gradients.are_shown:
                raise UnsupportedError(
                    "DeepSpeed has already stepped with these gradients, and no backward followed.",
                    remedy="Call backward before each step, or use strategy 'fsdp_auto'.",
                )
            self._refuse_given_gradients()
            return {}
        copy_hyperparameters(self._groups, self.shadow)
        self.take_written_weights()
        were_shown = self.gathered_gradients.are_shown
        visible = self.gathered_gradients.write_back()
        if visible is None:
            return {}
        if were_shown:  # a gradient that user code set to None counts as unused
            self.agreement.used = set(visible)
        with local_mode(), self._unused.preserved(self.agreement.unused), FlatGradients(self.shadow) as flats:
            self._engine.step()
        self._versions = self._current_versions()
        self._has_reduced = False
        return self._left_by_step(visible, flats)

    def _left_by_step(
        self, visible: dict[nn.Parameter, Tensor], flats: FlatGradients
    ) -> dict[nn.Parameter, Tensor]:
        """Return the visible gradients as the user's step has left them. Collective.

        A step may call `zero_grad`, and user code may count on it: the next backward adds to what is left.
        """
        if not visible:
            return visible
        left = self.gathered_gradients.after_step(visible, flats)
        if not left:
            self.gathered_gradients.are_shown = False
        if len(left) < len(visible):
            self.agreement.used = set(left)
        return left

    def _checksum_replicas(self) -> None:
        with local_mode():
            for parameter in self._names if self._writes.are_compared() else ():
                if is_replicated(parameter):
                    self._writes.add(parameter, parameter)

    def _refuse_given_gradients(self) -> None:
        for parameter in self.partitions.parameters():
            if parameter.grad is not None:
                raise UnsupportedError(
                    f"the gradient of {self._names[parameter]} was assigned, and no backward of the strategy "
                    "came before: each rank has the gradient of its own samples.",
                    remedy="Compute gradients by `self.manual_backward(loss)`, and change `p.grad` then.",
                )

    @locally
    @torch.no_grad()
    def take_written_weights(self, *, across_devices: bool = False) -> None:
        """Update the masters from weights that user code has written in place since the last step.

        Args:
            across_devices: True to compare weights with masters on another device too. False compares those
                only after a change of a version counter, because the comparison moves the weights. A write
                through ``.data`` changes no version counter.
        """
        self._release_touched()
        self._take_assigned()
        versions = self._current_versions()
        across_devices = across_devices or versions != self._versions
        pairs = [
            (weights, masters)
            for weights, masters in weights_and_masters(self.zero)
            if weights.device == masters.device or across_devices
        ]
        if were_written(pairs):
            for weights, masters in pairs:
                follow(masters, weights)
        if across_devices:
            self.partitions.frozen.follow()
        self._versions = versions

    def written(self) -> dict[str, int]:
        """Return checksums of the values that user code has written into parameters since the last call."""
        with local_mode():
            self._release_touched()
            return self._writes.take(self.module)

    def _release_touched(self) -> None:
        if self.partitions.shards_each_parameter:
            release_touched(self._names)

    def _take_assigned(self) -> None:
        for parameter in take_assigned(self._original_data):
            raise UnsupportedError(
                f"{self._names[parameter]}.data was replaced by a tensor of another size.",
                remedy="Write in place, as `copy_` does.",
            )

    def _current_versions(self) -> dict[nn.Parameter, int]:
        return {parameter: parameter._version for parameter in self.partitions.parameters()}

    @locally
    def reload(self) -> None:
        """Make the weights from the current masters. Collective."""
        self.partitions.frozen.reload()
        reload_weights(self.zero)
        self._versions = self._current_versions()

    def forget(self) -> None:
        """Remove the hooks that would outlive the engine, also after an error. Not collective."""
        self.state.remove()
        self._own_optimizers.remove()

    @locally
    def remove(self, at_end: Callable[..., Tensor], *, with_state: bool) -> None:
        """Give the module full plain parameters with the masters' precision. Collective.

        Args:
            at_end: `Backend.at_end`, which returns the tensor that this rank keeps of a parameter.
            with_state: True if every rank's optimizer gets its full state.
        """
        self.take_written_weights(across_devices=True)
        # Gather everything before any removal, because the gathers need the partitions and all ranks.
        full = {
            parameter: at_end(
                partial(self._gather, parameter),
                shape=self.partitions.shape(parameter),
                dtype=self.partitions.master(parameter).dtype,
            )
            for parameter in self._attributes
        }
        self.forget()
        if with_state:
            self.partitions.export_state(self.optimizer, self.shadow)
        self.agreement.remove()
        self._engine.destroy()
        remove_from_module(self._engine, self.module, self._attributes_of_modules)
        for parameter, value in full.items():
            hide_partitions(parameter)
            for name in set(vars(parameter)) - self._attributes[parameter]:
                if name in self._deepspeed_attributes[parameter] or name.startswith(("ds_", "_nnx_", "_hp_")):
                    delattr(parameter, name)
            parameter.data = with_strides(value, self._strides.get(parameter))
            parameter.grad = None
        vars(self.optimizer).pop("zero_grad", None)

    def _gather(self, parameter: nn.Parameter) -> Tensor:
        shard = self.partitions.master(parameter)
        if not self.partitions.is_sharded(parameter):
            return shard.data[0].clone()
        device = parameter.device
        full = torch.zeros(shard.shape, dtype=shard.dtype, device=device)
        for box, view in zip(shard.boxes, shard.data, strict=True):
            full[box.slices].copy_(view)
        dist.all_reduce(full)  # exact: one rank holds each element, and the others add zeros
        return full


@locally
def _data_by_parameter(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    return {parameter: parameter.data for parameter in module.parameters()}


def _initialize(
    module: nn.Module,
    optimizer: Optimizer,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    local_rank: int,
) -> Any:
    """Create DeepSpeed's own engine on the trainer's device; its default is the device of ``LOCAL_RANK``."""
    arguments = None if device.index is None else Namespace(device_rank=device.index)
    move_buffers_to(module, device)
    in_place = without_module_move(module) if config["zero_optimization"]["stage"] == 3 else nullcontext()
    try:
        with without_weight_broadcast(), local_gradient_hooks(), _local_rank_set(local_rank), in_place:
            return deepspeed.initialize(
                args=arguments,
                model=module,
                optimizer=optimizer,
                config=dict(config),
                dist_init_required=False,
            )[0]
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors())
        raise OptionError(
            f"DeepSpeed refuses its config: {wrong}.",
            remedy="Correct your `config`, or the option of that name.",
        ) from error


@contextmanager
def _local_rank_set(local_rank: int) -> Iterator[None]:
    """Set ``LOCAL_RANK`` for DeepSpeed, which SLURM's launcher does not set, and unset it afterwards.

    A leftover value would tell Lightning that the next Trainer's processes run already.
    """
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]


def _exact_weights(module: nn.Module, config: Mapping[str, Any]) -> dict[nn.Parameter, Tensor]:
    """Return rank zero's weights before DeepSpeed rounds them to 16 bits and makes masters of the result.

    The copies are in host memory, where the module is at this time.
    """
    if not config.get("bf16", {}).get("enabled"):
        return {}
    return {parameter: parameter.detach().clone() for parameter in module.parameters()}


# DeepSpeed steps a shadow of the user's optimizer.
#
# DeepSpeed puts its flat partitions into the param groups of an optimizer, empties them between steps
# (stage 3), and calls ``step`` once for each group. Schedulers, hooks and callbacks would see all of that in
# the user's object. So DeepSpeed gets a shadow, an optimizer of the same class and settings with its own
# groups and state. The user's object keeps the module's parameters. Their ``.grad`` is None when it steps,
# so its own step changes nothing and still runs its hooks. Its state would be empty, so it is hidden.


def copy_hyperparameters(groups: Sequence[dict[str, Any]], shadow: Optimizer) -> None:
    """Copy the learning rate and all other settings of the user's groups to the shadow.

    Args:
        groups: The user's groups that the shadow's groups mirror, in order.
        shadow: The shadow.
    """
    for source, target in zip(groups, shadow.param_groups, strict=True):
        target.update({key: value for key, value in source.items() if key != "params"})
