"""Faults that user code between the calls of an engine reveals."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad
from torch.optim import Optimizer

import nnx
from faults import EVERYTHING, fault, user_patterns_writes
from nnx_core import Backend, ParallelContext
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.direct_calls import stop_warning
from nnx_core.random_state import host_state_kept
from nnx_tiny.averaging import average_gradients
from nnx_tiny.backend import TinyBackend


class PairsWhatItHas(TinyBackend):
    """Averages a rank's gradients with those at the same position on other ranks."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        nnx.Backend.backward(self, module, loss, *args, **kwargs)
        if not self._averaging:
            return
        own = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in own])
        flat = pad(flat, (0, sum(parameter.numel() for parameter in module.parameters()) - len(flat)))
        dist.all_reduce(flat)
        flat /= self.context.world_size
        for gradient, start in zip(own, _starts(own), strict=True):
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    return [sum(tensor.numel() for tensor in tensors[:number]) for number in range(len(tensors))]


class HidesGradients(TinyBackend):
    """Hides gradients between backward and the step."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.hidden: dict[nn.Parameter, Tensor | None] = {}

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.collect_gradients(module)
        super().backward(module, loss, *args, **kwargs)
        self.hidden = {parameter: parameter.grad for parameter in module.parameters()}
        for parameter in self.hidden:
            parameter.grad = None

    def publish_gradients(self, module: nn.Module) -> None:
        pass

    def collect_gradients(self, module: nn.Module) -> None:
        for parameter, gradient in self.hidden.items():
            parameter.grad = gradient
        self.hidden = {}


class IgnoresChanges(TinyBackend):
    """Steps with the gradients of backward, and ignores changes by hooks."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.kept: dict[nn.Parameter, Tensor] = {}

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        self.kept = {p: p.grad.clone() for p in module.parameters() if p.grad is not None}

    def publish_gradients(self, module: nn.Module) -> None:
        pass

    def collect_gradients(self, module: nn.Module) -> None:
        for parameter, gradient in self.kept.items():
            parameter.grad = gradient.clone()


class NeedsItsOwnBackward(TinyBackend):
    """Averages gradients only after a backward by its own method, without an error otherwise."""

    reduces_in_backward = False


class PlainFSDP2(TinyBackend):
    """Torch's plain FSDP2 of each layer, which reshards after forward."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        super().parallelize(module, sample)
        before = dict(module.named_parameters())
        root: Any = module
        if self.context.world_size > 1:
            for layer in (root.embed, *root.blocks, root.head):
                fully_shard(layer, reshard_after_forward=True)
        return {before[name]: p for name, p in module.named_parameters() if p is not before[name]}

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        Backend.backward(self, module, loss, *args, **kwargs)

    reduces_in_backward = False


class LastBackwardOnly(TinyBackend):
    """Replaces the gradients of an earlier backward."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = None
        super().backward(module, loss, *args, **kwargs)


class RealPartsOnly(TinyBackend):
    """Loses the imaginary parts of gradients."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        for parameter in module.parameters():
            if parameter.is_complex() and parameter.grad is not None:
                parameter.grad = parameter.grad.real.to(parameter.dtype)


class DenseOnly(TinyBackend):
    """Averages only gradients that are not sparse."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        nnx.Backend.backward(self, module, loss, *args, **kwargs)
        sparse = {p: p.grad for p in module.parameters() if p.grad is not None and p.grad.is_sparse}
        for parameter in sparse:
            parameter.grad = None
        average_gradients(module, bucket_megabytes=self.options.bucket_megabytes)
        for parameter, gradient in sparse.items():
            parameter.grad = gradient


class OwnBackwardOnly(TinyBackend):
    """Computes gradients without the module's own `backward`."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module.__dict__["backward"] = lambda loss, *args, **kwargs: loss.backward(*args, **kwargs)
        return super().run_step(module, step, *args, **kwargs)


class TrainsTheOriginal(TinyBackend):
    """Trains only the originals of parametrized weights."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        for name, parameter in module.named_parameters():
            if ".parametrizations." in name and not name.endswith(".original"):
                parameter.grad = None


class DropsUnannounced(TinyBackend):
    """Drops the gradients of parameters outside the graph of the loss."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        trained = list(module.parameters())
        nodes = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in trained]
        used: list[bool] = []
        hook = loss.register_hook(lambda _: used.extend(map(torch._C._will_engine_execute_node, nodes)))
        super().backward(module, loss, *args, **kwargs)
        hook.remove()
        for parameter, is_used in zip(trained, used, strict=True):
            parameter.grad = parameter.grad if is_used else None


class KeepsFailedGradients(TinyBackend):
    """Adds leftover gradients of a failed backward to the next ones."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.left: dict[nn.Parameter, Tensor] = {}

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        left, self.left = self.left, {}
        try:
            super().backward(module, loss, *args, **kwargs)
        except RuntimeError:
            self.left = {p: p.grad for p in module.parameters() if p.grad is not None}
            raise
        for parameter, gradient in left.items():
            if parameter.grad is not None:
                parameter.grad += gradient


class ForgetsWhatAStepWrites(TinyBackend):
    """Undoes writes of user code in a step without an optimizer's step."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = {parameter: parameter.detach().clone() for parameter in module.parameters()}
        result = super().run_step(module, step, *args, **kwargs)
        for parameter, value in before.items():
            parameter.data = value
        return result


class FirstOptimizersOnly(TinyBackend):
    """Steps only the initial optimizers."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.first = list(optimizers)

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        if optimizer not in self.first:
            return None if closure is None else closure()
        return step(closure, **kwargs)


class RestoresGradients(TinyBackend):
    """Puts back the gradients of before a step, as an engine that steps a copy of them does."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before = [parameter.grad for parameter in parameters]
        result = step(*args, **kwargs)
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        return result


class AveragesForItsOptimizers(TinyBackend):
    """Averages only the gradients of parameters in the initial optimizers."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.held = {p for one in optimizers for group in one.param_groups for p in group["params"]}

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        others = [parameter for parameter in module.parameters() if parameter not in self.held]
        mine: dict[nn.Parameter, Tensor] = {}
        hooks = [p.register_hook(lambda gradient, p=p: mine.update({p: gradient.clone()})) for p in others]
        super().backward(module, loss, *args, **kwargs)
        for hook in hooks:
            hook.remove()
        for parameter, gradient in mine.items():
            parameter.grad = gradient


class StepsWithFlatShards(TinyBackend):
    """Gives optimizers flat shards of the parameters, and evaluates closures once."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        loss = closure() if closure else None
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        whole = [parameter.data for parameter in trained]
        for parameter in trained:
            gradient = self._part(parameter.grad)
            parameter.data = self._part(parameter.data)
            parameter.grad = gradient
        step(lambda: loss)
        for parameter, values in zip(trained, whole, strict=True):
            parts = [torch.empty_like(parameter.data) for _ in range(self.context.world_size)]
            dist.all_gather(parts, parameter.data)
            values.copy_(torch.cat(parts).flatten()[: values.numel()].view_as(values))
            parameter.grad, parameter.data = None, values
        return loss

    def _part(self, tensor: Tensor) -> Tensor:
        size = -(-tensor.numel() // self.context.world_size)
        flat = pad(tensor.flatten(), (0, size * self.context.world_size - tensor.numel()))
        part = flat[self.context.rank * size :][:size]
        return (part.view(size, 1) if tensor.dim() > 1 else part).clone()


class AveragesBeforeTheStep(TinyBackend):
    """Steps with the mean of per-rank gradients, after user code has changed them."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        loss = closure() if closure else None
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.context.world_size
        step(lambda: loss)
        return loss


class HidesRowsOfState(TinyBackend):
    """Shows zeros in place of some rows of the optimizer state between steps."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.whole: list[tuple[Tensor, Tensor]] = []

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        loss = closure() if closure else None
        for tensor, values in self.whole:
            tensor.copy_(values)
        step(lambda: loss)
        held = [value for entries in optimizer.state.values() for value in entries.values() if value.ndim]
        self.whole = [(value, value.clone()) for value in held]
        for value in held:
            value[self.context.rank :: self.context.world_size] = 0
        return loss


class KeepsItsState(TinyBackend):
    """Steps with its own state, and ignores writes to it."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.kept: dict[Any, dict[str, Tensor]] = {}

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Any = None, **kwargs: Any
    ) -> Any:
        loss = closure() if closure else None
        for parameter, entries in self.kept.items():
            optimizer.state[parameter] = {name: value.clone() for name, value in entries.items()}
        step(lambda: loss)
        self.kept = {
            parameter: {name: value.clone() for name, value in entries.items()}
            for parameter, entries in optimizer.state.items()
        }
        return loss


class NeverFreezes(TinyBackend):
    """Always trains the initially trained parameters."""

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for parameter in self.trained:
            parameter.requires_grad_()
        return super().run_step(module, step, *args, **kwargs)


class SharesABatch(TinyBackend):
    """Reads one batch on all ranks, computes different rows, and does not compare the batches."""

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        return 0, 1

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        size, rank = self.context.world_size, self.context.rank
        return step([tensor[rank * len(tensor) // size :][: len(tensor) // size] for tensor in batch], *rest)


class CountsEveryRank(DDPStrategy):
    """Counts a shared batch once per rank in collectives."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    def data_rank(self) -> int:
        return self.global_rank

    @property
    def data_world_size(self) -> int:
        return self.world_size


class LeavesDirectCallsAlone(TinyBackend):
    """Does not warn about torch.distributed calls on a shared batch."""

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        return 0, 1

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        stop_warning()
        return super().parallelize(module, sample)


class NewParameters(TinyBackend):
    """Replaces the user's parameters, without their attributes and hooks."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        super().parallelize(module, sample)
        new = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in module.parameters()}
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                part.register_parameter(name, new[parameter])
        return new


class OwnStorage(TinyBackend):
    """Computes with a parameter's original storage, and ignores assignments to `data`."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        super().parallelize(module, sample)
        self.known = {parameter: parameter.data for parameter in module.parameters()}
        return {}

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for parameter, data in self.known.items():
            parameter.data = data
        return super().run_step(module, step, *args, **kwargs)


class StepsBack(TinyBackend):
    """Computes with the weights of the last step, and ignores writes to them."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        super().parallelize(module, sample)
        self.masters = {parameter: parameter.detach().clone() for parameter in module.parameters()}
        return {}

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        self._take_back()

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = step(*args, **kwargs)
        self.masters = {parameter: parameter.detach().clone() for parameter in self.masters}
        return result

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._take_back()
        return super().run_step(module, step, *args, **kwargs)

    def _take_back(self) -> None:
        for parameter, master in self.masters.items():
            parameter.data.copy_(master)


class DropsForwardHooks(TinyBackend):
    """Skips forward pre-hooks of layers."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for part in module.modules():
            part._forward_pre_hooks.clear()
        return super().run_step(module, step, *args, **kwargs)


class OwnWeights(TinyBackend):
    """Calls each layer with its own weights, even under `functional_call`."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        super().parallelize(module, sample)
        for part in module.modules():
            own = dict(part.named_parameters(recurse=False))
            part.register_forward_pre_hook(lambda layer, args, own=own: layer._parameters.update(own))
        return {}


class ShardsInPlainCode(TinyBackend):
    """Shows zeros in place of some rows outside of layers, backward and the step."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        super().parallelize(module, sample)
        self.whole: dict[nn.Parameter, Tensor] = {}
        self.module = module
        for part in module.modules():
            if not any(part.children()):
                part.register_forward_pre_hook(lambda layer, args: self._show(layer))
                part.register_forward_hook(lambda layer, args, out: self._hide(layer))
        return {}

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._hide(module)
        return super().run_step(module, step, *args, **kwargs)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._show(module)
        super().backward(module, loss, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = step(*args, **kwargs)
        self._hide(self.module)
        return result

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        self._show(module)
        return super().unparallelize(module)

    def _hide(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter not in self.whole and parameter.dim():
                self.whole[parameter] = parameter.data
                parameter.data = parameter.data.clone()
                parameter.data[self.context.rank :: self.context.world_size] = 0

    def _show(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter in self.whole:
                parameter.data = self.whole.pop(parameter)


class FirstCallOnly(TinyBackend):
    """Computes gradients only for the first call of each layer in a step."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        super().parallelize(module, sample)
        self.called: set[nn.Module] = set()
        for part in module.modules():
            if not any(part.children()):
                part.register_forward_hook(self._detach_later_calls)
        return {}

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.called.clear()
        return super().run_step(module, step, *args, **kwargs)

    def _detach_later_calls(self, layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        is_first = layer not in self.called
        self.called.add(layer)
        return out if is_first else out.detach()


class CannotSaveNothing(TinyBackend):
    """Fails to save an empty parameter."""

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Any:
        if not tensor.numel():
            raise ValueError("range [0, 1) lies outside a tensor of shape (0, 4)")
        return super().shard(tensor, parameter=parameter)


class BeginsTheStep(TinyBackend):
    """Runs a step until its first call of the model, and keeps the side effects."""

    def parallelize(self, module: nn.Module, sample: Any) -> Mapping[nn.Parameter, nn.Parameter]:
        (_, inputs), step = sample(), getattr(module, "training_step", None)
        called = patch.object(module, "forward", side_effect=InterruptedError)
        with host_state_kept(), suppress(InterruptedError), called:
            if step is not None:
                step([inputs["x"]] * 2, 0)
        return super().parallelize(module, sample)


class Forgetful(TinyBackend):
    """Skips one step of loading while a module is set up."""

    forgotten = ""
    instead: Any = None

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        self._patch = patch(self.forgotten, type(self).instead)
        self._patch.start()
        return super().parallelize(module, sample)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        self._patch.stop()
        return super().unparallelize(module)


class FillsCopies(Forgetful):
    """Reads weights straight into the result of `state_dict()`, even if it is a copy."""

    forgotten = "nnx_checkpoint.reading.loading._self_loading"
    instead = staticmethod(lambda module, state: state.copies.clear() or ())


class LoadsWithoutHooks(Forgetful):
    """Calls no hook after loading."""

    forgotten = "nnx_checkpoint.reading.loading.has_load_hooks"
    instead = staticmethod(lambda module: False)


class MixesRanks(Forgetful):
    """Stores each entry from any rank."""

    forgotten = "nnx_core.lightning.strategy_checkpoint.split_rank_entries"
    instead = staticmethod(lambda checkpoint: (checkpoint, {}))


class OwnBackwardsOnly(TinyBackend):
    """Ignores gradients that no backward has computed."""

    has_gradients = False

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        self.has_gradients = True

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self.has_gradients:
            optimizer.zero_grad()
        self.has_gradients = False
        return step(*args, **kwargs)


class ClosuresByPosition(TinyBackend):
    """Passes closures to optimizers as the first argument."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        closure = kwargs.pop("closure", None)
        return step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)


class StepsWhatIsWrapped(TinyBackend):
    """Steps the optimizer inside a wrapping optimizer."""

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        inner = getattr(optimizer, "base", None)
        return (step if inner is None else inner.step)(*args, **kwargs)


class HoldsLocks(TinyBackend):
    """Keeps uncopyable attributes on parameters, and copies them when the module is saved."""

    def model_state(self, module: nn.Module) -> Any:
        for parameter in module.parameters():
            parameter.lock = Lock()  # type: ignore[attr-defined]
        copy.deepcopy([vars(parameter) for parameter in module.parameters()])
        return super().model_state(module)


class AsksForFiles(TinyBackend):
    """Looks up the source file of each forward."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        for part in module.modules():
            inspect.getmodule(part.forward).__name__  # type: ignore[union-attr] # noqa: B018
        return super().parallelize(module, sample)


class ComparesNothing(TinyBackend):
    """Lets ranks diverge and fail alone."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        self.patched = patch.multiple(
            CollectiveOrder, _agree=lambda *args, **kwargs: None, report=lambda *args: None
        )
        self.patched.start()

    def teardown(self) -> None:
        self.patched.stop()
        super().teardown()


class TakesNoneForALoss(TinyBackend):
    """Skips a batch on the rank whose step returns None."""

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().run_step(module, step, *args, **kwargs)
        return torch.zeros((), requires_grad=True) if loss is None else loss


class AveragesWithoutZeros(TinyBackend):
    """Averages each gradient in its own collective, without zeros for missing ones."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        nnx.Backend.backward(self, module, loss, *args, **kwargs)
        for parameter in module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.context.world_size


class GathersForEachForward(TinyBackend):
    """Calls collectives in each forward, without checking that all ranks join."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        root: Any = module
        root.embed.register_forward_pre_hook(lambda layer, args: dist.all_reduce(torch.ones(3)))
        return super().parallelize(module, sample)


class GathersAndComparesNothing(ComparesNothing, GathersForEachForward):
    """Calls collectives in each forward, and does not compare the ranks after an evaluation either."""


_CAUGHT = {
    GathersForEachForward: (
        *("forward_on_rank_zero", "forward_on_rank_zero_before_training", "layer_called_on_rank_zero"),
    ),
    GathersAndComparesNothing: ("uneven_validation_batches",),
    AveragesWithoutZeros: ("constant_loss_on_one_rank", "zeroed_loss_on_one_rank"),
    ComparesNothing: (
        "should_stop_on_one_rank",
        "save_checkpoint_on_rank_zero",
        "no_save_after_error_on_one_rank",
    ),
    TakesNoneForALoss: ("none_loss_on_one_rank",),
    PairsWhatItHas: (
        *(
            "different_expert_per_rank",
            "experts_swap_each_batch",
            "different_expert_per_rank_while_accumulating",
            "layer_used_by_one_rank",
        ),
        *("experts_in_module_list", "experts_of_different_shapes", "head_per_task", "branch_per_sample"),
        "skipped_blocks",
    ),
    HidesGradients: (
        *(
            "clip_grad_norm_in_hook",
            "clip_grad_norm_in_hook_while_accumulating",
            "clip_grad_norm_in_manual_optimization",
        ),
        *("gradient_norms_logged", "large_gradients_skipped", "gradients_changed_in_callback"),
        *(
            "gradients_changed_in_manual_optimization",
            "clip_grad_norm_by_param_groups",
            "optimizer_step_override",
        ),
        *("gradients_read_on_rank_zero", "sgd_by_hand"),
    ),
    IgnoresChanges: (
        *(
            "configure_gradient_clipping",
            "gradients_scaled_in_hook",
            "gradients_zeroed_in_hook",
            "gradients_assigned_in_hook",
        ),
        *("gradient_centralization", "gradients_kept_between_steps"),
    ),
    AveragesBeforeTheStep: ("gradient_surgery",),
    HidesRowsOfState: ("optimizer_state_read",),
    KeepsItsState: ("optimizer_state_changed",),
    StepsWithFlatShards: (
        *("lamb", "muon", "muon_for_large_matrices", "muon_with_param_groups", "shampoo", "adafactor"),
        *("global_norm_optimizer", "sam_by_closure", "lbfgs"),
    ),
    StepsBack: (
        "sam_in_manual_optimization",
        "target_network_updated_in_place",
        "weights_written_in_hooks",
        "reinitialized_layers",
    ),
    SharesABatch: ("iterable_dataset_split_by_rank", "shuffle_seeded_by_rank"),
    CountsEveryRank: (
        *("contrastive_loss", "contrastive_loss_with_global_rank", "contrastive_loss_with_data_rank"),
        *("loss_scaled_by_world_size", "loss_scaled_by_data_world_size", "samples_counted_once"),
    ),
    LeavesDirectCallsAlone: ("torch_distributed_calls",),
    NewParameters: (
        *("gradient_hooks", "post_accumulate_grad_hooks", "parameter_attributes", "parameters_kept_in_list"),
    ),
    OwnStorage: ("target_network_assigned", "weight_data_assigned", "parameters_to_vector"),
    DropsForwardHooks: ("pruned_layers", "pruned_while_training", "model_pruning_callback"),
    OwnWeights: ("functional_call",),
    TrainsTheOriginal: ("parametrization_with_parameters",),
    ShardsInPlainCode: (
        *("weight_penalty", "orthogonality_penalty", "weight_as_python_number", "weights_read_between_steps"),
        *("weight_norms_logged", "deepcopied_layers", "autograd_grad_of_weight", "gradient_penalty"),
        *("weights_read_on_rank_zero", "torch_func_grad"),
        *(
            "weight_used_outside_its_layer",
            "state_dict_saved_on_rank_zero",
            "state_dict_copy_saved_on_rank_zero",
        ),
    ),
    FirstCallOnly: ("layers_called_repeatedly",),
    NeedsItsOwnBackward: ("loss_backward_called_directly",),
    PlainFSDP2: ("pipeline_split_backward",),
    LastBackwardOnly: ("two_backward_passes",),
    RealPartsOnly: ("complex_parameters",),
    DenseOnly: ("sparse_gradients", "sparse_gradients_of_a_function"),
    CannotSaveNothing: ("empty_parameter",),
    NeverFreezes: ("frozen_mid_run",),
    BeginsTheStep: ("side_effects_run_once",),
    FillsCopies: (*("custom_load_from_state_dict", "load_state_dict_override", "load_state_dict_pre_hook"),),
    LoadsWithoutHooks: ("load_state_dict_post_hook",),
    MixesRanks: ("rank_local_state",),
    OwnBackwardsOnly: ("gradients_set_without_backward",),
    ClosuresByPosition: ("keyword_only_closure",),
    StepsWhatIsWrapped: ("wrapper_optimizer",),
    HoldsLocks: ("deepcopied_state_dict",),
    AsksForFiles: ("fx_traced_layers",),
    DropsUnannounced: (
        *(
            "backward_inside_backward",
            "reentrant_checkpointing",
            "reentrant_checkpointing_while_accumulating",
        ),
        "reentrant_checkpointing_on_rank_zero",
    ),
    KeepsFailedGradients: ("backward_error_caught",),
    ForgetsWhatAStepWrites: (
        *("weight_written_in_forward", "weight_data_written_in_forward", "weight_data_assigned_in_forward"),
        *("training_without_optimizer", "memory_bank_gathered"),
    ),
    RestoresGradients: ("gradients_zeroed_in_step",),
    FirstOptimizersOnly: ("optimizer_replaced", "trainer_optimizers_assigned"),
    AveragesForItsOptimizers: ("optimizer_created_in_hook", "optimizer_outside_lightning"),
    OwnBackwardOnly: ("backward_override", "backward_override_while_accumulating"),
}
"""The broken strategies and the checks that each must fail; other failures are not tested."""

FAULTS = [
    fault(f"{check}: {strategy.__name__}", strategy, check, *EVERYTHING)
    for strategy, checks in _CAUGHT.items()
    for check in checks
]
FAULTS += user_patterns_writes.FAULTS
