"""Shard modules with FSDP2, and show user code unsharded parameters.

`Sharding` shards modules unit by unit, runs their steps, lets the ranks agree on the order of their
collectives, and gathers all parameters at the end. Its caller chooses the units: `nnx_fsdp.backend` uses
`nnx_fsdp.units`, and `nnx_colossalai` uses its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from nnx_base.clean_up import clean_up_after_error
from nnx_core._torch_compat import begin_anew, states_of
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import refuse_sparse_layers
from nnx_core.parts_backend import stepping
from nnx_core.view.hidden_optimizer_state import StateParts
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
    can_be_sharded,
    has_failed_backward,
    name_as_before,
    prepare_root,
    remove_fully_shard,
    units_of,
)
from nnx_fsdp.agreement import REMEDY, ReplicatedParameters, StepAgreement, unshardable
from nnx_fsdp.optimizer_state import PartsOfState, StateAfterwards
from nnx_fsdp.parts import gather
from nnx_fsdp.root_parts import PartsOfRoot
from nnx_fsdp.units import options_by_choice, remedy_by_choice
from nnx_fsdp.weights import Weights

__all__ = ["ShardedUnit", "Sharding"]

T = TypeVar("T")

Reshard = bool | int | None
"""``reshard_after_forward`` of ``fully_shard``; None is its default, which keeps the root gathered."""


class ShardedUnit(NamedTuple):
    """A module to shard as one FSDP unit.

    Attributes:
        name: Its name in the root module.
        module: The module.
        reshard: ``reshard_after_forward`` of ``fully_shard``.
    """

    name: str
    module: nn.Module
    reshard: Reshard = True


class AtEnd(Protocol):
    """`nnx_core.backend.Backend.at_end`: keep a gathered tensor on the ranks that hold weights at the end."""

    def __call__(
        self, gather: Callable[[], Tensor], *, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor: ...


@dataclass(slots=True)
class _Layout:
    """The changes to one root module, to be undone when its training ends.

    Attributes:
        plain: The user's own object of each sharded parameter; it has no storage during training.
        compiled: Modules with a compiled forward on the instance.
        checkpointed: Modules whose forward recomputes activations.
        strides: Meta tensors with the strides of the user's objects that were not contiguous.
        replicated: The parameters that FSDP2 cannot shard.
        agreement: The agreement of the ranks in a step.
        optimizers: The optimizers of the module's parameters.
        parts: The hooks for steps that call submodules themselves; None before the first such step.
        weights: The sharded parameters in user code's view; None before all are sharded.
    """

    plain: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    compiled: set[nn.Module] = field(default_factory=set)
    checkpointed: set[nn.Module] = field(default_factory=set)
    strides: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    replicated: ReplicatedParameters | None = None
    agreement: StepAgreement | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    parts: PartsOfRoot | None = None
    weights: Weights | None = None


class Sharding:
    """Shards one or several root modules with FSDP2.

    Args:
        mesh: The ranks: one mesh dim to shard over, or two to replicate and shard over.
        device: The device of this rank.
        mixed_precision: FSDP2's mixed precision.
        offload: FSDP2's offloading.
        compile: True to compile the forward of every unit; a dict passes arguments to ``torch.compile``.
        checkpointed: The layers whose activations backward recomputes; None for none.
        sync_module_states: Broadcast rank zero's weights and buffers before sharding.
        sum_gradients: True to reduce gradients by a sum and a division, with any communication library.
        is_watched: A function that returns True while the ranks compare user code's writes.
        has_by_choice: True if the caller has an option `by_choice`, which the error about unit order then
            names.

    Example:
        ``Sharding(mesh, torch.device("cuda", 0)).shard(model, [ShardedUnit("0", model[0])])``
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        mixed_precision: MixedPrecisionPolicy | None = None,
        offload: OffloadPolicy | None = None,
        compile: bool | Mapping[str, Any] = False,
        checkpointed: Layers | None = None,
        sync_module_states: bool = True,
        sum_gradients: bool = False,
        is_watched: Callable[[], bool] = lambda: False,
        has_by_choice: bool = True,
    ) -> None:
        self._mesh, self._device = mesh, device
        self._mixed_precision = mixed_precision or MixedPrecisionPolicy()
        self._offload = offload or OffloadPolicy()
        self._compiles = compile
        self._checkpointed = checkpointed or Layers(None, option="activation_checkpointing")
        self._sync_module_states = sync_module_states
        self._sum_gradients = sum_gradients
        self._is_watched = is_watched
        self._has_by_choice = has_by_choice
        self._by_choice: dict[str, str] = {}
        self._layouts: dict[nn.Module, _Layout] = {}
        self._unfinished = _Layout()  # units that are sharded before their root is known
        self.order: CollectiveOrder | None = None

    def holds(self, root: nn.Module) -> bool:
        """Return True if a module was sharded as a root."""
        return root in self._layouts

    def shard(
        self, root: nn.Module, units: Iterable[ShardedUnit], *, reshard_root: Reshard = None
    ) -> Mapping[nn.Parameter, nn.Parameter]:
        """Shard units bottom-up, then all other parameters with the root. Collective.

        Args:
            root: A module. Its parameters become DTensors under their own names.
            units: Modules in it, inner ones first.
            reshard_root: ``reshard_after_forward`` of the root.

        Returns:
            The DTensor in the place of each parameter.

        Raises:
            OptionError: `checkpointed` names a layer that the model does not have.
            UnsupportedError: A layer has sparse gradients, or a unit shares parameters with other modules.
        """
        refuse_sparse_layers(root, engine="FSDP2")
        self._checkpointed.check(root)
        for unit in units:
            self.shard_unit(unit)
        self._refuse_split_ties(root)
        self._shard_root(root, reshard_root)
        layout = self._layouts[root] = self._unfinished
        self._unfinished = _Layout()
        gathered = units_of(root)
        for top in roots_of(root):
            prepare_root(top)  # before user code moves a parameter to another name, as parametrizations do
        if self.order is None:
            self.order = CollectiveOrder(remedy=self._remedy, wait=30.0 if self._compiles is False else 600.0)
        if self._has_by_choice:
            names = [name for name, part in root.named_modules() if name and isinstance(part, FSDPModule)]
            self._by_choice |= options_by_choice(root, names)
        assert layout.replicated is not None  # set by `_shard_root`
        index = len(self._layouts) - 1
        layout.agreement = StepAgreement(root, gathered, layout.replicated, self.order, index=index)
        layout.weights = Weights(
            root,
            gathered,
            layout.plain,
            order=self.order,
            watch_data=self._compiles is False,
            is_watched=self._is_watched,
        )
        self.order.open()
        return {plain: sharded for sharded, plain in layout.plain.items()}

    def shard_unit(self, unit: ShardedUnit) -> None:
        """Shard one unit before its root, as torch's ``wrap()`` does. Collective."""
        self._prepare(unit.module, name=unit.name)
        self._compile(unit.module)
        self._recompute(unit.module)
        self._fully_shard(unit.module, ignored=unshardable(unit.module), reshard=unit.reshard)

    def _remedy(self, message: str) -> str:
        """Return the remedy for units in different orders."""
        return f"{remedy_by_choice(self._by_choice, message)} {REMEDY}".lstrip()

    def _refuse_split_ties(self, root: nn.Module) -> None:
        """Refuse a unit that took a parameter which a module outside of it still holds."""
        taken = {id(plain) for plain in self._unfinished.plain.values()}
        left = [n for n, p in root.named_parameters(remove_duplicate=False) if id(p) in taken]
        if left:
            raise UnsupportedError(
                f"a unit shares parameters with modules outside of it: {', '.join(left)}.",
                remedy="Do not wrap it. Parameters outside of units are sharded with the root, tied or not.",
            )

    def _shard_root(self, root: nn.Module, reshard: Reshard) -> None:
        self._prepare(root, name="")
        if not self._unfinished.compiled:  # no unit was compiled: compile the root's children
            for child in _parts_with_forward(root):
                self._compile(child)
        self._recompute(root)
        replicated = unshardable(root)
        if can_be_sharded(root):
            self._fully_shard(root, ignored=replicated, reshard=reshard)
        else:
            self._shard_children(root, True if reshard is None else reshard)
            replicated |= {p for p in root.parameters() if not isinstance(p, DTensor)}
        self._unfinished.replicated = ReplicatedParameters(p for p in root.parameters() if p in replicated)

    def _shard_children(self, root: nn.Module, reshard: bool | int) -> None:
        """Shard the root's children as units, because the root's class cannot take FSDP2's prefix."""
        children = [child for child in _parts_with_forward(root) if can_be_sharded(child)]
        users = Counter(p for child in children for p in set(child.parameters()))
        tied = {parameter for parameter, count in users.items() if count > 1}
        for child in children:
            ignored = unshardable(child) | (tied & set(child.parameters()))
            if any(p not in ignored and not isinstance(p, DTensor) for p in child.parameters()):
                self._fully_shard(child, ignored=ignored, reshard=reshard)

    def _prepare(self, module: nn.Module, *, name: str) -> None:
        """Materialize the weights on this rank's device, equal on all ranks."""
        materialize(module, self._device, name=name)
        move_to(module, self._device)
        if self._sync_module_states:
            broadcast_module(module)

    def _fully_shard(self, module: nn.Module, *, ignored: set[nn.Parameter], reshard: Reshard) -> None:
        before = dict(module.named_parameters())
        self._unfinished.strides |= lay_in_order(before.values())
        sharded_module = fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=reshard,
            mp_policy=self._mixed_precision,
            offload_policy=self._offload,
            ignored_params=ignored or None,
        )
        if self._sum_gradients:
            sharded_module.set_force_sum_reduction_for_comms(True)
        name_as_before(module)
        for name, sharded in module.named_parameters():
            plain = before[name]
            if sharded is not plain:
                self._unfinished.plain[sharded] = plain
                plain.grad = None
                plain.data = plain.data.new_empty(0)  # the user's object lives on without storage

    # A forward is replaced on the instance. A wrapper module would change names in the model.

    def _compile(self, module: nn.Module) -> None:
        if self._compiles is not False:
            arguments = {} if self._compiles is True else dict(self._compiles)
            module.forward = torch.compile(module.forward, **arguments)
            self._unfinished.compiled.add(module)

    def _recompute(self, module: nn.Module) -> None:
        for submodule in module.modules():
            if submodule in self._checkpointed and submodule not in self._unfinished.checkpointed:
                submodule.forward = partial(checkpoint, submodule.forward, use_reentrant=False)
                self._unfinished.checkpointed.add(submodule)

    def take_optimizers(self, root: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Remember the optimizers of a root, so that `unshard` also unshards their state."""
        if root in self._layouts:
            self._layouts[root].optimizers = list(optimizers)

    def replace(self, root: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Accept other objects in the place of sharded parameters.

        Args:
            root: The root of the parameters.
            replaced: The object in the place of each sharded parameter.
        """
        layout = self._layouts[root]
        for old, new in replaced.items():
            layout.plain[new] = layout.plain.pop(old)
        if layout.weights is not None:
            layout.weights.replace(replaced)

    def unshard(self, root: nn.Module, at_end: AtEnd) -> Mapping[nn.Parameter, nn.Parameter]:
        """Gather every parameter into the user's own object and remove FSDP2 from the modules. Collective.

        Args:
            root: A root, or a module with sharded units that was never sharded as a root.
            at_end: A function that keeps a gathered tensor.

        Returns:
            The user's parameter in the place of each DTensor.
        """
        layout = self._layouts.pop(root, self._unfinished)
        self._unfinished = _Layout()
        self.free(root)
        if layout.weights is not None:
            layout.weights.release()
        replaced = layout.plain
        full = {
            sharded: at_end(partial(gather, cast(DTensor, sharded)), shape=sharded.shape, dtype=sharded.dtype)
            for sharded in replaced
        }
        for submodule in root.modules():
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

    def run_step(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step inside the root's forward, because FSDP2's root hooks are there."""
        layout = self._layouts.get(root)
        if layout is None or layout.agreement is None or layout.weights is None:
            return self._run(root, step, *args, **kwargs)
        is_manual = torch.is_grad_enabled() and not getattr(root, "automatic_optimization", True)
        if is_manual and any(map(has_failed_backward, layout.weights.modules)):
            self.drop_failed_backward(root)  # a failed `loss.backward()` does not run `backward_pass`
        with (
            _recovering(root),
            layout.agreement.step(getattr(step, "__name__", "a forward")),
            layout.weights.step(inner_backwards=not is_manual),
        ):
            return self._run(root, step, *args, **kwargs)

    def _run(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        result: T
        if torch.is_grad_enabled() and not getattr(root, "automatic_optimization", True):
            return self._run_manual(root, step, *args, **kwargs)
        if step is root:
            result = root(*args, **kwargs)
        else:
            with forward_as(root, step):
                result = root(*args, **kwargs)  # runs `step` in the place of the root's forward
        if not torch.is_grad_enabled():
            # No backward frees the root's gathered parameters then. User code that walks over parameters
            # between steps must find the sharded ones.
            self.free(root)
        return result

    def _run_manual(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a step that calls forward, backward and the optimizers itself, in any order."""
        layout = self._layouts.get(root)
        if layout is None or not isinstance(root, FSDPModule):
            return step(*args, **kwargs)
        if layout.parts is None:
            layout.parts = PartsOfRoot(root, opaque=layout.compiled)
        with layout.parts.callable():
            result = step(*args, **kwargs)
        self.free(root)  # a forward without a backward left its units gathered
        return result

    def drop_failed_backward(self, root: nn.Module) -> None:
        """Reset FSDP2 after a failed backward, and drop the unreduced gradients."""
        begin_anew(states_of(root))
        for layout in self._layouts.values():
            if layout.agreement is not None and layout.weights is not None:
                layout.agreement.forget()
                layout.weights.drop_unreduced_gradients()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Context manager around a backward; at the end it also adds the gradients of unsharded reads."""
        with ExitStack() as stack:
            for weights in self.views():
                stack.enter_context(weights.backward())
            yield

    @contextmanager
    def no_sync(self, root: nn.Module) -> Iterator[None]:
        """Accumulate gradients on this rank until the first backward outside, unless hooks read them."""
        layout = self._layouts.get(root)
        if layout is not None and layout.weights is not None and layout.weights.has_hooks():
            yield
            return
        self._set_synchronize(root, False)
        try:
            yield
        finally:
            self._set_synchronize(root, True)

    def _set_synchronize(self, root: nn.Module, synchronize: bool) -> None:
        for submodule in root.modules():
            if isinstance(submodule, FSDPModule):
                submodule.set_requires_gradient_sync(synchronize, recurse=False)
        layout = self._layouts.get(root)
        if layout is not None and layout.agreement is not None:
            layout.agreement.synchronize = synchronize

    def free(self, root: nn.Module) -> None:
        """Keep only this rank's shards of all units of a root."""
        for submodule in root.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()

    def free_gathered(self) -> None:
        """Free units that a forward without a backward left gathered; keep user code's writes to them."""
        for weights in self.views():
            weights.free()

    def views(self) -> list[Weights]:
        """Return the parameters of every root; an optimizer's step sees them as this rank's shards."""
        return [layout.weights for layout in self._layouts.values() if layout.weights is not None]

    def local(self) -> AbstractContextManager[None]:
        """Return a context that shows the DTensors instead of unsharded tensors."""
        return stepping(self.views())

    def state_parts(self, refusal: Callable[[Optimizer], str | None]) -> StateParts:
        """Return a view of optimizer state that reads as unsharded.

        Args:
            refusal: `refusal` of `nnx_core.view.hidden_optimizer_state.StateParts`.
        """
        return PartsOfState(self.views, refusal)

    def flush(self) -> None:
        """Copy user code's changes of unsharded parameters back into the shards."""
        for weights in self.views():
            weights.flush()

    def written(self, root: nn.Module) -> Mapping[str, int]:
        """Return a checksum of user code's writes to each sharded parameter, gathered or not, by name."""
        self.flush()
        layout = self._layouts.get(root)
        return {} if layout is None or layout.weights is None else layout.weights.take_notes()


def _recovering(root: nn.Module) -> AbstractContextManager[None]:
    """Reset every unit after an error, so that the trained weights can still be saved."""
    return clean_up_after_error("resetting FSDP2", lambda: begin_anew(states_of(root)))


def roots_of(module: nn.Module) -> list[FSDPModule]:
    """Return the outermost modules under FSDP2: the module, or its children if it cannot be sharded."""
    if isinstance(module, FSDPModule):
        return [module]
    return [inner for child in module.children() for inner in roots_of(child)]


def _parts_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module. Containers have no forward, so their children stand for them."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts_with_forward(child)
        else:
            yield child
