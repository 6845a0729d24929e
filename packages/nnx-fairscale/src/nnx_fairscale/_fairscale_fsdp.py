"""One sharded unit: fairscale's FSDP (0.4.13) around a part of the model that stays where it is.

fairscale's wrapper wants to replace a module in the tree, its parameters by one flat parameter, and their
names by its own. Here it stands beside the tree instead. The user's parameter objects stay registered under
their names; between steps their data are views on this rank's shard of the flat parameter, and so are their
gradients, so that any element-wise optimizer over them updates the shard. During forward and backward the
modules hold, in the parameters' places, views on the gathered flat parameter that fairscale computes with.

Every private name of fairscale's FSDP that nnx uses is in this file, and so is `HostShim`, without which that
FSDP does not run on CPU.
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
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.agree.watch import Writes, checksum
from nnx_core.errors import UnsupportedError

_MARK = "_is_sharded"
_OURS = frozenset({_MARK, "_part"})
_LEFT_BEHIND = ("_is_sharded", "_orig_size", "_fp32_shard", "_fp16_shard", "_full_param_padded", "_cpu_grad")


def is_taken(parameter: nn.Parameter) -> bool:
    """Return True if a unit has the parameter already, or it was left out."""
    return hasattr(parameter, _MARK)


def leave_out(parameter: nn.Parameter) -> None:
    """Let no unit take the parameter: it stays whole on every rank."""
    setattr(parameter, _MARK, False)


@dataclass(slots=True, eq=False)
class Piece:
    """A parameter of the user's, and the range of it that this rank holds.

    Attributes:
        parameter: The user's own object; between steps its data are this rank's elements.
        shape: Shape of the whole parameter.
        start: Flat index, in the whole parameter, of the first element held here.
        length: Number of elements held here; tensors of the parameter may have padding behind them.
        begin: Flat index, in the tensor that is communicated, of the whole parameter's first element.
        places: The modules that hold the parameter, each with the name it has there.
        shown: The tensor that is in its places while it is gathered.
    """

    parameter: nn.Parameter
    shape: torch.Size
    start: int
    length: int
    begin: int = 0
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    shown: Tensor | None = None

    def is_in_place(self) -> bool:
        """Return True if the modules that held the parameter still do, it or what is shown of it."""
        there = [owner._parameters.get(name) for owner, name in self.places]
        return all(held is not None and (held is self.parameter or held is self.shown) for held in there)

    def shard(self, tensor: Tensor) -> Shard:
        """Where a tensor with this rank's elements, of the parameter or of its optimizer state, lies."""
        return shard_of_range(tensor.detach()[: self.length], shape=self.shape, start=self.start)


class _View(nn.Parameter):
    """A parameter while its unit is gathered: a view on the flat one, whose changes reach the shard.

    It is no guard, for the reason that `nnx_fsdp._torch_compat.GatheredWeight` gives.
    """

    unit: Unit

    @property
    def data(self) -> Tensor:
        """The same memory without a history; the unit cannot see what is done to it, and looks."""
        self.unit.may_be_written = True
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.data.copy_(value)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call it only where there is a gradient: a node with many outputs has None for what is not used."""

        def called(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else hook(gradient)

        return super().register_hook(called)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of its own."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


class _Unflatten(torch.autograd.Function):
    """The parameters in a flat one, as tensors of its memory; in-place changes forbid views of one split."""

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
        parts = [
            torch.zeros(shape.numel(), **ctx.options) if gradient is None else gradient.reshape(-1)
            for gradient, shape in zip(gradients, ctx.shapes, strict=True)
        ]
        return torch.cat(parts), None


@cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class _Carrier(nn.Module):
    """What the wrapper wraps: it knows the unit's modules and its nested units, and runs what it is given."""

    def __init__(self, module: nn.Module, nested: Iterable[nn.Module]) -> None:
        super().__init__()
        self.unit = module
        self.nested = nn.ModuleList(nested)

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class Unit(FullyShardedDataParallel):  # type: ignore[misc] # fairscale has no types
    """A module whose parameters are gathered and reduced together.

    Args:
        module: The part of the model; what nested units hold of it is theirs.
        nested: Units inside of it.
        stream: On CPU, what stands in for the CUDA streams.
        **settings: Arguments of fairscale's FSDP.
    """

    root: Unit | None

    def __init__(
        self, module: nn.Module, nested: Sequence[Unit], *, stream: NullStream | None, **settings: Any
    ) -> None:
        places = _places(module)
        trainable = {parameter: parameter.requires_grad for parameter in places}
        for parameter in places:  # one flat parameter holds frozen and trainable ones
            parameter.requires_grad_(True)
            parameter.grad = None
        order = {owner: list(owner._parameters) for where in places.values() for owner, _ in where}
        super().__init__(_Carrier(module, nested), **settings)
        self.pieces: list[Piece] = []
        self._stream = stream
        self._views: list[Tensor] = []
        self._used: set[int] = set()
        self._last_used = self._comes_from = 0
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
        """Say which unit is that of the whole model.

        It is no submodule of this one: the root would be its own child, and who walks down children, such as
        `torch.utils.module_tracker` for a summary of the model, would find no end.
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
        """What this rank keeps of every parameter of the unit, in memory of its own. Collective.

        Args:
            at_end: `Backend.at_end`, of the unit's flat parameter.
        """
        found = {}
        for flat in self.params:
            local = flat._fp32_shard
            shape = (self.world_size * local.numel(),)
            whole = at_end(partial(self._gather, flat), shape=shape, dtype=local.dtype)
            for piece in self.pieces:
                elements = whole[piece.begin : piece.begin + piece.shape.numel()]
                own = elements.view(piece.shape)
                found[piece.parameter] = own.clone() if whole.is_contiguous() else own  # takes no memory
        return found

    def _gather(self, flat: Tensor) -> Tensor:
        shard: Tensor = flat._fp32_shard.detach().flatten()  # type: ignore[attr-defined]
        if self.world_size == 1:
            return shard
        shard = shard.to(self.compute_device)
        whole = shard.new_empty(self.world_size * shard.numel())
        dist.all_gather_into_tensor(whole, shard, group=self.process_group)
        return whole

    def remove(self) -> None:
        """Take everything off the user's parameters and modules but their data, which are not whole."""
        self._hide()
        self._views.clear()
        for parameter in (*self.params, *(piece.parameter for piece in self.pieces)):
            parameter.grad = None
            _, hook = parameter.__dict__.pop("_shard_bwd_hook", (None, None))
            if hook is not None:  # the graph's node and the parameter would keep each other alive
                hook.remove()
            for name in _LEFT_BEHIND:
                parameter.__dict__.pop(name, None)
        self._reducer = None
        ReduceScatterBucketer._get_shard_size.cache_clear()  # it keeps every reducer that ever asked

    def _make_views(self) -> None:
        """What fairscale does in each forward: give the modules views on the gathered flat parameter."""
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
        """What takes a parameter's place in a forward, with the hooks and attributes of the parameter."""
        parameter = piece.parameter
        if not parameter.requires_grad:
            view = view.detach()
        view.__class__ = _View
        view.unit = self  # type: ignore[attr-defined]
        vars(view).update({name: value for name, value in vars(parameter).items() if name not in _OURS})
        if view.requires_grad and torch.is_grad_enabled():
            view.register_hook(partial(self._note_use, index))  # type: ignore[no-untyped-call]
            for hook in (parameter._backward_hooks or {}).values():
                view.register_hook(hook)  # type: ignore[no-untyped-call]
        return view

    def _note_use(self, index: int, gradient: Tensor) -> None:
        self._used.add(index)
        self._last_used = index

    def _follow_places(self) -> None:
        """Find parameters that user code has given other names, as pruning does."""
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
        """Put views in the parameters' places; what ``functional_call`` has put there stays."""
        self.is_shown = True
        for view, piece in zip(self._views, self.pieces, strict=True):
            before, piece.shown = piece.shown, view
            for owner, name in piece.places:
                there = owner._parameters.get(name)
                if there is piece.parameter or (there is not None and there is before):
                    owner._parameters[name] = view  # type: ignore[assignment]
                    _tell_recurrent(owner, name, view)

    def _hide(self) -> None:
        self.is_shown = False
        for piece in self.pieces:
            view, piece.shown = piece.shown, None
            for owner, name in piece.places:
                owner.__dict__.pop(name, None)  # fairscale's own views, before there were any of ours
                if view is not None and owner._parameters.get(name) is view:
                    owner._parameters[name] = piece.parameter
                    _tell_recurrent(owner, name, piece.parameter)

    @torch.no_grad()
    def _take_written(self) -> None:
        """Write into the shard what a forward has written into the gathered parameters."""
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
        """Elements of the flat parameter that each rank has."""
        return int(self.params[0]._fp32_shard.numel())

    def view_of(self, piece: Piece) -> Tensor | None:
        """What the last forward computed with."""
        views = zip(self._views, self.pieces, strict=False)
        return next((view for view, other in views if other is piece), None)

    def unreduced_gradient(self, piece: Piece) -> Tensor | None:
        """This rank's own gradient of a parameter while gradients accumulate."""
        flat = self.params[0]
        if flat.grad is None or self.world_size == 1 or flat.grad.shape != flat._orig_size:
            return None
        part: Tensor = flat.grad[piece.begin : piece.begin + piece.shape.numel()]
        return part.view(piece.shape)

    def _arrive(self, what: str, cause: str = "") -> None:
        if self.order is not None and self.world_size > 1:
            self.order.arrive(f"{what} of {self.label}", cause=cause)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Run a call with the unit's parameters gathered."""
        with local_mode():
            for flat in self.params:
                flat.requires_grad_(any(piece.parameter.requires_grad for piece in self.pieces))

        def run() -> Any:
            result = call()
            self._take_written()
            return result

        try:
            return super().forward(run)
        finally:
            self._hide()
            if not torch.is_grad_enabled():
                self._views.clear()

    @property
    def is_busy(self) -> bool:
        """True if a forward or a backward of the unit is going on."""
        return bool(self.training_state != TrainingState.IDLE)

    def become_root(self) -> None:
        """Let no nested unit take itself for the root when it is called first."""
        self._lazy_init()

    def free(self) -> None:
        """Drop what is gathered: it may be of weights that have changed since."""
        if not self.is_busy:
            self._free_full_params()
            self._use_fp32_param_shard()

    def _rebuild_full_params(self, force_full_precision: bool = False) -> Any:
        self._refuse_inner_gradients()
        self._notice_what_was_freed()
        self._comes_from = current_backward()
        if self.params and not self.has_full_params:
            self._arrive("the gather")
        gathered = super()._rebuild_full_params(force_full_precision)
        if self._views:  # backward begins: what is recomputed in it reads the attributes again
            self._show()
        return gathered

    def _use_full_params(self) -> None:
        self._refuse_inner_gradients()
        self._notice_what_was_freed()
        self._comes_from = current_backward()
        if not self.has_full_params:
            self._rebuild_full_params()
        super()._use_full_params()
        if self._views:
            self._show()

    def _refuse_inner_gradients(self) -> None:
        """What a gradient through this unit would gather, the backward of the loss would find freed."""
        if self.root is None or self.training_state == TrainingState.FORWARD:
            return
        if self.root.training_state == TrainingState.FORWARD or not self.root.in_backward:
            raise UnsupportedError(
                f"a gradient through {self.label}, which is a unit, is computed other than by the backward "
                "of the strategy.",
                remedy="For `torch.autograd.grad` in `training_step`, optimize automatically and leave the "
                "model without units (a larger min_num_params); in place of `loss.backward()`, call "
                "`self.manual_backward(loss)`; or use strategy 'fairscale_sharded'.",
            )

    def _notice_what_was_freed(self) -> None:
        """Another backward since may have freed some of what was gathered, or cast, for this one."""
        used = [p._full_param_padded if p._is_sharded else p._fp16_shard for p in self.params if p.numel()]
        if any(whole is not None and not whole.untyped_storage().nbytes() for whole in used):
            self.has_full_params = False

    def _refuse_inner_backward(self) -> None:
        """A unit is reduced and freed once; a backward inside has the gradients of some layers only."""
        roots = () if self.root is None else (self.root._comes_from,)
        if current_backward() in {self._comes_from, *roots}:
            return
        owner, name = self.pieces[self._last_used].places[0]
        raise UnsupportedError(
            f"the gradient of '{name}' of a {type(owner).__name__} comes from a backward inside the "
            f"backward, and fairscale reduces all gradients of {self.label} at once.",
            remedy="Recompute activations with `use_reentrant=False`; make the layer that is recomputed a "
            "unit, by `wrap()` or auto_wrap_policy; or use strategy 'fairscale_sharded' or 'fsdp_auto'.",
        )

    def _post_backward_hook(self, param: Tensor, *unused: Any) -> None:
        self._refuse_inner_backward()
        if param.grad is not None and self._require_backward_grad_sync:
            self._arrive("the reduction")
        super()._post_backward_hook(param, *unused)

    def _prep_grads_for_backward(self) -> None:
        """When a backward begins, gradients that were dropped since the last one are dropped here too."""
        with local_mode():
            for flat in self.params:
                self._take_gradients(flat)
        super()._prep_grads_for_backward()

    @torch.no_grad()
    def _take_gradients(self, flat: Tensor) -> None:
        has = {index for index, piece in enumerate(self.pieces) if piece.parameter.grad is not None}
        if flat.grad is None:
            self._used = has  # hooks of this backward's views have yet to fire
            self._take_given(flat)
        elif not has:
            self._used.clear()
            flat.grad = None
            flat.__dict__.pop("_saved_grad_shard", None)
        else:
            self._used &= has
            self._take_changed(flat)

    def _take_changed(self, flat: Any) -> None:
        """Let a backward add to what user code has made of gradients."""
        for index, (piece, mine) in enumerate(zip(self.pieces, self._gradients(flat), strict=True)):
            given = piece.parameter.grad
            if given is None:
                mine.zero_()
                if flat.grad.shape == flat._orig_size:
                    flat.grad[piece.begin : piece.begin + piece.shape.numel()].zero_()
            elif given.data_ptr() != mine.data_ptr():
                mine.copy_(given)
                self._used.add(index)

    def _take_given(self, flat: Any) -> None:
        """Let a backward add to gradients that user code has made."""
        given = [piece for piece in self.pieces if piece.parameter.grad is not None and piece.length]
        if given and flat._is_sharded:
            flat._saved_grad_shard = torch.zeros_like(flat._fp32_shard)
            for piece in given:
                at = piece.begin + piece.start - self.rank * flat._fp32_shard.numel()
                flat._saved_grad_shard[at : at + piece.length].copy_(piece.parameter.grad)

    @torch.no_grad()
    def _give_gradients(self) -> None:
        """Make the user's gradients views on the flat one: its shard, or while accumulating, the whole.

        Under fairscale's mixed precision what it has not reduced is of another dtype, and they are copies.
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
        is_whole = gradient.shape == flat._orig_size  # type: ignore[attr-defined]
        low = 0 if is_whole else self.rank * gradient.numel()
        first = [piece.begin + piece.start - low if piece.length else 0 for piece in self.pieces]
        return [gradient[at : at + piece.length] for at, piece in zip(first, self.pieces, strict=True)]

    def _wait_for_post_backward(self) -> None:
        """When a backward ends, hand its gradients out."""
        units = [unit for unit in get_fsdp_instances(self) if unit._pre_backward_hook_has_run]
        if self._require_backward_grad_sync:
            has_any = any(unit.training_state == TrainingState.BACKWARD_POST for unit in units)
            self._arrive("the end of the gradients", "" if has_any else ", as its loss depends on no weight")
        super()._wait_for_post_backward()
        with local_mode():
            for unit in units:
                unit._hide()
                unit._views.clear()
                unit._give_gradients()
            if self._require_backward_grad_sync:
                self._drop_unused(get_fsdp_instances(self))

    def _drop_unused(self, units: Sequence[Unit]) -> None:
        """A parameter that no rank has used has zeros in the flat gradient, and none by itself."""
        pieces = [(unit, i) for unit in units for i in range(len(unit.pieces))]
        used = used_anywhere([i in unit._used for unit, i in pieces])
        for (unit, i), is_used in zip(pieces, used, strict=True):
            if not is_used:
                unit.pieces[i].parameter.grad = None

    def _post_reduction_hook(self, param: Tensor, reduced_grad: Tensor) -> None:
        """Take a gradient out of the bucket that it was reduced in, so that the bucket can go."""
        if reduced_grad.untyped_storage().nbytes() > reduced_grad.nbytes:
            reduced_grad = reduced_grad.clone()
        super()._post_reduction_hook(param, reduced_grad)

    def _setup_streams(self) -> None:
        super()._setup_streams()
        if self._is_root and self._stream is not None:
            self._streams.update(dict.fromkeys(STREAMS, self._stream))  # nested units share the dict

    def _cast_buffers(self, *args: Any, **kwargs: Any) -> None:
        """Leave buffers in their dtype: what is cast here would be saved so, and cost its precision."""

    def assert_state(self, state: Any) -> None:
        """A unit that no gradient has reached is in an earlier state than fairscale expects; that is fine."""
        states = list(state) if isinstance(state, (list, tuple)) else [state]
        if TrainingState.BACKWARD_POST in states or TrainingState.BACKWARD_PRE in states:
            states += [TrainingState.BACKWARD_PRE, TrainingState.IDLE]
        super().assert_state(states)


def _places(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """For every parameter that no unit has taken, the modules that hold it and its names there."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not is_taken(parameter):
                found[parameter].append((owner, name))
    return found


def _tell_recurrent(owner: nn.Module, name: str, value: Tensor) -> None:
    """Torch's recurrent layers keep a list of their weights beside the attributes."""
    names = getattr(owner, "_flat_weights_names", ())
    if name in names:
        weights: Any = owner._flat_weights
        weights[names.index(name)] = value


# fairscale's FSDP calls CUDA streams without asking whether there are any, and collectives that gloo refuses.
# While a backend is set up on CPU, `HostShim` puts in place:
#
# * for fairscale's FSDP module alone, a ``torch`` whose ``cuda`` has one stream that does nothing;
# * ``enable_nccl_base_collectives = False`` in the two modules that read it, as the environment variable
#   ``ENABLE_NCCL_BASE_COLLECTIVES=0`` would do before the import;
# * a ``torch.Tensor.record_stream`` that does nothing for CPU tensors, which no stream can hold on to.
#
# Its removal takes all of it back. On CUDA nothing is touched.


STREAMS = ("fp32_to_fp16", "all_gather", "post_backward")
"""The streams that fairscale's FSDP looks up by name."""

_record_stream: Any = Tensor.record_stream
_base_collectives: bool = fsdp.enable_nccl_base_collectives


class NullStream:
    """Work on the host is done when a call returns, so there is nothing to wait for."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _HostCuda:
    """The part of ``torch.cuda`` that fairscale's FSDP uses."""

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
    """torch as fairscale's FSDP sees it in a process that computes on the host."""

    cuda = _HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _record_stream_of_devices(tensor: Tensor, stream: Any) -> None:
    if tensor.device.type != "cpu":
        _record_stream(tensor, stream)


class HostShim:
    """The shim, in place for as long as anyone needs it."""

    _users = 0

    @classmethod
    def install(cls) -> NullStream:
        """Put it in place, or count one more who needs it; returns the one stream there is."""
        cls._users += 1
        if cls._users == 1:
            cls._set(_HostTorch(), base_collectives=False, record_stream=_record_stream_of_devices)
        return _HostCuda._stream

    @classmethod
    def remove(cls) -> None:
        """Take it back when nobody needs it any more."""
        cls._users -= 1
        if cls._users == 0:
            cls._set(torch, base_collectives=_base_collectives, record_stream=_record_stream)

    @staticmethod
    def _set(torch_of_fsdp: Any, *, base_collectives: bool, record_stream: Any) -> None:
        fsdp.torch = torch_of_fsdp
        fsdp.enable_nccl_base_collectives = base_collectives
        bucketer.enable_nccl_base_collectives = base_collectives
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
