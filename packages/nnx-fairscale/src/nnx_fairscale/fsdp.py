"""fairscale's FullyShardedDataParallel behind ``fairscale_fsdp``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer, SparseAdam
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from nnx.backend import Backend, ParallelContext, Sample
from nnx.errors import UnsupportedError
from nnx.gradients import Gradient
from nnx.layer_classes import as_classes
from nnx.layout import Shard, shard_of
from nnx.materialize import broadcast_module, lay_in_order, materialize, move_to, with_strides
from nnx_fairscale._fairscale_compat import HostShim, NullStream
from nnx_fairscale._fairscale_fsdp import Unit, is_taken, leave_out
from nnx_fairscale.options import FairscaleFSDPOptions
from nnx_fairscale.pieces import Piece
from nnx_fairscale.reducer import GradientReducer
from nnx_fairscale.wrapping import choose_units, wrap_with

__all__ = ["FairscaleFSDPBackend"]

T = TypeVar("T")
log = logging.getLogger("nnx.fairscale")

_NOT_BY_ELEMENT = ("Muon", LBFGS.__name__, Adafactor.__name__, SparseAdam.__name__)


@dataclass(slots=True)
class _Layout:
    """What was done to one root module, to be undone when its training ends.

    Attributes:
        units: For each module that is a unit, its unit; nested ones first, the root last.
        changed: Modules whose forward was replaced on the instance.
        strides: Meta tensors with the strides of the user's parameters whose elements did not lie in order.
        replicated: It averages the gradients of what fairscale cannot shard.
    """

    units: dict[nn.Module, Unit] = field(default_factory=dict)
    changed: set[nn.Module] = field(default_factory=set)
    strides: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    replicated: GradientReducer | None = None


class FairscaleFSDPBackend(Backend[FairscaleFSDPOptions]):
    """Shards parameters, gradients and optimizer state over the ranks with fairscale's FSDP.

    The model's tree, names and parameter objects stay as they are; see `Unit`.
    """

    Options = FairscaleFSDPOptions

    def __init__(self, options: FairscaleFSDPOptions) -> None:
        super().__init__(options)
        self._layouts: dict[nn.Module, _Layout] = {}
        self._unfinished = _Layout()  # of units that were wrapped before their root is known
        self._pieces: dict[nn.Parameter, Piece] = {}
        self._stream: NullStream | None = None
        self._reduce_group: dist.ProcessGroup | None = None

    # --- set up -------------------------------------------------------------------------------

    def setup(self, context: ParallelContext) -> None:
        """Put the CPU shim in place, or make the group that reduces beside the gathers."""
        super().setup(context)
        self._checkpointed = as_classes(
            self.options.activation_checkpointing or (), option="activation_checkpointing"
        )
        if context.device.type == "cpu":
            self._stream = self._stream or HostShim.install()
        elif self._reduce_group is None:
            self._reduce_group = dist.new_group()

    def teardown(self) -> None:
        """Take the CPU shim back."""
        if self._stream is not None:
            self._stream = None
            HostShim.remove()
        self._reduce_group = None

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Within it ``wrap()``, fairscale's or torch's, shards its module at once."""
        return wrap_with(self._wrap, self.options)

    def _wrap(self, module: nn.Module) -> None:
        if module not in self._unfinished.units:
            self._make_unit(module, name=type(module).__name__)

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Shard the units bottom-up and the rest with the root; the parameters stay the same objects."""
        if module in self._layouts:
            return {}
        layout = self._unfinished
        if not layout.units and self.options.auto_wrap:
            for unit in choose_units(module, self.options):
                self._make_unit(unit, name=type(unit).__name__)
        self._refuse_split_ties(module)
        layout.replicated = GradientReducer(
            (p for p in self._odd_ones(module) if p.is_floating_point() or p.is_complex()),
            bucket_bytes=max(1, self.options.bucket_cap_mb) * 2**20,
            device=self.context.device,
        )
        self._make_unit(module, name="")
        self._route_calls(module, layout)
        self._layouts[module] = layout
        self._unfinished = _Layout()
        if self.context.rank == 0:
            log.info("fairscale_fsdp: %d units, the root among them", len(layout.units))
        return {}

    def _make_unit(self, module: nn.Module, *, name: str) -> None:
        self._prepare(module, name=name)
        layout = self._unfinished
        self._recompute(module)
        inside = set(module.modules())
        nested = [unit for owner, unit in layout.units.items() if owner in inside]
        for parameter in self._odd_ones(module):
            leave_out(parameter)
        layout.strides |= lay_in_order(p for p in module.parameters() if not is_taken(p))
        unit = layout.units[module] = Unit(module, nested, stream=self._stream, **self._settings())
        self._pieces |= {piece.parameter: piece for piece in unit.pieces}
        if name:
            module.forward = partial(self._call, unit, module.forward)
            layout.changed.add(module)

    def _route_calls(self, root: nn.Module, layout: _Layout) -> None:
        """Let the root be called outside of a step, and with manual optimization every part of it."""
        unit = layout.units[root]
        unit.become_root()
        is_automatic = getattr(root, "automatic_optimization", True)
        for module in [root] if is_automatic else list(root.modules()):
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
                module.forward = partial(self._through_root, unit, module.forward)
                layout.changed.add(module)

    def _through_root(self, root: Unit, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if root.is_busy:
            return function(*args, **kwargs)
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
            "process_group": dist.group.WORLD,
            "process_group_reduce_scatter": self._reduce_group or dist.group.WORLD,
            "reshard_after_forward": options.reshard_after_forward,
            "mixed_precision": is_mixed,
            "fp32_reduce_scatter": bool(options.fp32_reduce_scatter),
            "flatten_parameters": options.flatten_parameters,
            "move_params_to_cpu": offload,
            "compute_dtype": getattr(torch, dtype) if is_mixed else None,
            "move_grads_to_cpu": offload
            if options.move_grads_to_cpu is None or self._stream is not None
            else options.move_grads_to_cpu,
            "bucket_cap_mb": options.bucket_cap_mb,
            "compute_device": self.context.device,
        }

    def _prepare(self, module: nn.Module, *, name: str) -> None:
        """Real, equal weights on this rank's device."""
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
        """A unit took a parameter that a module outside of it still uses."""
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
                    remedy="Do not wrap it: what is not wrapped is sharded with the root, tied or not.",
                )

    def _odd_ones(self, module: nn.Module) -> list[nn.Parameter]:
        """What fairscale cannot shard: other dtypes, and alone what has no dimensions or no elements."""
        alone = not self.options.flatten_parameters
        return [
            parameter
            for parameter in module.parameters()
            if parameter.dtype != torch.float32 or (alone and (parameter.ndim == 0 or not parameter.numel()))
        ]

    def _recompute(self, module: nn.Module) -> None:
        layout = self._unfinished
        for submodule in module.modules():
            if not isinstance(submodule, self._checkpointed) or submodule in layout.changed:
                continue
            if any(inner in layout.units for inner in submodule.modules()):
                raise UnsupportedError(
                    f"activation_checkpointing names {type(submodule).__name__}, which contains a unit.",
                    remedy="Make it a unit, with `wrap()` or auto_wrap_policy, and not what is inside.",
                )
            submodule.forward = partial(checkpoint, submodule.forward, use_reentrant=False)
            layout.changed.add(submodule)

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers whose update of an element depends on more than that element."""
        for optimizer in optimizers:
            if type(optimizer).__name__ in _NOT_BY_ELEMENT:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} cannot work on fairscale's flat shards: its update needs "
                    "more than single elements.",
                    remedy="Use an optimizer that works element by element (Adam, AdamW, SGD, ...), or "
                    "strategy 'fsdp_auto' or 'fairscale_oss'.",
                )

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Gather every parameter into the user's own object, take fairscale off. Collective."""
        layout = self._layouts.pop(module, self._unfinished)
        self._unfinished = _Layout()
        full: dict[nn.Parameter, Tensor] = {}
        for unit in layout.units.values():
            full |= unit.gather()
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
        return {}

    # --- step ---------------------------------------------------------------------------------

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step inside the root's unit."""
        layout = self._layouts.get(module)
        if layout is None:
            return step(*args, **kwargs)
        if torch.is_grad_enabled() and not getattr(module, "automatic_optimization", True):
            return step(*args, **kwargs)  # it calls backward itself, outside of the calls of the model
        return self._through_root(layout.units[module], step, *args, **kwargs)

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
        """Keep gradients, whole ones, on this rank until the first backward outside of it."""
        layouts = list(self._layouts.values())
        with ExitStack() as stack:
            for layout in layouts:
                stack.enter_context(list(layout.units.values())[-1].no_sync())
                if layout.replicated is not None:
                    stack.enter_context(layout.replicated.no_sync())
            yield

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Handles on this rank's parts of the gradients."""
        found = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    piece = self._pieces.get(parameter)
                    is_cut = piece is not None and piece.is_cut
                    found.append(Gradient(parameter.grad, 1 if is_cut else self.context.world_size))
        return found

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the optimizer's step on the shards; what is gathered of the old weights is freed."""
        result = step(*args, **kwargs)
        for layout in self._layouts.values():
            self._free(layout)
        return result

    # --- state --------------------------------------------------------------------------------

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Where this rank's part of a parameter, or of its optimizer state, lies; other tensors are whole."""
        owner = tensor if isinstance(tensor, nn.Parameter) else parameter
        piece = None if owner is None else self._pieces.get(owner)
        if piece is None or owner is None or (tensor is not owner and tensor.shape != owner.shape):
            return shard_of(tensor)
        return piece.shard(tensor)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Gather anew what was loaded."""
        for layout in self._layouts.values():
            self._free(layout)


class _Only(nn.Module):
    """Some parameters of a module, with its buffers, for what works on whole modules."""

    def __init__(self, parameters: Sequence[nn.Parameter], module: nn.Module) -> None:
        super().__init__()
        self.some = nn.ParameterList(parameters)
        for index, buffer in enumerate(module.buffers()):
            self.register_buffer(str(index), buffer)


def _cast(value: Any, *, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
