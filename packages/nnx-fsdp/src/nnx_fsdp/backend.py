"""The FSDP2 engine behind the fsdp_* strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import enable_wrap
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from nnx_base.clean_up import clean_up_after_error
from nnx_checkpoint.reading.state import ModelState, OptimizerState, describe_model, entries_of
from nnx_core._torch_compat import begin_anew, forget_dtensors, states_of
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.backend import Backend, ParallelContext, Sample
from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.optimizers.gradients import Gradient, refuse_sparse_layers
from nnx_core.optimizers.whole_matrix import OwnerRanks
from nnx_core.view.hidden_state import HiddenStates, StateParts
from nnx_core.view.modules import (
    Layers,
    broadcast_module,
    forward_as,
    lay_in_order,
    materialize,
    move_to,
    with_strides,
)
from nnx_fsdp._torch_compat import (
    Unit,
    before_part,
    can_be_sharded,
    finish_after_backward,
    has_failed_backward,
    name_as_before,
    prepare_root,
    remove_fully_shard,
    units_of,
)
from nnx_fsdp.agreement import REMEDY, ReplicatedParameters, StepAgreement, unshardable
from nnx_fsdp.optimizer_state import PartsOfState, StateAfterwards, shard_state
from nnx_fsdp.options import FSDPOptions
from nnx_fsdp.parts import gather
from nnx_fsdp.units import UnitChoice, choose_units, options_by_choice, remedy_by_choice
from nnx_fsdp.weights import Weights

__all__ = [
    "FSDPBackend",
    "mesh_of",
    "roots_of",
]


# Device meshes, each made once for a world: their process groups last as long as the world does.


_Key = tuple[str, tuple[int, ...], tuple[str, ...]]
_meshes: dict[dist.ProcessGroup | None, dict[_Key, DeviceMesh]] = {}


def mesh_of(device_type: str, shape: tuple[int, ...], *, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of all ranks in this shape. Collective the first time.

    Torch never takes down the groups of a mesh that is dropped, so a mesh for each Trainer would leave
    groups, threads and sockets behind with every run.

    Args:
        device_type: Such as ``"cpu"``.
        shape: Ranks along each axis.
        names: The names of the axes.
    """
    key = (device_type, shape, names)
    if key not in _meshes.get(dist.group.WORLD, {}):
        made = init_device_mesh(device_type, shape, mesh_dim_names=names)  # makes the world, if there is none
        if dist.group.WORLD not in _meshes:
            _meshes.clear()  # of a world that was destroyed since
            forget_dtensors()
        _meshes.setdefault(dist.group.WORLD, {})[key] = made
    return _meshes[dist.group.WORLD][key]


# How a step of manual optimization runs under FSDP2, which calls parts of the root itself.
#
# FSDP2 gathers what belongs to the root when the root's forward begins, and reduces its gradients after a
# backward that started from the root's output. A step that calls ``self.generator`` and
# ``self.discriminator``, twice, has neither: without `PartsOfRoot` it would train nothing, and say nothing.


class PartsOfRoot:
    """Lets every submodule that is sharded with the root be called by itself.

    Args:
        root: The module that was given to ``fully_shard`` last.
        opaque: Submodules whose own parts are left alone, as those that are compiled.
    """

    def __init__(self, root: FSDPModule, *, opaque: Collection[nn.Module] = ()) -> None:
        self._root = root
        self._active = False
        self._handles: list[RemovableHandle] = []
        for part in _parts(root, opaque):  # type: ignore[arg-type] # an FSDPModule is a Module as well
            self._handles.append(part.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            self._handles.append(part.register_forward_hook(self._after))

    @contextmanager
    def callable(self) -> Iterator[None]:
        """Within it parts may be called; outside of it nothing changes."""
        prepare_root(self._root)
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        return before_part(self._root, args, kwargs) if self._active else None

    def _after(self, part: nn.Module, args: Any, output: Any) -> None:
        if self._active:
            finish_after_backward(self._root, output)


def _parts(module: nn.Module, opaque: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, FSDPModule):
            continue  # a unit sees to itself
        yield child
        if child not in opaque:
            yield from _parts(child, opaque)


T = TypeVar("T")


@dataclass(slots=True)
class _Layout:
    """What was done to one root module, to be undone when its training ends.

    Attributes:
        plain: Maps each sharded parameter to the user's own object, which has no storage meanwhile.
        compiled: Modules whose forward was replaced by a compiled one, on the instance.
        checkpointed: Modules whose forward was replaced by one that recomputes activations.
        strides: Meta tensors with the strides of the user's objects whose elements did not lie in order.
        replicated: The parameters that could not be sharded.
        agreement: The agreement of the ranks in a step.
        optimizers: The optimizers of its parameters.
        parts: Lets a step of manual optimization call submodules itself, once there was one.
        weights: The sharded parameters as user code sees them, once all are sharded.
        summary: The units and why, as one clause.
    """

    plain: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    compiled: set[nn.Module] = field(default_factory=set)
    checkpointed: set[nn.Module] = field(default_factory=set)
    strides: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    replicated: ReplicatedParameters | None = None
    agreement: StepAgreement | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    parts: PartsOfRoot | None = None
    weights: Weights | None = None
    summary: str = ""


class FSDPBackend(Backend[FSDPOptions]):
    """Shards parameters, gradients and optimizer state over the ranks with torch's FSDP2.

    Every parameter becomes a DTensor under its own name on the user's own module; the module's class
    gets FSDP2's prefix while it is laid out, and its own back in `unparallelize`.
    """

    Options = FSDPOptions

    def __init__(self, options: FSDPOptions) -> None:
        super().__init__(options)
        self._layouts: dict[nn.Module, _Layout] = {}
        self._unfinished = _Layout()  # of units that were wrapped before their root is known
        self._mesh: DeviceMesh | None = None
        self._states = HiddenStates()
        self._order: CollectiveOrder | None = None
        self._by_choice: dict[str, str] = {}

    def setup(self, context: ParallelContext) -> None:
        """Make the mesh: one axis, or (replicate, shard) for hybrid sharding."""
        super().setup(context)
        self._owner_ranks = OwnerRanks(self.shard, context.device)
        self._checkpointed = Layers(self.options.activation_checkpointing, option="activation_checkpointing")
        if self._mesh is None:  # kept from one stage of a Trainer to the next
            self._mesh = self._make_mesh(context)

    def _make_mesh(self, context: ParallelContext) -> DeviceMesh:
        replicas = self.options.replicate_size
        if replicas is None and self.options.hybrid:
            replicas = context.num_nodes
        if replicas is None:
            return mesh_of(context.device.type, (context.world_size,), names=("shard",))
        if context.world_size % replicas:
            raise OptionError(
                f"replicate_size={replicas} does not divide the world size {context.world_size}.",
                remedy="Choose a divisor of the number of ranks.",
            )
        shape = (replicas, context.world_size // replicas)
        return mesh_of(context.device.type, shape, names=("replicate", "shard"))

    def module_init_context(self) -> AbstractContextManager[Any]:
        """With manual wrapping, torch's ``wrap()`` shards its module at once; else it does nothing."""
        if self.options.auto_wrap:
            return nullcontext()
        return enable_wrap(wrapper_cls=self._wrap)

    def _wrap(self, module: nn.Module, **_: Any) -> nn.Module:
        if not isinstance(module, FSDPModule):
            self._shard_unit(module, name=type(module).__name__)
        return module

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Shard the chosen units bottom-up and the rest with the root."""
        if module in self._layouts or isinstance(module, FSDPModule):
            return {}
        refuse_sparse_layers(module, engine="FSDP2")
        self._checkpointed.check(module)
        choice = self._choose_units(module)
        if self.options.auto_wrap:
            self._unfinished.summary = choice.describe(module)
        else:
            count = sum(isinstance(part, FSDPModule) for part in module.modules())
            self._unfinished.summary = f"the root and {count} {'unit' if count == 1 else 'units'} of wrap()"
        for name, unit in choice.units:
            self._shard_unit(unit, name=name)
        self._refuse_split_ties(module)
        self._shard_root(module)
        layout = self._layouts[module] = self._unfinished
        self._unfinished = _Layout()
        units = units_of(module)
        for root in roots_of(module):
            prepare_root(root)  # before user code gives a parameter another place, as parametrizations do
        self._watch(module, units, layout)
        layout.weights = Weights(
            module,
            units,
            layout.plain,
            order=self._order,
            watch_data=self.options.compile is False,
            is_watched=lambda: self.is_watched and self.context.world_size > 1,
        )
        if self._order is not None:
            self._order.open()
        return {plain: sharded for sharded, plain in layout.plain.items()}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Keep a part of the state that optimizers bring; choose owners for what needs whole parameters."""
        if module in self._layouts:
            self._layouts[module].optimizers = list(optimizers)
        for optimizer in optimizers:
            shard_state(optimizer)
        self._owner_ranks.setup(optimizers)
        for optimizer in optimizers:
            self._states.hide(optimizer, parts=self.state_parts(self._owner_ranks.refusal))

    def _refuse_split_ties(self, root: nn.Module) -> None:
        """A unit took a parameter away that a module outside of it still holds."""
        taken = {id(plain) for plain in self._unfinished.plain.values()}
        left = [n for n, p in root.named_parameters(remove_duplicate=False) if id(p) in taken]
        if left:
            raise UnsupportedError(
                f"a unit shares parameters with modules outside of it: {', '.join(left)}.",
                remedy="Do not wrap it: what is not wrapped is sharded with the root, tied or not.",
            )

    def _watch(self, root: nn.Module, units: Sequence[Unit], layout: _Layout) -> None:
        """Let the ranks agree on what they do in a step, from now on."""
        if self._order is None:
            wait = 30.0 if self.options.compile is False else 600.0
            self._order = CollectiveOrder(remedy=partial(_remedy, self._by_choice), wait=wait)
        if self.options.auto_wrap:
            names = [name for name, part in root.named_modules() if name and isinstance(part, FSDPModule)]
            self._by_choice |= options_by_choice(root, names)
        assert layout.replicated is not None  # `_shard_root` made them
        index = len(self._layouts) - 1
        layout.agreement = StepAgreement(root, units, layout.replicated, self._order, index=index)

    def _choose_units(self, root: nn.Module) -> UnitChoice:
        if not self.options.auto_wrap:
            return UnitChoice((), "wrap() in configure_model chose them")
        policy = self.options.auto_wrap_policy
        return choose_units(
            root,
            policy=policy,
            min_num_params=self.options.min_num_params,
            by_choice=self.options.by_choice,
        )

    def _shard_unit(self, unit: nn.Module, *, name: str) -> None:
        self._prepare(unit, name=name)
        self._compile(unit)
        self._recompute(unit)
        self._fully_shard(unit, ignored=unshardable(unit), is_root=False)

    def _shard_root(self, root: nn.Module) -> None:
        self._prepare(root, name="")
        if not self._unfinished.compiled:  # there are no units: compile what the root calls
            for child in _parts_with_forward(root):
                self._compile(child)
        self._recompute(root)
        replicated = unshardable(root)
        if can_be_sharded(root):
            self._fully_shard(root, ignored=replicated, is_root=True)
        else:
            self._shard_children(root)
            replicated |= {p for p in root.parameters() if not isinstance(p, DTensor)}
        self._unfinished.replicated = ReplicatedParameters(p for p in root.parameters() if p in replicated)

    def _shard_children(self, root: nn.Module) -> None:
        """Where the root's class cannot take FSDP2's prefix, its children become units of their own."""
        children = [child for child in _parts_with_forward(root) if can_be_sharded(child)]
        users = Counter(p for child in children for p in set(child.parameters()))
        tied = {parameter for parameter, count in users.items() if count > 1}
        for child in children:
            ignored = unshardable(child) | (tied & set(child.parameters()))
            if any(p not in ignored and not isinstance(p, DTensor) for p in child.parameters()):
                self._fully_shard(child, ignored=ignored, is_root=False)

    def _prepare(self, module: nn.Module, *, name: str) -> None:
        """Real, equal weights on this rank's device."""
        materialize(module, self.context.device, name=name)
        move_to(module, self.context.device)
        if self.options.sync_module_states:
            broadcast_module(module)

    def _fully_shard(self, module: nn.Module, *, ignored: set[nn.Parameter], is_root: bool) -> None:
        before = dict(module.named_parameters())
        self._unfinished.strides |= lay_in_order(before.values())
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=self._reshard_after_forward(module, is_root=is_root),
            mp_policy=self._mixed_precision(),
            offload_policy=self._offload_policy(),
            ignored_params=ignored or None,
        )
        name_as_before(module)
        for name, sharded in module.named_parameters():
            plain = before[name]
            if sharded is not plain:
                self._unfinished.plain[sharded] = plain
                plain.grad = None
                plain.data = plain.data.new_empty(0)  # the user's object stays alive without its storage

    def _reshard_after_forward(self, module: nn.Module, *, is_root: bool) -> bool | int | None:
        """What to do with what a unit has gathered; None leaves it to FSDP2, which keeps the root's."""
        reshard = self.options.reshard_after_forward
        return reshard if reshard is not None or is_root else True

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        wanted = self.options.mixed_precision
        if wanted is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=_dtype(wanted.param_dtype),
            reduce_dtype=_dtype(wanted.reduce_dtype),
            output_dtype=_dtype(wanted.output_dtype),
            cast_forward_inputs=wanted.cast_forward_inputs,
        )

    def _offload_policy(self) -> OffloadPolicy:
        if not self.options.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.context.device.type == "cuda")

    # Forwards are replaced on the instances, so that no name in the model changes.

    def _compile(self, module: nn.Module) -> None:
        if self.options.compile is not False:
            arguments = {} if self.options.compile is True else dict(self.options.compile)
            module.forward = torch.compile(module.forward, **arguments)
            self._unfinished.compiled.add(module)

    def _recompute(self, module: nn.Module) -> None:
        for submodule in module.modules():
            if submodule in self._checkpointed and submodule not in self._unfinished.checkpointed:
                submodule.forward = partial(checkpoint, submodule.forward, use_reentrant=False)
                self._unfinished.checkpointed.add(submodule)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Gather every parameter into the user's own object and take FSDP2 off the modules."""
        layout = self._layouts.pop(module, self._unfinished)
        self._unfinished = _Layout()
        self._reshard(module)
        self._states.remove()
        if layout.weights is not None:
            layout.weights.release()
        replaced = layout.plain
        full = {
            sharded: self.at_end(
                partial(gather, cast(DTensor, sharded)), shape=sharded.shape, dtype=sharded.dtype
            )
            for sharded in replaced
        }
        for submodule in module.modules():
            remove_fully_shard(submodule)
            for name, parameter in submodule._parameters.items():
                if parameter is not None and parameter in replaced:
                    submodule._parameters[name] = replaced[parameter]
        for sharded, plain in replaced.items():
            plain.data = with_strides(full[sharded], layout.strides.get(plain))
            plain.requires_grad_(sharded.requires_grad)
        for changed in layout.compiled | layout.checkpointed:
            changed.__dict__.pop("forward", None)
        for optimizer in layout.optimizers:
            StateAfterwards(optimizer)
        if layout.replicated is not None:
            layout.replicated.remove()
        if layout.parts is not None:
            layout.parts.remove()
        return replaced

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step inside the root's forward, because that is what FSDP2's root hooks hang on."""
        layout = self._layouts.get(module)
        if layout is None or layout.agreement is None or layout.weights is None:
            return self._run(module, step, *args, **kwargs)
        is_manual = torch.is_grad_enabled() and not getattr(module, "automatic_optimization", True)
        if is_manual and any(map(has_failed_backward, layout.weights.modules)):
            self._drop_failed_backward(module)  # of a `loss.backward()`, which does not come by here
        with (
            _recovering(module),
            layout.agreement.step(getattr(step, "__name__", "a forward")),
            layout.weights.step(inner_backwards=not is_manual),
        ):
            return self._run(module, step, *args, **kwargs)

    def _run(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        result: T
        if torch.is_grad_enabled() and not getattr(module, "automatic_optimization", True):
            return self._run_manual(module, step, *args, **kwargs)
        if step is module:
            result = module(*args, **kwargs)
        else:
            with forward_as(module, step):
                result = module(*args, **kwargs)  # `step` ran in it
        if not torch.is_grad_enabled():
            # No backward will free what the root gathered, and code that walks over parameters
            # between steps must find the sharded ones.
            self._reshard(module)
        return result

    def _run_manual(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a step that calls forward, backward and the optimizers itself, whichever way it likes."""
        layout = self._layouts.get(module)
        if layout is None or not isinstance(module, FSDPModule):
            return step(*args, **kwargs)
        if layout.parts is None:
            layout.parts = PartsOfRoot(module, opaque=layout.compiled)
        with layout.parts.callable():
            result = step(*args, **kwargs)
        self._reshard(module)  # a forward that no backward followed left its units gathered
        return result

    def backward(self, module: nn.Module, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, and reduce them together with those that only other ranks have.

        After an error none is left of those that were not reduced, accumulated ones included.
        """
        with (
            clean_up_after_error("dropping its gradients", lambda: self._drop_failed_backward(module)),
            self._order.reporting() if self._order is not None else nullcontext(),
            self.backward_pass(),
        ):
            super().backward(module, loss, *args, **kwargs)

    def _drop_failed_backward(self, module: nn.Module) -> None:
        """Let every unit be what it is between steps, without a gradient that was not reduced."""
        begin_anew(states_of(module))
        for layout in self._layouts.values():
            if layout.agreement is not None and layout.weights is not None:
                layout.agreement.forget()
                layout.weights.drop_unreduced_gradients()

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Keep gradients on this rank until the first backward outside of it, unless a hook looks at them."""
        layout = self._layouts.get(module)
        if layout is not None and layout.weights is not None and layout.weights.has_hooks():
            yield
            return
        self._set_synchronize(module, False)
        try:
            yield
        finally:
            self._set_synchronize(module, True)

    def _set_synchronize(self, module: nn.Module, synchronize: bool) -> None:
        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.set_requires_gradient_sync(synchronize, recurse=False)
        layout = self._layouts.get(module)
        if layout is not None and layout.agreement is not None:
            layout.agreement.synchronize = synchronize

    def _reshard(self, module: nn.Module) -> None:
        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()

    def _all_weights(self) -> Iterator[Weights]:
        return (layout.weights for layout in self._layouts.values() if layout.weights is not None)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Around a backward."""
        with ExitStack() as stack:
            for weights in self._all_weights():
                stack.enter_context(weights.backward())
            yield

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Handles on the local gradients, with what user code has written into whole ones."""
        with self.stepping():
            return super().gradients(optimizer)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around what works on the DTensors themselves."""
        with ExitStack() as stack:
            for weights in self._all_weights():
                stack.enter_context(weights.stepping())
            yield

    def flush(self) -> None:
        """Write back what user code has changed in whole parameters."""
        for weights in self._all_weights():
            weights.flush()

    def for_user(self, argument: Any) -> Any:
        """Within `stepping`: an argument of an optimizer's step, whose closure sees whole weights."""
        for weights in self._all_weights():
            argument = weights.for_user(argument)
        return argument

    def state_parts(self, refusal: Callable[[Optimizer], str | None]) -> StateParts:
        """How optimizers' state looks whole to user code.

        Args:
            refusal: As of `nnx_core.view.hidden_state.StateParts`.
        """
        return PartsOfState(self._all_weights, refusal)

    def _for_user(self, optimizer: Optimizer, argument: Any) -> Any:
        return self.for_user(self._states.for_user(optimizer, argument))

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step, on owner ranks if it needs whole parameters; gathered old weights are freed."""
        args = tuple(self._for_user(optimizer, argument) for argument in args)
        kwargs = {name: self._for_user(optimizer, argument) for name, argument in kwargs.items()}
        self._free()  # takes over what user code wrote into gathered weights, which the step builds on
        with self.stepping(), self._states.shown(optimizer):
            result = self._owner_ranks.step(optimizer, step, *args, **kwargs)
        self._free()  # of a forward in the optimizer's closure
        return result

    def _free(self) -> None:
        """Free units that a forward without a backward left gathered."""
        for weights in self._all_weights():
            weights.free()

    def decisions(self, module: nn.Module) -> str:
        """The units."""
        return " ".join(name or "." for name, part in module.named_modules() if isinstance(part, FSDPModule))

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """What was written into sharded parameters, gathered or not."""
        self.flush()
        layout = self._layouts.get(module)
        return {} if layout is None or layout.weights is None else layout.weights.take_notes()

    def summary(self, module: nn.Module) -> str:
        """The units, and why they were chosen."""
        layout = self._layouts.get(module)
        return "" if layout is None else layout.summary

    def model_state(self, module: nn.Module) -> ModelState:
        """Handles on the shards; whatever is gathered at the moment is freed first."""
        self._reshard(module)
        entries = entries_of(module)  # by the module's own code, which sees weights unsharded
        with self.stepping():
            return describe_model(module, self.shard, entries)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Handles on the shards, and on what owner ranks hold whole."""
        with self.stepping(), self._states.shown(optimizer):
            return self._owner_ranks.describe(module, optimizer)

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the shards that this rank holds, and what it owns."""
        with self.stepping(), self._states.shown(optimizer):
            self._owner_ranks.load(self, module, optimizer, saved)


def _remedy(options: Mapping[str, str], message: str) -> str:
    """The way out where ranks reach units in another order."""
    return f"{remedy_by_choice(options, message)} {REMEDY}".lstrip()


def _recovering(module: nn.Module) -> AbstractContextManager[None]:
    """After an error every unit is what it is between steps, so that what was trained can still be saved."""
    return clean_up_after_error("resetting FSDP2", lambda: begin_anew(states_of(module)))


def roots_of(module: nn.Module) -> list[FSDPModule]:
    """The outermost modules that FSDP2 has: the module, or its children where it cannot be sharded."""
    if isinstance(module, FSDPModule):
        return [module]
    return [inner for child in module.children() for inner in roots_of(child)]


def _parts_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module; lists and dicts of modules are never called, so theirs instead."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts_with_forward(child)
        else:
            yield child


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
