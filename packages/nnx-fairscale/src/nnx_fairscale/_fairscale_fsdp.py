"""Shard one unit with fairscale's FSDP (0.4.13), and leave the user's modules in place.

fairscale's wrapper replaces a module in the tree, its parameters by one flat parameter, and their names by
its own. Here the wrapper stands outside of the tree. The user's parameter objects stay registered under their
names. Between steps their data and gradients are views of this rank's shard of the flat parameter, so any
elementwise optimizer over them updates the shard. During forward and backward the modules hold views of the
gathered flat parameter instead, and fairscale computes with it.

Only this file uses private names of fairscale's FSDP. `HostShim`, also here, makes that FSDP run on CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import fairscale.internal.reduce_scatter_bucketer as bucketer
import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp
import torch
import torch.distributed as dist
from fairscale.internal.reduce_scatter_bucketer import ReduceScatterBucketer
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.nn.data_parallel.fully_sharded_data_parallel import TrainingState, get_fsdp_instances
from torch import Tensor, nn

from nnx_base._torch_compat import local_mode
from nnx_base.box import cut_range
from nnx_base.shard import Shard, shard_of_range
from nnx_core._torch_compat import current_backward
from nnx_core.agree.collective_order import CollectiveOrder
from nnx_core.agree.divergence import Writes, checksum
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import refuse_sparse_gradient

_MARK = "_is_sharded"
_NNX_ATTRIBUTES = frozenset({_MARK, "_part"})
_FAIRSCALE_ATTRIBUTES = (
    "_is_sharded",
    "_orig_size",
    "_fp32_shard",
    "_fp16_shard",
    "_full_param_padded",
    "_cpu_grad",
)


def is_taken(parameter: nn.Parameter) -> bool:
    """Return True if a unit already has the parameter, or the parameter was left out."""
    return hasattr(parameter, _MARK)


def leave_out(parameter: nn.Parameter) -> None:
    """Exclude the parameter from all units, so that it stays replicated."""
    setattr(parameter, _MARK, False)


@dataclass(slots=True, eq=False)
class Piece:
    """A parameter, and the range of it that this rank holds.

    Attributes:
        parameter: The user's own object. Between steps its data are this rank's elements.
        shape: The shape of the full parameter.
        start: The flat index of the first local element in the full parameter.
        length: The number of local elements; tensors of the parameter may have padding behind them.
        begin: The flat index of the parameter's first element in the flat parameter.
        places: The modules that hold the parameter, each with the parameter's name there.
        shown: The tensor that the modules hold while the parameter is gathered.
    """

    parameter: nn.Parameter
    shape: torch.Size
    start: int
    length: int
    begin: int = 0
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    shown: Tensor | None = None

    def is_in_place(self) -> bool:
        """Return True if the modules still hold the parameter or the tensor shown for it."""
        there = [owner._parameters.get(name) for owner, name in self.places]
        return all(held is not None and (held is self.parameter or held is self.shown) for held in there)

    def shard(self, tensor: Tensor) -> Shard:
        """Describe the shard of the parameter or its optimizer state that a tensor holds."""
        return shard_of_range(tensor.detach()[: self.length], shape=self.shape, start=self.start)


class _View(nn.Parameter):
    """A parameter of a gathered unit: a view of the flat parameter, so that changes reach the shard.

    The class is no guard, for the reason in `nnx_fsdp._torch_compat.GatheredWeight`.
    """

    unit: Unit

    @property
    def data(self) -> Tensor:
        """The same memory without autograd history. The unit cannot see writes to it, so it assumes one."""
        self.unit.may_be_written = True
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.data.copy_(value)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook that runs only with a gradient.

        A node with many outputs passes None for the gradient of an unused output.
        """

        def called(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else hook(gradient)

        return super().register_hook(called)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a parameter with its own memory."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


class _Unflatten(torch.autograd.Function):
    """Return the parameters in a flat parameter, as tensors that share its memory.

    Views of one split would forbid in-place changes.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shapes, ctx.options = shapes, {"dtype": flat.dtype, "device": flat.device}
        storage, begin, found = flat.untyped_storage(), flat.storage_offset(), []
        for shape in shapes:
            found.append(flat.new_empty(0).set_(storage, begin, shape, _strides(shape)))
            begin += shape.numel()
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        flattened = [
            torch.zeros(shape.numel(), **ctx.options) if gradient is None else gradient.reshape(-1)
            for gradient, shape in zip(gradients, ctx.shapes, strict=True)
        ]
        return torch.cat(flattened), None


@cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class _Carrier(nn.Module):
    """The module that fairscale's wrapper wraps.

    It holds the unit's modules and nested units, and runs a call.
    """

    def __init__(self, module: nn.Module, nested: Iterable[nn.Module]) -> None:
        super().__init__()
        self.unit = module
        self.nested = nn.ModuleList(nested)

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class Unit(FullyShardedDataParallel):  # type: ignore[misc] # fairscale has no types
    """A module with parameters that are gathered and reduced together.

    Args:
        module: The module. Parameters of nested units belong to these.
        nested: The units inside of it.
        stream: The stand-in for CUDA streams on CPU.
        **settings: Arguments of fairscale's FSDP.
    """

    root: Unit | None

    def __init__(
        self, module: nn.Module, nested: Sequence[Unit], *, stream: NullStream | None, **settings: Any
    ) -> None:
        places = _places(module)
        trainable = {parameter: parameter.requires_grad for parameter in places}
        for parameter in places:  # one flat parameter holds both frozen and trainable parameters
            parameter.requires_grad_(True)
            parameter.grad = None
        order = {owner: list(owner._parameters) for where in places.values() for owner, _ in where}
        super().__init__(_Carrier(module, nested), **settings)
        self.pieces: list[Piece] = []
        self._stream = stream
        self._views: list[Tensor] = []
        self._used: set[int] = set()
        self._last_used = self._backward_id = 0
        self._views_version = 0
        self.may_be_written = self.is_shown = self.in_backward = False
        self.order: CollectiveOrder | None = None
        self.writes: Writes | None = None
        self._sums: list[Tensor] = []
        self.belong_to(None)
        self.label = type(module).__name__
        for flat in self.params:
            self._init_param_attributes(flat)  # pins the shard before anything views it
        if self._num_flatten_params:
            self._make_pieces(places, order)
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad_(requires_grad)

    def belong_to(self, root: Unit | None) -> None:
        """Set the unit of the full model.

        The root is no submodule of this unit, because it would be its own child. A walk over children, as of
        `torch.utils.module_tracker`, would never end.
        """
        self.__dict__["root"] = root

    def _make_pieces(
        self, places: Mapping[nn.Parameter, list[tuple[nn.Module, str]]], order: Mapping[nn.Module, list[str]]
    ) -> None:
        flat = self.params[0]
        owners = {place: parameter for parameter, where in places.items() for place in where}
        shard = flat._fp32_shard
        low, begin = self.rank * shard.numel(), 0
        for (_, owner, name), numel, shape in zip(
            flat._param_infos, flat._param_numels, flat._param_shapes, strict=True
        ):
            parameter = owners[owner, name]
            start, length = cut_range(begin, numel, low=low, high=low + shard.numel())
            at = begin + start - low if length else 0
            parameter.data = shard[at : at + length]
            setattr(parameter, _MARK, True)
            where = places[parameter]
            self.pieces.append(Piece(parameter, shape, start, length, begin, where))
            begin += numel
        self.module._unflatten_params_as_views = self._make_views
        self.module.module.__dict__.pop("_unflattened_param_views", None)
        self._hide()
        for owner, names in order.items():
            held = {name: owners.get((owner, name), owner._parameters.get(name)) for name in names}
            owner._parameters.clear()
            owner._parameters.update(held)

    def gather(self, at_end: Callable[..., Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the tensor that this rank keeps of every parameter, in its own memory. Collective.

        Args:
            at_end: `Backend.at_end`, for the unit's flat parameter.
        """
        found = {}
        for flat in self.params:
            local = flat._fp32_shard
            shape = (self.world_size * local.numel(),)
            full = at_end(partial(self._gather, flat), shape=shape, dtype=local.dtype)
            for piece in self.pieces:
                elements = full[piece.begin : piece.begin + piece.shape.numel()]
                own = elements.view(piece.shape)
                found[piece.parameter] = (
                    own.clone() if full.is_contiguous() else own
                )  # a placeholder takes no memory
        return found

    def _gather(self, flat: Tensor) -> Tensor:
        shard: Tensor = flat._fp32_shard.detach().flatten()  # type: ignore[attr-defined]
        if self.world_size == 1:
            return shard
        shard = shard.to(self.compute_device)
        full = shard.new_empty(self.world_size * shard.numel())
        dist.all_gather_into_tensor(full, shard, group=self.process_group)
        return full

    def remove(self) -> None:
        """Remove all of fairscale's attributes and hooks; parameters keep their shards as data."""
        self._hide()
        self._views.clear()
        for parameter in (*self.params, *(piece.parameter for piece in self.pieces)):
            parameter.grad = None
            _, hook = parameter.__dict__.pop("_shard_bwd_hook", (None, None))
            if hook is not None:  # the graph's node and the parameter would keep each other alive
                hook.remove()
            for name in _FAIRSCALE_ATTRIBUTES:
                parameter.__dict__.pop(name, None)
        self._reducer = None
        ReduceScatterBucketer._get_shard_size.cache_clear()  # the cache keeps every reducer alive

    def _make_views(self) -> None:
        """Give the modules views of the gathered flat parameter, in place of fairscale's own."""
        flat = self.params[0]
        with local_mode():
            views = _Unflatten.apply(flat, [piece.shape for piece in self.pieces])  # type: ignore[no-untyped-call]
            self._views = [
                self._view(*each) for each in zip(views, self.pieces, range(len(views)), strict=True)
            ]
            self._views_version, self.may_be_written = self._version_of_views(), False
            is_compared = self.writes is not None and self.writes.are_compared() and flat._is_sharded
            self._sums = [checksum(view) for view in self._views] if is_compared else []
            self._follow_places()
            self._show()

    def _version_of_views(self) -> int:
        return sum(view._version for view in self._views)

    def _view(self, view: Tensor, piece: Piece, index: int) -> Tensor:
        """Return the tensor for a parameter in a forward, with the parameter's hooks and attributes."""
        parameter = piece.parameter
        if not parameter.requires_grad:
            view = view.detach()
        view.__class__ = _View
        view.unit = self  # type: ignore[attr-defined]
        vars(view).update(
            {name: value for name, value in vars(parameter).items() if name not in _NNX_ATTRIBUTES}
        )
        if view.requires_grad and torch.is_grad_enabled():
            view.register_hook(partial(self._note_use, index))  # type: ignore[no-untyped-call]
            for hook in (parameter._backward_hooks or {}).values():
                view.register_hook(hook)  # type: ignore[no-untyped-call]
        return view

    def _note_use(self, index: int, gradient: Tensor) -> None:
        owner, name = self.pieces[index].places[0]
        refuse_sparse_gradient(gradient, f"{name} of a {type(owner).__name__}")
        self._used.add(index)
        self._last_used = index

    def _follow_places(self) -> None:
        """Find parameters that user code has renamed, as pruning does."""
        if all(piece.is_in_place() for piece in self.pieces):
            return
        found: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for owner in self.module.module.unit.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    found[id(parameter)].append((owner, name))
        for piece in self.pieces:
            piece.places = found.get(id(piece.parameter)) or piece.places

    def _show(self) -> None:
        """Put views in place of the parameters; tensors set by ``functional_call`` stay."""
        self.is_shown = True
        for view, piece in zip(self._views, self.pieces, strict=True):
            before, piece.shown = piece.shown, view
            for owner, name in piece.places:
                there = owner._parameters.get(name)
                if there is piece.parameter or (there is not None and there is before):
                    owner._parameters[name] = view  # type: ignore[assignment]
                    _update_flat_weights(owner, name, view)

    def _hide(self) -> None:
        self.is_shown = False
        for piece in self.pieces:
            view, piece.shown = piece.shown, None
            for owner, name in piece.places:
                owner.__dict__.pop(name, None)  # fairscale's own view, from before the first one of nnx
                if view is not None and owner._parameters.get(name) is view:
                    owner._parameters[name] = piece.parameter
                    _update_flat_weights(owner, name, piece.parameter)

    @torch.no_grad()
    def _save_written(self) -> None:
        """Copy values that a forward has written into the gathered parameters to the shard."""
        if not self._views or not (self.may_be_written or self._version_of_views() != self._views_version):
            return
        flat = self.params[0]
        self.may_be_written = False
        if not flat._is_sharded:
            return
        if self.mixed_precision:
            raise UnsupportedError(
                f"a weight of {self.label} was changed in a forward that computes in {self.compute_dtype}.",
                remedy="Change weights between steps, as in `on_train_batch_start`.",
            )
        if self.writes is not None:
            for view, piece, before in zip(self._views, self.pieces, self._sums, strict=False):
                self.writes.add(piece.parameter, view, before)
        shard = flat._fp32_shard
        shard.copy_(flat._full_param_padded[self.rank * shard.numel() :][: shard.numel()])

    @property
    def shard_size(self) -> int:
        """The number of elements of the flat parameter on each rank."""
        return int(self.params[0]._fp32_shard.numel())

    def view_of(self, piece: Piece) -> Tensor | None:
        """Return the tensor that the last forward used for a parameter."""
        views = zip(self._views, self.pieces, strict=False)
        return next((view for view, other in views if other is piece), None)

    def unreduced_gradient(self, piece: Piece) -> Tensor | None:
        """Return this rank's own gradient of a parameter while gradients accumulate."""
        flat = self.params[0]
        if flat.grad is None or self.world_size == 1 or flat.grad.shape != flat._orig_size:
            return None
        gradient: Tensor = flat.grad[piece.begin : piece.begin + piece.shape.numel()]
        return gradient.view(piece.shape)

    def _announce(self, what: str, cause: str = "") -> None:
        if self.order is not None and self.world_size > 1:
            self.order.arrive(f"{what} of {self.label}", cause=cause)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Run a call with the unit's parameters gathered."""
        with local_mode():
            for flat in self.params:
                flat.requires_grad_(any(piece.parameter.requires_grad for piece in self.pieces))

        def run() -> Any:
            result = call()
            self._save_written()
            return result

        try:
            return super().forward(run)
        finally:
            self._hide()
            if not torch.is_grad_enabled():
                self._views.clear()

    @property
    def is_busy(self) -> bool:
        """True while a forward or a backward of the unit runs."""
        return bool(self.training_state != TrainingState.IDLE)

    def become_root(self) -> None:
        """Make this unit the root, so that a nested unit does not when it is called first."""
        self._lazy_init()

    def free(self) -> None:
        """Free gathered parameters, because the weights may have changed since."""
        if not self.is_busy:
            self._free_full_params()
            self._use_fp32_param_shard()

    def _rebuild_full_params(self, force_full_precision: bool = False) -> Any:
        self._refuse_inner_gradients()
        self._check_freed()
        self._backward_id = current_backward()
        if self.params and not self.has_full_params:
            self._announce("the gather")
        gathered = super()._rebuild_full_params(force_full_precision)
        if self._views:  # backward begins, and recomputed layers read the attributes again
            self._show()
        return gathered

    def _use_full_params(self) -> None:
        self._refuse_inner_gradients()
        self._check_freed()
        self._backward_id = current_backward()
        if not self.has_full_params:
            self._rebuild_full_params()
        super()._use_full_params()
        if self._views:
            self._show()

    def _refuse_inner_gradients(self) -> None:
        """Refuse a gradient that is computed outside of the loss's backward.

        The loss's backward would find its gathered parameters freed.
        """
        if self.root is None or self.training_state == TrainingState.FORWARD:
            return
        if self.root.training_state == TrainingState.FORWARD or not self.root.in_backward:
            raise UnsupportedError(
                f"a gradient through {self.label}, which is a unit, is computed outside of the backward "
                "of the strategy.",
                remedy="For `torch.autograd.grad` in `training_step`, use automatic optimization and a "
                "model without units (a larger min_num_params); in place of `loss.backward()`, call "
                "`self.manual_backward(loss)`; or use strategy 'fairscale_sharded'.",
            )

    def _check_freed(self) -> None:
        """Note that another backward may have freed gathered or cast parameters of this one."""
        used = [p._full_param_padded if p._is_sharded else p._fp16_shard for p in self.params if p.numel()]
        if any(full is not None and not full.untyped_storage().nbytes() for full in used):
            self.has_full_params = False

    def _refuse_inner_backward(self) -> None:
        """Refuse the gradients of a backward inside the backward.

        A unit is reduced and freed once, and a backward inside computes the gradients of some of its layers
        only.
        """
        roots = () if self.root is None else (self.root._backward_id,)
        if current_backward() in {self._backward_id, *roots}:
            return
        owner, name = self.pieces[self._last_used].places[0]
        raise UnsupportedError(
            f"the gradient of '{name}' of a {type(owner).__name__} comes from a backward inside the "
            f"backward, and fairscale reduces all gradients of {self.label} at once.",
            remedy="Recompute activations with `use_reentrant=False`; make the recomputed layer a "
            "unit, by `wrap()` or auto_wrap_policy; or use strategy 'fairscale_sharded' or 'fsdp_auto'.",
        )

    def _post_backward_hook(self, param: Tensor, *unused: Any) -> None:
        self._refuse_inner_backward()
        if param.grad is not None and self._require_backward_grad_sync:
            self._announce("the reduction")
        super()._post_backward_hook(param, *unused)
        self._check_freed()
        if self.is_shown and not self.has_full_params:
            self._hide()  # a checkpoint may recompute code that reads a weight of this unit

    def _prep_grads_for_backward(self) -> None:
        """Drop gradients that user code has dropped since the last backward."""
        with local_mode():
            for flat in self.params:
                self._load_gradients(flat)
        super()._prep_grads_for_backward()

    @torch.no_grad()
    def _load_gradients(self, flat: Tensor) -> None:
        has = {index for index, piece in enumerate(self.pieces) if piece.parameter.grad is not None}
        if flat.grad is None:
            self._used = has  # hooks of this backward's views have yet to fire
            self._load_given(flat)
        elif not has:
            self._used.clear()
            flat.grad = None
            flat.__dict__.pop("_saved_grad_shard", None)
        else:
            self._used &= has
            self._load_changed(flat)

    def _load_changed(self, flat: Any) -> None:
        """Copy gradients that user code has changed, so that a backward adds to them."""
        for index, (piece, mine) in enumerate(zip(self.pieces, self._gradients(flat), strict=True)):
            given = piece.parameter.grad
            if given is None:
                mine.zero_()
                if flat.grad.shape == flat._orig_size:
                    flat.grad[piece.begin : piece.begin + piece.shape.numel()].zero_()
            elif given.data_ptr() != mine.data_ptr():
                mine.copy_(given)
                self._used.add(index)

    def _load_given(self, flat: Any) -> None:
        """Copy gradients that user code has assigned, so that a backward adds to them."""
        given = [piece for piece in self.pieces if piece.parameter.grad is not None and piece.length]
        if given and flat._is_sharded:
            flat._saved_grad_shard = torch.zeros_like(flat._fp32_shard)
            for piece in given:
                at = piece.begin + piece.start - self.rank * flat._fp32_shard.numel()
                flat._saved_grad_shard[at : at + piece.length].copy_(piece.parameter.grad)

    @torch.no_grad()
    def _publish_gradients(self) -> None:
        """Make the user's gradients views of the flat gradient.

        The flat gradient holds this rank's shard, or the full gradient while accumulating. Under fairscale's
        mixed precision an unreduced gradient has another dtype, so the user's gradients are copies.
        """
        for flat in self.params:
            if flat.grad is None:
                continue
            for piece, mine in zip(self.pieces, self._gradients(flat), strict=True):
                parameter = piece.parameter
                parameter.grad = mine.to(parameter.dtype) if parameter.requires_grad else None

    def _gradients(self, flat: Tensor) -> list[Tensor]:
        gradient = flat.grad
        if gradient is None:
            return []
        is_full = gradient.shape == flat._orig_size  # type: ignore[attr-defined]
        low = 0 if is_full else self.rank * gradient.numel()
        first = [piece.begin + piece.start - low if piece.length else 0 for piece in self.pieces]
        return [gradient[at : at + piece.length] for at, piece in zip(first, self.pieces, strict=True)]

    def _wait_for_post_backward(self) -> None:
        """Publish the gradients at the end of a backward."""
        units = [unit for unit in get_fsdp_instances(self) if unit._pre_backward_hook_has_run]
        if self._require_backward_grad_sync:
            has_any = any(unit.training_state == TrainingState.BACKWARD_POST for unit in units)
            self._announce(
                "the end of the gradients", "" if has_any else ", as its loss depends on no weight"
            )
        super()._wait_for_post_backward()
        with local_mode():
            for unit in units:
                unit._hide()
                unit._views.clear()
                unit._publish_gradients()
            if self._require_backward_grad_sync:
                self._drop_unused(get_fsdp_instances(self))

    def _drop_unused(self, units: Sequence[Unit]) -> None:
        """Set gradients of parameters that no rank has used to None; the flat gradient has zeros there."""
        pieces = [(unit, i) for unit in units for i in range(len(unit.pieces))]
        used = used_anywhere([i in unit._used for unit, i in pieces])
        for (unit, i), is_used in zip(pieces, used, strict=True):
            if not is_used:
                unit.pieces[i].parameter.grad = None

    def _post_reduction_hook(self, param: Tensor, reduced_grad: Tensor) -> None:
        """Copy a gradient out of its bucket, so that the bucket can be freed."""
        if reduced_grad.untyped_storage().nbytes() > reduced_grad.nbytes:
            reduced_grad = reduced_grad.clone()
        super()._post_reduction_hook(param, reduced_grad)

    def _setup_streams(self) -> None:
        super()._setup_streams()
        if self._is_root and self._stream is not None:
            self._streams.update(dict.fromkeys(STREAMS, self._stream))  # nested units share the dict

    def _cast_buffers(self, *args: Any, **kwargs: Any) -> None:
        """Leave buffers in their dtype, because a checkpoint would save cast buffers with lower precision."""

    def assert_state(self, state: Any) -> None:
        """Also accept a unit that no gradient has reached; fairscale expects a later state."""
        states = list(state) if isinstance(state, (list, tuple)) else [state]
        if TrainingState.BACKWARD_POST in states or TrainingState.BACKWARD_PRE in states:
            states += [TrainingState.BACKWARD_PRE, TrainingState.IDLE]
        super().assert_state(states)


def _places(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return each parameter outside of units with the modules that hold it and its names there."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not is_taken(parameter):
                found[parameter].append((owner, name))
    return found


def _update_flat_weights(owner: nn.Module, name: str, value: Tensor) -> None:
    """Update the list of weights that torch's recurrent layers keep in addition to attributes."""
    names = getattr(owner, "_flat_weights_names", ())
    if name in names:
        weights: Any = owner._flat_weights
        weights[names.index(name)] = value


# fairscale's FSDP uses CUDA streams without checking for CUDA, and collectives that gloo refuses. While a
# backend is set up on CPU, `HostShim` installs:
#
# * a ``torch`` for fairscale's FSDP module alone, whose ``cuda`` has one stream that does nothing;
# * ``enable_nccl_base_collectives = False`` in the two modules that read it, as the environment variable
#   ``ENABLE_NCCL_BASE_COLLECTIVES=0`` would do before the import;
# * a ``torch.Tensor.record_stream`` that does nothing for CPU tensors, which no stream keeps alive.
#
# The removal of the shim restores everything. On CUDA the shim changes nothing.


STREAMS = ("fp32_to_fp16", "all_gather", "post_backward")
"""The names of the streams that fairscale's FSDP uses."""

_record_stream: Any = Tensor.record_stream
_base_collectives: bool = fsdp.enable_nccl_base_collectives


class NullStream:
    """A stream without pending work, because a call on the host returns when its work is done."""

    def wait_stream(self, other: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class _HostCuda:
    """The functions of ``torch.cuda`` that fairscale's FSDP uses."""

    _stream = NullStream()

    def is_available(self) -> bool:
        return False

    def current_stream(self) -> NullStream:
        return self._stream

    def stream(self, stream: object) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        return None


class _HostTorch:
    """The ``torch`` module for fairscale's FSDP in a process that computes on the host."""

    cuda = _HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _record_stream_of_devices(tensor: Tensor, stream: Any) -> None:
    if tensor.device.type != "cpu":
        _record_stream(tensor, stream)


class HostShim:
    """The shim, installed while it has users."""

    _users = 0

    @classmethod
    def install(cls) -> NullStream:
        """Install the shim, or count another user, and return its stream."""
        cls._users += 1
        if cls._users == 1:
            cls._set(_HostTorch(), base_collectives=False, record_stream=_record_stream_of_devices)
        return _HostCuda._stream

    @classmethod
    def remove(cls) -> None:
        """Remove the shim after its last user."""
        cls._users -= 1
        if cls._users == 0:
            cls._set(torch, base_collectives=_base_collectives, record_stream=_record_stream)

    @staticmethod
    def _set(torch_of_fsdp: Any, *, base_collectives: bool, record_stream: Any) -> None:
        fsdp.torch = torch_of_fsdp
        fsdp.enable_nccl_base_collectives = base_collectives
        bucketer.enable_nccl_base_collectives = base_collectives
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
