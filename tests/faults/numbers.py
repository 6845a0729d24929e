"""Faults in the numbers of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from faults import DECLARED, EVERYTHING, fault
from nnx import Capabilities
from nnx_core.optimizers.gradients import ParallelGradScaler, clip_gradients_by_norm
from nnx_fsdp.backend import FSDPBackend
from nnx_tiny.backend import TinyBackend


class SummedGradients(TinyBackend):
    """Sums gradients over the ranks instead of averaging them."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss * self.context.world_size, *args, **kwargs)


class KeptGradients(TinyBackend):
    """Never zeroes a gradient."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad = lambda set_to_none=True: None


class RoundedGradients(TinyBackend):
    """Reduces float64 gradients in float32."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.float())


class OwnStart(TinyBackend):
    """Starts every rank from its own weights."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}


class LastBatchAveraged(TinyBackend):
    """Averages only the last of the accumulated batches."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        earlier = {p: p.grad for p in module.parameters() if p.grad is not None and self._averaging}
        for parameter in earlier:
            parameter.grad = None
        super().backward(module, loss, *args, **kwargs)
        for parameter, gradient in earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad


class FullAccumulationsOnly(TinyBackend):
    """Divides the sum of a short accumulation by its own length."""

    _longest, _length = 1, 0

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        self._length += 1
        if self._averaging:
            self._longest = max(self._longest, self._length)
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad *= self._longest / self._length
            self._length = 0


class OverwrittenGradients(TinyBackend):
    """Replaces earlier gradients by those of a later synchronized backward."""

    _adding = False

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self._adding:
            for parameter in module.parameters():
                parameter.grad = None
        self._adding = not self._averaging
        super().backward(module, loss, *args, **kwargs)


class DroppedByHand(TinyBackend):
    """Loses unsynchronized gradients in manual optimization."""

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        with super().no_sync(module):
            yield
        if not module.automatic_optimization:
            for parameter in module.parameters():
                parameter.grad = None


class OwnSums(TinyBackend):
    """Keeps sums of its own, which restart only after a dropped gradient."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        before = {p: None if p.grad is None else p.grad.clone() for p in module.parameters()}
        super().backward(module, loss, *args, **kwargs)
        for parameter, earlier in before.items():
            if earlier is not None and parameter in self.sums and parameter.grad is not None:
                parameter.grad.copy_(self.sums[parameter] + parameter.grad - earlier)
            if parameter.grad is not None:
                self.sums[parameter] = parameter.grad.clone()

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.sums: dict[nn.Parameter, Tensor] = {}


class NormOfOneRank(FSDPBackend):
    """Clips by the norm of this rank's shards."""

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float, **kwargs: Any) -> Tensor:
        local = [gradient.local for gradient in self.gradients(optimizer)]
        norm = torch.stack([gradient.norm() for gradient in local]).norm()
        for gradient in local:
            gradient *= torch.clamp(max_norm / norm, max=1.0)
        return norm


class ValueIgnored(TinyBackend):
    """Does not clip by value."""

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        pass


class NormOfAll(TinyBackend):
    """Clips each optimizer by the norm over all of them."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float, **kwargs: Any) -> Tensor:
        everything = [gradient for each in self.optimizers for gradient in self.gradients(each)]
        copies = [type(g)(g.local.clone(), g.replicas) for g in everything]
        norm = clip_gradients_by_norm(copies, max_norm=max_norm, device=self.context.device)
        for gradient in self.gradients(optimizer):
            gradient.local.mul_(torch.clamp(max_norm / norm, max=1.0))
        return norm


class _LateScaler(ParallelGradScaler):
    def unscale_(self, optimizer: Optimizer) -> None:
        pass

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        super().unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


class ClippedScaled(TinyBackend):
    """Unscales gradients only at the step."""

    def grad_scaler(self, default: torch.amp.GradScaler) -> torch.amp.GradScaler:
        return default if isinstance(default, _LateScaler) else _LateScaler(self, replaces=default)


class _Stepping(TinyBackend):
    """Acts before and after each step."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.initial = {
            id(group): {key: value for key, value in group.items() if key != "params"}
            for optimizer in optimizers
            for group in optimizer.param_groups
        }

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.before(optimizer)
        result = step(*args, **kwargs)
        self.after(optimizer)
        return result

    def before(self, optimizer: Optimizer) -> None:
        pass

    def after(self, optimizer: Optimizer) -> None:
        pass


class CountsTwice(_Stepping):
    """Counts every step as two, which changes Adam's bias correction."""

    def after(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] += 1


class ForgetsMomentum(_Stepping):
    """Restarts momentum with each step."""

    def after(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state.pop("momentum_buffer", None)


class OneRate(TinyBackend):
    """Gives every parameter group the learning rate of the first."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.param_groups[0]["lr"]


class FrozenDecay(_Stepping):
    """Steps with the initial weight decay."""

    def before(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if "weight_decay" in self.initial.get(id(group), {}):
                group["weight_decay"] = self.initial[id(group)]["weight_decay"]


class _Choosing(TinyBackend):
    """Averages the gradients of some parameters."""

    def averaged(self) -> Sequence[nn.Parameter]:
        raise NotImplementedError

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)
        for parameter in self.averaged() if self._averaging else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.context.world_size


class KnowsTheFirst(_Choosing):
    """Averages the gradients of parameters that were in an optimizer at the start."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.known = [parameter for group in groups for parameter in group["params"]]

    def averaged(self) -> Sequence[nn.Parameter]:
        return self.known


class FirstOptimizerOnly(_Choosing):
    """Averages the gradients of the first optimizer's parameters."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.first = next(iter(optimizers), None)

    def averaged(self) -> Sequence[nn.Parameter]:
        return [p for group in self.first.param_groups for p in group["params"]]


class ClosureOnce(TinyBackend):
    """Evaluates the closure once, and repeats the result."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("closure") is not None:
            kwargs["closure"] = functools.cache(kwargs["closure"])
        return step(*args, **kwargs)


class FrozenRate(_Stepping):
    """Steps with the initial learning rate."""

    def before(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.initial.get(id(group), group)["lr"]


class OneSchedule(_Stepping):
    """Lets every group follow the schedule of the first."""

    def before(self, optimizer: Optimizer) -> None:
        first = optimizer.param_groups[0]
        for group in optimizer.param_groups:
            if "initial_lr" in group:
                group["lr"] = group["initial_lr"] * first["lr"] / first["initial_lr"]


class ScheduledTwice(DDPStrategy):
    """Steps the schedulers of every step once more."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        for config in self.lr_scheduler_configs:
            if config.interval == "step":
                config.scheduler.step()
        return result


class ScheduledEarly(DDPStrategy):
    """Steps the schedulers of every epoch with every step, too."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        for config in self.lr_scheduler_configs:
            by_epoch = config.interval == "epoch" and not config.reduce_on_plateau
            if by_epoch and self.lightning_module.automatic_optimization:
                config.scheduler.step()
        return result


class OwnMetric(DDPStrategy):
    """Does not reduce metrics."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor


class AutomaticOnly(TinyBackend):
    """Averages gradients only if Lightning runs the step."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if module.automatic_optimization:
            super().backward(module, loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)


class NotInManualClosures(TinyBackend):
    """Does not average within an optimizer's step in manual optimization."""

    _stepping = False

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._stepping = True
        try:
            return step(*args, **kwargs)
        finally:
            self._stepping = False

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._stepping and not module.automatic_optimization:
            loss.backward(*args, **kwargs)
        else:
            super().backward(module, loss, *args, **kwargs)


class RootForwardOnly(TinyBackend):
    """Reduces the gradients of a step only if the root's forward ran in it."""

    _ran = False

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._ran = False
        noticed = module.register_forward_pre_hook(lambda *_: setattr(self, "_ran", True))
        try:
            return super().run_step(module, step, *args, **kwargs)
        finally:
            noticed.remove()

    def backward(self, module: nn.Module, loss: Any, *args: Any, **kwargs: Any) -> None:
        if self._ran:
            super().backward(module, loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)


class StaleWeights(FSDPBackend):
    """Computes with the weights that a forward gathered before the optimizer's step."""

    _keeping = False

    def __init__(self, options: Any) -> None:
        super().__init__(replace(options, min_num_params=100, reshard_after_forward=False))

    def setup(self, context: Any) -> None:
        super().setup(context)
        sharding: Any = self.sharding
        if "free" in vars(sharding):
            return
        free, run_manual = sharding.free, sharding._run_manual
        free_gathered = sharding.free_gathered
        sharding.free = lambda root: None if self._keeping else free(root)
        sharding.free_gathered = lambda: None if self._keeping else free_gathered()

        def run_and_keep(*args: Any, **kwargs: Any) -> Any:
            with self._keep():
                return run_manual(*args, **kwargs)

        sharding._run_manual = run_and_keep

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._keep():
            return super().optimizer_step(*args, **kwargs)

    @contextmanager
    def _keep(self) -> Iterator[None]:
        before, self._keeping = self._keeping, True
        try:
            yield
        finally:
            self._keeping = before


class NoAutocast(TinyBackend):
    """Computes in the weights' dtype, at any precision."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.context.device.type, enabled=False):
            return step(*args, **kwargs)


class WidenedWeights(TinyBackend):
    """Returns float32 weights."""

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        module.float()
        return {}


class _LocalScaler(ParallelGradScaler):
    def _unscale_grads_(self, optimizer: Optimizer, inv_scale: Tensor, *args: Any) -> Any:
        found = torch.zeros(1)
        for gradient in self._nnx_gradients(optimizer):
            gradient.local.mul_(inv_scale)
            found = torch.maximum(found, (~torch.isfinite(gradient.local)).any().float())
        return {torch.device("cpu"): found}


class OwnOverflow(FSDPBackend):
    """Looks for overflow only in each rank's own shards."""

    def grad_scaler(self, default: torch.amp.GradScaler) -> torch.amp.GradScaler:
        return (
            default
            if isinstance(default, _LocalScaler)
            else _LocalScaler(self.gradients, self.context.device, replaces=default)
        )


class Hoarding(TinyBackend):
    """Holds everything, although it declares sharding."""


DECLARED |= {
    RoundedGradients: Capabilities(precisions=("32-true", "64-true")),
    ClippedScaled: Capabilities(precisions=("32-true", "16-mixed")),
    NoAutocast: Capabilities(precisions=("32-true", "bf16-mixed")),
    WidenedWeights: Capabilities(precisions=("32-true", "bf16-true")),
    OwnOverflow: Capabilities(precisions=("32-true", "16-mixed")),
    Hoarding: Capabilities(shards_parameters=True, shards_gradients=True, shards_optimizer=True),
}

_MOMENTUM = ("parameter_groups", "parameter_groups_edited", "parameter_group_added", "scheduler_by_group")
_SEVERAL = ("several_optimizers_clipped", "several_optimizers_toggled", "submodules_called_directly")
_ADAM = ("several_optimizers", "several_optimizers_toggled", "submodules_called_directly")
_ACCUMULATING = ("accumulation_ends_with_epoch", "clip_with_accumulation", "manual_accumulation_no_sync")


FAULTS = [
    fault("gradients summed, not averaged", SummedGradients, "losses_float32", *EVERYTHING),
    fault("gradients never zeroed", KeptGradients, "losses_float32", *EVERYTHING),
    fault("float64 reduced in float32", RoundedGradients, "losses_float64", "precision_64_true"),
    fault("weights not broadcast at the start", OwnStart, "ranks_start_with_equal_weights"),
    fault("only the last accumulated batch averaged", LastBatchAveraged, "accumulation", *_ACCUMULATING),
    fault(
        "short accumulation divided by its own length", FullAccumulationsOnly, "accumulation_ends_with_epoch"
    ),
    fault("a second backward overwrites the first", OverwrittenGradients, "manual_accumulation"),
    fault("gradients lost in block_backward_sync", DroppedByHand, "manual_accumulation_no_sync"),
    fault("gradients zeroed in place come back", OwnSums, "gradients_zeroed_in_place"),
    fault(
        "clipped by the norm of one rank's shards",
        NormOfOneRank,
        "clip_by_norm",
        "clip_with_accumulation",
        "manual_clipping",
        "several_optimizers_clipped",
        "clip_after_unscaling",
    ),
    fault("clipping by value forgotten", ValueIgnored, "clip_by_value"),
    fault("clipped by the norm over all optimizers", NormOfAll, "several_optimizers_clipped"),
    fault("clipped before the loss scale is off", ClippedScaled, "clip_after_unscaling"),
    fault("optimizer steps counted twice", CountsTwice, "adamw", *_ADAM, "elementwise_optimizers"),
    fault("momentum lost", ForgetsMomentum, "sgd_momentum", *_MOMENTUM, "elementwise_optimizers"),
    fault(
        "one learning rate for all groups",
        OneRate,
        "parameter_groups",
        "parameter_groups_edited",
        "scheduler_by_group",
    ),
    fault("changed weight decay ignored", FrozenDecay, "parameter_groups_edited"),
    fault("added parameters not averaged", KnowsTheFirst, "parameter_group_added"),
    fault("closure evaluated once", ClosureOnce, "closure_called_twice"),
    fault(
        "schedulers ignored",
        FrozenRate,
        "scheduler_by_step",
        "scheduler_by_epoch",
        "scheduler_by_group",
        "scheduler_on_plateau",
        "manual_optimization",
        "parameter_groups_edited",
    ),
    fault("schedulers stepped twice", ScheduledTwice, "scheduler_by_step", "scheduler_by_group"),
    fault("epoch's scheduler stepped by step", ScheduledEarly, "scheduler_by_epoch"),
    fault("one schedule for all groups", OneSchedule, "scheduler_by_group"),
    fault("plateau decided by one rank", OwnMetric, "scheduler_on_plateau"),
    fault(
        "manual optimization not averaged",
        AutomaticOnly,
        "manual_optimization",
        "manual_closure",
        "manual_accumulation",
        "manual_accumulation_no_sync",
        "forward_without_backward",
        "manual_clipping",
        "several_optimizers",
        *_SEVERAL,
    ),
    fault("manual closures not averaged", NotInManualClosures, "manual_closure"),
    fault("stale weights after a forward", StaleWeights, "forward_without_backward"),
    fault("second optimizer not averaged", FirstOptimizerOnly, "several_optimizers", *_SEVERAL),
    fault("parts of the root not reduced", RootForwardOnly, "submodules_called_directly"),
    fault("bf16-mixed computes in float32", NoAutocast, "precision_bf16_mixed"),
    fault("bf16-true gives float32 weights back", WidenedWeights, "precision_bf16_true"),
    fault("overflow seen by one rank only", OwnOverflow, "overflow_on_one_rank"),
    fault(
        "declared sharding that does not shard",
        Hoarding,
        "shards_parameters",
        "shards_gradients",
        "shards_optimizer",
    ),
]
