"""The engine behind ``fairscale_fsdp``: fairscale's FullyShardedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fairscale.nn.wrap import default_auto_wrap_policy
from fairscale.nn.wrap import enable_wrap as fairscale_enable_wrap
from fairscale.nn.wrap.auto_wrap import ConfigAutoWrap
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from nnx_base._torch_compat import local_mode
from nnx_base.ranks import engine_group
from nnx_base.shard import Shard, shard_of
from nnx_core._torch_compat import tree_map
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.divergence import Writes
from nnx_core.backend import ParallelContext, Sample
from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.optimizers.gradients import Gradient
from nnx_core.optimizers.optimizer_probe import try_optimizer
from nnx_core.parts_backend import PartsBackend
from nnx_core.view.modules import Layers, broadcast_module, lay_in_order, materialize, move_to, with_strides
from nnx_fairscale._fairscale_fsdp import HostShim, NullStream, Piece, Unit, is_taken, leave_out
from nnx_fairscale.options import FairscaleFSDPOptions
from nnx_fairscale.reducer import GradientReducer
from nnx_fairscale.weights import Weights

__all__ = [
    "FairscaleFSDPBackend",
    "choose_units",
]


# Units are the modules that `wrap()` was called on, or those that a policy chooses.


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@contextmanager
def wrap_with(function: Callable[[nn.Module], None], options: FairscaleFSDPOptions) -> Iterator[None]:
    """Context manager in which the ``wrap`` of fairscale and torch, and ``auto_wrap``, call a function.

    Their module stays in its place.
    """
    wrapper = _wrapper(function)
    with fairscale_enable_wrap(_policy(options), wrapper_cls=wrapper), enable_wrap(wrapper_cls=wrapper):
        yield


def choose_units(root: nn.Module, options: FairscaleFSDPOptions) -> list[nn.Module]:
    """Return the modules under `root` that the policy chooses as units, children before parents.

    Raises:
        OptionError: The policy is of the wrong type or matches nothing.
    """
    policy = options.auto_wrap_policy
    chosen: list[nn.Module] = []
    if policy is None or (callable(policy) and not isinstance(policy, type)):
        with fairscale_enable_wrap(_policy(options), wrapper_cls=_wrapper(chosen.append)):
            ConfigAutoWrap.recursive_wrap(root, auto_wrap_policy=None, module_is_root=True)
    else:
        layers = Layers(policy, option="auto_wrap_policy")
        layers.check(root)
        chosen = [module for module in root.modules() if module in layers][::-1]
        if not chosen:
            raise OptionError(
                f"auto_wrap_policy names {layers}, but {type(root).__name__} has no such layer.",
                remedy="Check the layer classes, or leave the policy out.",
            )
    return [module for module in chosen if module is not root and _can_be_unit(module, root)]


def _policy(options: FairscaleFSDPOptions) -> Callable[..., bool]:
    policy = options.auto_wrap_policy
    if callable(policy) and not isinstance(policy, type):
        return policy
    return partial(default_auto_wrap_policy, min_num_params=int(options.min_num_params))


def _wrapper(function: Callable[[nn.Module], None]) -> type:
    """Return a class whose constructor returns the module; fairscale calls `isinstance` with it."""

    def wrap(cls: type, module: nn.Module, **_: Any) -> nn.Module:
        function(module)
        return module

    return type("Wrapper", (), {"__new__": wrap})


def _can_be_unit(module: nn.Module, root: nn.Module) -> bool:
    """Return True if a module has parameters, has a forward, and shares no parameter with outside modules."""
    own = {id(parameter) for parameter in module.parameters()}
    if not own or isinstance(module, _CONTAINERS):
        return False
    inside = {id(submodule) for submodule in module.modules()}
    return not any(
        id(parameter) in own
        for submodule in root.modules()
        if id(submodule) not in inside
        for parameter in submodule.parameters(recurse=False)
    )


T = TypeVar("T")

_REMEDY = (
    "Call every unit on every rank in the same order, return a loss that depends on all of them, and read "
    "weights and gradients on every rank. Or wrap the layer that chooses between units as one unit, by "
    "`wrap()` or auto_wrap_policy. Or use strategy 'fairscale_sharded'."
)


@dataclass(slots=True)
class _Layout:
    """The changes to one root module, to be undone when its training ends.

    Attributes:
        units: The unit of each wrapped module; nested ones first, the root last.
        changed: Modules whose forward was replaced on the instance.
        strides: Meta tensors with the strides of the user's parameters that were not contiguous.
        replicated: The averaging of the parameters that fairscale cannot shard.
    """

    units: dict[nn.Module, Unit] = field(default_factory=dict)
    changed: set[nn.Module] = field(default_factory=set)
    strides: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    replicated: GradientReducer | None = None


class _Forward(partial[Any]):
    """Calls a forward, its last argument, through the engine. A copy of the module has a plain forward."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.args[-1], memo)


class FairscaleFSDPBackend(PartsBackend[FairscaleFSDPOptions]):
    """Shards parameters, gradients and optimizer state over the ranks with fairscale's FSDP.

    The model's tree, names and parameter objects do not change; see `Unit`.
    """

    Options = FairscaleFSDPOptions

    def __init__(self, options: FairscaleFSDPOptions) -> None:
        super().__init__(options)
        self._layouts: dict[nn.Module, _Layout] = {}
        self._unfinished = _Layout()  # units that are wrapped before their root is known
        self._pieces: dict[nn.Parameter, Piece] = {}
        self._stream: NullStream | None = None
        self._gather_group: dist.ProcessGroup | None = None
        self._reduce_group: dist.ProcessGroup | None = None
        self._order: CollectiveOrder | None = None
        self._weights: Weights | None = None
        self._writes = Writes(lambda: self.is_watched)
        self._in_step = 0
        self._accumulates = self._has_failed = False

    def setup(self, context: ParallelContext) -> None:
        """Install the CPU shim, or make the group that reduces in parallel with the gathers."""
        super().setup(context)
        self._checkpointed = Layers(self.options.activation_checkpointing, option="activation_checkpointing")
        if context.device.type == "cpu":
            self._stream = self._stream or HostShim.install()
            self._gather_group = engine_group()
        elif self._reduce_group is None:
            self._gather_group, self._reduce_group = dist.new_group(), dist.new_group()

    def teardown(self) -> None:
        """Remove the CPU shim, and restore the state of every optimizer."""
        self._states.remove()
        if self._stream is not None:
            self._stream = None
            HostShim.remove()
        self._gather_group = self._reduce_group = None

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which ``wrap()``, fairscale's or torch's, shards its module at once."""
        return wrap_with(self._wrap, self.options)

    def _wrap(self, module: nn.Module) -> None:
        if module not in self._unfinished.units:
            self._make_unit(module, name=type(module).__name__)

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Shard the units bottom-up, then all others with the root; parameters stay the same objects."""
        if module in self._layouts:
            return {}
        layout = self._unfinished
        _refuse_sparse_gradients(module)
        self._checkpointed.check(module)
        if not layout.units and self.options.auto_wrap:
            for unit in choose_units(module, self.options):
                self._make_unit(unit, name=type(unit).__name__)
        self._refuse_split_ties(module)
        layout.replicated = GradientReducer(
            (p for p in self._unshardable(module) if p.is_floating_point() or p.is_complex()),
            bucket_bytes=max(1, self.options.bucket_cap_mb) * 2**20,
        )
        self._make_unit(module, name="")
        self._route_calls(module, layout)
        self._layouts[module] = layout
        self._unfinished = _Layout()
        self._show_unsharded(module, layout)
        return {}

    def summary(self, module: nn.Module) -> str:
        """Return the number of units."""
        layout = self._layouts.get(module)
        count = 0 if layout is None else len(layout.units)
        return f"{count} {'unit' if count == 1 else 'units'}, the root among them"

    def _show_unsharded(self, module: nn.Module, layout: _Layout) -> None:
        """Show user code unsharded parameters between steps, and check the units' collectives."""
        if self._order is None or self._weights is None:
            self._order = CollectiveOrder(remedy=_REMEDY)
            self._weights = Weights(self._order, self._writes)
        names = {submodule: name for name, submodule in module.named_modules()}
        for owner, unit in layout.units.items():
            unit.order, unit.writes = self._order, self._writes
            unit.belong_to(layout.units[module])
            unit.label = names.get(owner) or f"{type(module).__name__} (parameters outside of units)"
        self._weights.show(layout.units.values(), {p: name for name, p in module.named_parameters()})
        self._order.open()

    def _make_unit(self, module: nn.Module, *, name: str) -> None:
        self._prepare(module, name=name)
        layout = self._unfinished
        self._recompute(module)
        inside = set(module.modules())
        nested = [unit for owner, unit in layout.units.items() if owner in inside]
        for parameter in self._unshardable(module):
            leave_out(parameter)
        layout.strides |= lay_in_order(p for p in module.parameters() if not is_taken(p))
        unit = layout.units[module] = Unit(module, nested, stream=self._stream, **self._settings())
        self._pieces |= {piece.parameter: piece for piece in unit.pieces}
        if name:
            module.forward = _Forward(self._call, unit, module.forward)
            layout.changed.add(module)

    def _route_calls(self, root: nn.Module, layout: _Layout) -> None:
        """Route calls of the root through its unit; with manual optimization, of every submodule too."""
        unit = layout.units[root]
        unit.become_root()
        is_automatic = getattr(root, "automatic_optimization", True)
        for module in [root] if is_automatic else list(root.modules()):
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
                module.forward = _Forward(self._through_root, unit, module.forward)
                layout.changed.add(module)

    def _through_root(self, root: Unit, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if root.is_busy:
            return function(*args, **kwargs)
        if self._weights is not None:
            self._weights.flush()
        result = self._call(root, function, *args, **kwargs)
        if not torch.is_grad_enabled():
            for layout in self._layouts.values():
                self._free(layout)
        return result

    def _settings(self) -> dict[str, Any]:
        options = self.options
        is_mixed = options.compute_dtype is not None or options.fp32_reduce_scatter is not None
        offload = options.cpu_offload and self._stream is None
        dtype = "float16" if options.compute_dtype is None else options.compute_dtype
        return {
            "process_group": self._gather_group or dist.group.WORLD,
            "process_group_reduce_scatter": self._reduce_group or self._gather_group or dist.group.WORLD,
            "reshard_after_forward": options.reshard_after_forward,
            "mixed_precision": is_mixed,
            "fp32_reduce_scatter": bool(options.fp32_reduce_scatter),
            "flatten_parameters": True,
            "move_params_to_cpu": offload,
            "compute_dtype": getattr(torch, dtype) if is_mixed else None,
            "move_grads_to_cpu": offload
            if options.move_grads_to_cpu is None or self._stream is not None
            else options.move_grads_to_cpu,
            "bucket_cap_mb": options.bucket_cap_mb,
            "compute_device": self.context.device,
        }

    def _prepare(self, module: nn.Module, *, name: str) -> None:
        """Materialize the weights on this rank's device, equal on all ranks."""
        device = self.context.device
        free = [parameter for parameter in module.parameters() if not is_taken(parameter)]
        materialize(module, device, name=name)
        taken = {parameter: parameter.data for parameter in module.parameters() if is_taken(parameter)}
        move_to(module, device)
        for parameter, data in taken.items():
            parameter.data = data
        if self.options.sync_module_states:
            broadcast_module(_Only(free, module))
        if self.options.cpu_offload:
            for parameter in free:
                parameter.data = parameter.data.cpu()

    def _refuse_split_ties(self, root: nn.Module) -> None:
        """Refuse a unit that took a parameter which a module outside of it still uses."""
        for module, unit in self._unfinished.units.items():
            own, inside = {piece.parameter for piece in unit.pieces}, set(module.modules())
            outside = (
                name
                for owner_name, owner in root.named_modules()
                if owner not in inside
                for name, parameter in owner.named_parameters(prefix=owner_name, recurse=False)
                if parameter in own
            )
            if shared := ", ".join(outside):
                raise UnsupportedError(
                    f"a unit shares parameters with modules outside of it: {shared}.",
                    remedy="Do not wrap it. Parameters outside of units are sharded with the root, tied too.",
                )

    def _unshardable(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that fairscale cannot shard: empty ones, and those that are not float32."""
        free = (p for p in module.parameters() if p not in self._pieces)
        return [p for p in free if p.dtype != torch.float32 or not p.numel()]

    def _recompute(self, module: nn.Module) -> None:
        layout = self._unfinished
        for submodule in module.modules():
            if submodule not in self._checkpointed or submodule in layout.changed:
                continue
            if any(inner in layout.units for inner in submodule.modules()):
                raise UnsupportedError(
                    f"activation_checkpointing names {type(submodule).__name__}, which contains a unit.",
                    remedy="Make it a unit, by `wrap()` or auto_wrap_policy, instead of the modules inside.",
                )
            submodule.forward = _Forward(checkpoint, submodule.forward, use_reentrant=False)
            layout.changed.add(submodule)

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers whose update of one element reads other elements."""
        for optimizer in optimizers:
            with local_mode():
                trial = try_optimizer(optimizer, shape_of=self._whole_shape)
            if trial.dependence != "element":
                needs = "full parameters" if trial.dependence == "parameter" else "all parameters together"
                untried = f", or cannot be tried ({trial.error})" if trial.error else ""
                raise UnsupportedError(
                    f"{type(optimizer).__name__} cannot work on fairscale's flat shards: its update needs "
                    f"{needs}{untried}.",
                    remedy="Use an optimizer that works element by element (Adam, AdamW, SGD, ...), or "
                    "strategy 'fsdp_auto' or 'fairscale_oss'.",
                )
        if self.context.world_size > 1:
            for optimizer in optimizers:
                self._states.hide(optimizer, "each rank has the state of its own shards")

    def _whole_shape(self, parameter: nn.Parameter) -> torch.Size:
        piece = self._pieces.get(parameter)
        shape = parameter.shape if piece is None else piece.shape
        return torch.Size(max(1, size) for size in shape)  # a trial cannot judge an empty tensor

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Gather every parameter into the user's own object, and remove fairscale. Collective."""
        self._has_failed = False
        layout = self._layouts.pop(module, self._unfinished)
        self._unfinished = _Layout()
        if self._weights is not None:
            self._weights.release(
                p for unit in layout.units.values() for p in (x.parameter for x in unit.pieces)
            )
        full: dict[nn.Parameter, Tensor] = {}
        for unit in layout.units.values():
            full |= unit.gather(self.at_end)
        for unit in layout.units.values():
            unit.remove()
        for parameter, value in full.items():
            self._pieces.pop(parameter)
            parameter.data = with_strides(value, layout.strides.get(parameter))
        for changed in layout.changed:
            changed.__dict__.pop("forward", None)
        if layout.replicated is not None:
            layout.replicated.remove()
        for parameter in module.parameters():
            parameter.__dict__.pop("_is_sharded", None)
        self._states.remove()
        return {}

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step inside the root's unit."""
        layout = self._layouts.get(module)
        if layout is None or self._order is None or self._weights is None:
            return step(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_after_failure()
        self._weights.begin_step()
        with self._order.reporting():
            if not self._in_step:
                self._order.begin(getattr(step, "__name__", "a step"))
            self._in_step += 1
            try:
                if torch.is_grad_enabled() and not getattr(module, "automatic_optimization", True):
                    # the step calls backward itself, outside of the model's forward
                    return self._ended(step(*args, **kwargs))
                result = self._through_root(layout.units[module], step, *args, **kwargs)
                return result if torch.is_grad_enabled() else self._ended(result)
            finally:
                self._in_step -= 1

    def _ended(self, result: T) -> T:
        if self._in_step == 1 and self._order is not None:
            self._order.end()
        return result

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, also of weights that plain code has read."""
        if self._order is None or self._weights is None:
            super().backward(module, loss, *args, **kwargs)
            return
        self._refuse_after_failure()
        self._weights.flush()
        self._has_failed = True
        with self._order.reporting(), ExitStack() as stack:
            for layout in self._layouts.values():
                # The flag stays set if backward raises: fairscale's flat parameters then hold gradients of a
                # part of the layers, and nothing tells which.
                if layout.replicated is not None:
                    stack.enter_context(layout.replicated.in_backward())
            for layout in self._layouts.values():
                stack.enter_context(_going_backward(list(layout.units.values())[-1]))
            super().backward(module, loss, *args, **kwargs)
        self._has_failed = False
        if not self._accumulates:
            self._weights.end_backward()
        if not self._in_step:
            self._order.end()

    def _refuse_after_failure(self) -> None:
        if self._has_failed:
            raise UnsupportedError(
                "a backward failed and its error was caught. fairscale's flat parameters still hold some "
                "of its gradients.",
                remedy="Let the error end the run and resume from the last checkpoint, skip the batch before "
                "its backward, or use strategy 'fairscale_sharded'.",
            )

    def _call(self, unit: Unit, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if unit.mixed_precision:
            args, kwargs = tree_map(partial(_cast, dtype=unit.compute_dtype), (args, kwargs))
        result: T = unit(partial(function, *args, **kwargs))
        return result

    def _free(self, layout: _Layout) -> None:
        for unit in layout.units.values():
            unit.free()

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Accumulate complete gradients on this rank until the first backward outside.

        If hooks read accumulated gradients, every backward reduces them.
        """
        if self._weights is not None and self._weights.has_hooks:
            yield
            return
        self._accumulates = True
        layouts = list(self._layouts.values())
        with ExitStack() as stack:
            for layout in layouts:
                stack.enter_context(list(layout.units.values())[-1].no_sync())
                if layout.replicated is not None:
                    stack.enter_context(layout.replicated.no_sync())
            stack.callback(setattr, self, "_accumulates", False)
            yield

    def local(self) -> AbstractContextManager[Any]:
        """Return a context for the engine's own work, in which parameters are this rank's shards."""
        return nullcontext() if self._weights is None else self._weights.stepping()

    def views(self, optimizer: Optimizer) -> list[Weights]:
        """Return the parameters in units."""
        return [] if self._weights is None else [self._weights]

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Return handles on the gradients of this rank's shards."""
        found = []
        with self.local():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        replicas = 1 if parameter in self._pieces else self.context.world_size
                        found.append(Gradient(parameter.grad, replicas))
        return found

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the optimizer's step on the shards; free gathered old weights first."""
        self._refuse_after_failure()
        result = super().optimizer_step(optimizer, step, *args, **kwargs)
        if self._weights is not None:
            self._weights.refuse_shared_data()
        for layout in self._layouts.values():
            self._free(layout)
        return result

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Return the shard of a parameter or its optimizer state; other tensors are replicated."""
        owner = tensor if isinstance(tensor, nn.Parameter) else parameter
        piece = None if owner is None else self._pieces.get(owner)
        with local_mode():
            if piece is None or owner is None or (tensor is not owner and tensor.shape != owner.shape):
                return shard_of(tensor)
            return piece.shard(tensor)

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """Return checksums of user code's writes to parameters of units."""
        if self._weights is not None:
            self._weights.flush()
        return self._writes.take(module)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Gather the loaded weights again."""
        for layout in self._layouts.values():
            self._free(layout)


def _refuse_sparse_gradients(root: nn.Module) -> None:
    """Refuse sparse gradients, because a unit's gradients are views of one flat tensor."""
    for name, module in root.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(
                f"'{name}' has sparse gradients, which fairscale's FSDP cannot flatten.",
                remedy="Build it with `sparse=False`, or use strategy 'fairscale_sharded'.",
            )


@contextmanager
def _going_backward(root: Unit) -> Iterator[None]:
    root.in_backward = True
    try:
        yield
    finally:
        root.in_backward = False


class _Only(nn.Module):
    """Some parameters of a module, with its buffers, for functions that take a module."""

    def __init__(self, parameters: Sequence[nn.Parameter], module: nn.Module) -> None:
        super().__init__()
        self.some = nn.ParameterList(parameters)
        for index, buffer in enumerate(module.buffers()):
            self.register_buffer(str(index), buffer)


def _cast(value: Any, *, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
