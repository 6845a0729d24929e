"""DeepSpeed 0.19.8's private parts that nnx needs: only here and in `_operators_compat` are they touched.

Each says what it is for; when DeepSpeed offers it publicly, the function goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base._torch_compat import default_group
from nnx_base.ranks import control_group, is_distributed
from nnx_core._torch_compat import end_of_backward, foreach_copy_, will_execute
from nnx_core.agree.announced_waits import announced
from nnx_core.agree.watch import Writes
from nnx_core.view.guard import Part, guard, local_mode, show_plain, show_whole, unguard

P = ParamSpec("P")
T = TypeVar("T")

_LEFT_ON_MODULES = (
    *("_original_parameters", "_external_params", "all_parameters"),
    *("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt"),
)
_worlds: list[dist.ProcessGroup] = []
"""The one that DeepSpeed knows."""


def join_world() -> None:
    """Make DeepSpeed use the process group that exists, and compile nothing.

    ``init_distributed`` compiles a shared-memory operator on CPU (ninja, g++, one to three minutes) unless it
    is marked as not compatible. DeepSpeed also keeps the groups of a world that was destroyed since.
    """
    import deepspeed.ops
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    world = default_group()
    if _worlds and _worlds[-1] is not world:
        groups._release_process_group_references(group=None)
        comm.cdb = None
    _worlds[:] = [world]
    comm.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)


def locally(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function see this rank's parts of what is cut, on any thread."""

    @wraps(function)
    def run_locally(*args: P.args, **kwargs: P.kwargs) -> T:
        with local_mode():
            return function(*args, **kwargs)

    return run_locally


_DOORS = {
    "parameter_offload": (
        *("pre_sub_module_forward_function", "post_sub_module_forward_function"),
        *("pre_sub_module_backward_function", "post_sub_module_backward_function"),
    ),
    "parameter_offload.param_coordinator": ("reset_step",),
    "": ("reduce_ready_partitions_and_remove_grads", "independent_gradient_partition_epilogue"),
}
"""What user code's forward and backward call of DeepSpeed's stage 3, by where the optimizer has it."""


def _enter_locally(engine: Any) -> None:
    """Stage 3: let DeepSpeed see parts where forward and backward come to it, as user code sees wholes.

    Local mode ends at each return: a backward also runs user code, as when it recomputes activations.
    """
    for owner, names in _DOORS.items():
        found = attrgetter(owner)(engine.optimizer) if owner else engine.optimizer
        for name in names:
            setattr(found, name, locally(getattr(found, name)))
    for name in ("_forward_prologue", "_forward_epilogue", "_backward_prologue", "_backward_epilogue"):
        setattr(engine, name, locally(getattr(engine, name)))


@contextmanager
def gradients_arrive_locally() -> Iterator[None]:
    """Stage 3: let the hooks that DeepSpeed registers on parameters meanwhile see parts."""
    from deepspeed.runtime.zero import stage3

    own = stage3.register_grad_hook
    stage3.register_grad_hook = lambda parameter, hook: own(parameter, locally(hook))
    try:
        yield
    finally:
        stage3.register_grad_hook = own


def is_tested_optimizer(optimizer: Optimizer) -> bool:
    """Return True if DeepSpeed has tested it with ZeRO."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    return bool(is_zero_supported_optimizer(optimizer))


def trainable_groups(zero: Any) -> list[tuple[list[nn.Parameter], Tensor]]:
    """For each flat partition of fp32 masters, the parameters that lie in it, in order."""
    if hasattr(zero, "fp16_groups"):  # stage 3
        return list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
    if hasattr(zero, "bf16_groups"):  # stage 1 with 16-bit weights
        return list(zip(zero.bf16_groups, zero.fp32_groups_flat_partition, strict=True))
    return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))


@locally
def weights_and_masters(zero: Any) -> list[tuple[Tensor, Tensor]]:
    """This rank's flat partitions twice: as the module has them, and the masters. They may be one."""
    masters = [flat for _, flat in trainable_groups(zero)]
    if hasattr(zero, "fp16_groups"):
        take_persistent(zero)
        weights = zero.fp16_partitioned_groups_flat
        return [(w, m) for w, m in zip(weights, masters, strict=True) if w is not None]  # None: on disk
    parts = getattr(zero, "bf16_partitioned_groups", None) or zero.parallel_partitioned_bit16_groups
    rank = dist.get_rank()
    return [(of_ranks[rank], m) for of_ranks, m in zip(parts, masters, strict=True)]


def share_masters(zero: Any) -> None:
    """Let float32 weights be their own masters, of which DeepSpeed makes a second copy.

    So nothing has to be compared or copied to notice what is written into the weights.
    """
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        return
    shared = False
    for weights, masters in weights_and_masters(zero):
        if weights.dtype == masters.dtype and weights.device == masters.device:
            masters.data = weights.data
            shared = True
    if shared and hasattr(zero, "_link_all_hp_params"):
        zero._link_all_hp_params()  # as stages 1 and 2 do when they have moved the masters themselves


def take_persistent(zero: Any) -> None:
    """Stage 3: let partitions follow the whole parameters that are kept beside them, if any are whole now.

    Backward drops and gathers them, so what was written into them is taken before.
    """
    whole = [p for p in getattr(zero, "persistent_parameters", ()) if p.numel() and p.shape == p.ds_shape]
    parts, slices = [], []
    for parameter in whole:
        start, part = own_range(parameter)
        parts.append(part)
        slices.append(parameter.detach().flatten()[start : start + part.numel()])
    if parts:
        foreach_copy_(parts, slices)


_PERSISTENT = -1
"""Stands for DeepSpeed itself among the modules that keep a parameter whole."""


def gather_persistent(zero: Any) -> None:
    """Stage 3: have the parameters whole that stay so, before ranks go different ways. Collective.

    DeepSpeed would gather them one by one, and drops them too until it knows a model's order of layers.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    persistent = getattr(zero, "persistent_parameters", ())
    for parameter in persistent:
        parameter.ds_active_sub_modules.add(_PERSISTENT)  # no module's, so that none releases it
    missing = [
        parameter
        for parameter in persistent
        if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE and parameter.ds_numel
    ]
    if missing:
        missing[0].all_gather(missing)


@locally
def own_range(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """Where this rank's part begins, and the part without padding; in stages 1 and 2 of a frozen one."""
    rank = dist.get_rank()
    if not hasattr(parameter, "ds_tensor"):
        flat = parameter.detach().view(-1)
        size = -(-flat.numel() // dist.get_world_size())
        return min(rank * size, flat.numel()), flat[rank * size : (rank + 1) * size]
    partition = local_partition(parameter)
    numel: int = parameter.ds_numel  # type: ignore[attr-defined]
    start = min(rank * partition.numel(), numel)
    return start, partition[: min(partition.numel(), numel - start)]


def fragment(parameter: nn.Parameter) -> tuple[int, int, int] | None:
    """Stages 1 and 2: where this rank's part begins, in the parameter and in the flat one; its length."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    within, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
    return within.start, flat.start, flat.numel


def position(zero: Any, parameter: nn.Parameter) -> tuple[int, int]:
    """Stage 3: where the parameter's partition begins in its flat partition, and its padded length."""
    _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
    return offset, length


def local_partition(parameter: nn.Parameter) -> Tensor:
    """Stage 3: this rank's padded part of a parameter that no optimizer holds."""
    return parameter.ds_tensor.data  # type: ignore[no-any-return, attr-defined]


@locally
@torch.no_grad()
def reload_weights(zero: Any) -> None:
    """Make the weights that the module computes with from the masters. Collective."""
    if not hasattr(zero, "fp16_groups"):
        zero.update_lp_params()
        return
    for index in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:
        for parameter in zero.persistent_parameters:
            parameter.ds_active_sub_modules.discard(_PERSISTENT)
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gradient_pieces(zero: Any) -> list[list[Tensor]]:
    """This rank's reduced gradients as the step will take them.

    For each flat partition, in the order of `trainable_groups`, pieces that follow each other in it; none
    where there is no gradient.
    """
    if hasattr(zero, "fp32_groups_gradient_flat_partition"):  # stage 1 with 16-bit weights
        return [[flat] for flat in zero.fp32_groups_gradient_flat_partition]
    flats = [flat for _, flat in trainable_groups(zero)]
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        return [[] if flat.grad is None else [flat.grad] for flat in flats]
    found: list[list[Tensor]] = []
    for index in range(len(flats)):
        pieces = zero.averaged_gradients.get(index)
        if pieces is None:
            pieces = []
        found.append([pieces] if isinstance(pieces, Tensor) else [p for p in pieces if p is not None])
    return found


def overwritten_gradients(zero: Any) -> list[Tensor]:
    """What a second backward before a step would overwrite; stage 3 and 16-bit stage 1 add to it."""
    adds = hasattr(zero, "fp16_groups") or hasattr(zero, "fp32_groups_gradient_flat_partition")
    return [] if adds else [piece for pieces in gradient_pieces(zero) for piece in pieces]


def count_backwards_anew(zero: Any) -> None:
    """Let stages 1 and 2 take the next backward for the first one, which overwrites."""
    if hasattr(zero, "setup_buckets"):
        zero.micro_step_id = -1


def forget_gradients(zero: Any) -> None:
    """Drop gradients that were reduced and will not be stepped with."""
    count_backwards_anew(zero)
    for name in ("averaged_gradients", "all_grad_tensors"):
        reduced = getattr(zero, name, {})
        for index in reduced:
            reduced[index] = None


def remove_from_module(engine: Any, module: nn.Module, before: Mapping[nn.Module, set[str]]) -> None:
    """Take off what ``engine.destroy`` leaves on the user's modules, and in DeepSpeed's own globals.

    Args:
        engine: The one that was destroyed.
        module: The root.
        before: The attributes that each module had before the engine was made.
    """
    from deepspeed.runtime.zero import parameter_offload

    put_back_globals()
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if hook is not None:
            hook.remove()
    for submodule in module.modules():
        if isinstance(submodule._parameters, parameter_offload.ZeROOrderedDict):
            # By items: an error in forward leaves it gathering whatever is looked up.
            submodule._parameters = dict(submodule._parameters.items())
        for name in set(vars(submodule)) - before.get(submodule, set(vars(submodule))):
            if name in _LEFT_ON_MODULES or name.startswith("ds_"):
                del submodule.__dict__[name]


def put_back_globals() -> None:
    """Put back what stage 3 has changed for the whole process, also where its engine cannot be removed."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk
    parameter_offload.FWD_MODULE_STACK.clear()


@contextmanager
def weights_agree_already() -> Iterator[None]:
    """Keep DeepSpeed from broadcasting weights as bytes, which fails for 0-d ones; nnx has done it."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init

    def convert(self: Any, parameter: Any) -> None:
        self._convert_to_deepspeed_param(parameter)
        parameter.partition()

    own = DeepSpeedEngine._broadcast_model, Init._zero_init_param
    DeepSpeedEngine._broadcast_model, Init._zero_init_param = (lambda self: None), convert
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model, Init._zero_init_param = own


@contextmanager
def parameters_stay(module: nn.Module) -> Iterator[None]:
    """Keep DeepSpeed's engine from moving a whole module to the device.

    Stage 3 moves each parameter by itself when it cuts it.
    """
    module.to = lambda *_: module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.to


def number_alike() -> None:
    """Let stage 3 number parameters and modules from one value on all ranks; it compares these numbers.

    It counts on for as long as a process lives.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    if is_distributed():
        modules: list[int] = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0]
        following = torch.tensor([Init.param_id, modules[0]])
        dist.all_reduce(following, op=dist.ReduceOp.MAX, group=control_group())
        Init.param_id, modules[0] = following.tolist()


def show_partitions(engine: Any, part: Callable[[nn.Parameter], Part]) -> None:
    """Stage 3: from now on a parameter that is not gathered is this rank's part, 1-d, instead of nothing.

    Args:
        engine: DeepSpeed's, which sees the part.
        part: Makes what core's guard asks for the whole.
    """
    from deepspeed.runtime.zero import partition_parameters

    _enter_locally(engine)

    if partition_parameters.free_param is not _free_and_show:
        _frees.append(partition_parameters.free_param)
        partition_parameters.free_param = _free_and_show
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            is_whole = parameter.shape == parameter.ds_shape
            guard(parameter, part(parameter))
            if is_whole:
                show_plain(parameter)
            else:
                _show(parameter)


def hide_partitions(parameter: nn.Parameter) -> None:
    """Undo `show_partitions`."""
    if "_part" in vars(parameter):
        show_whole(parameter)  # which `unguard` asks for
        unguard(parameter)


_frees: list[Any] = []
_FOR_USER = -2
"""Stands for user code among the modules that keep a parameter whole."""


@locally
def _free_and_show(parameter: nn.Parameter) -> None:
    touched, seen = vars(parameter).pop("_nnx_touched", False), vars(parameter).pop("_nnx_gathered", None)
    if seen is not None and seen.writes.are_compared() and parameter.shape == parameter.ds_shape:  # type: ignore[attr-defined]
        seen.writes.add(parameter, parameter)
    if touched or (seen is not None and _may_be_written(parameter, seen)):
        _take_whole(parameter)
    _frees[0](parameter)
    if "_part" in vars(parameter):
        _show(parameter)


class _Gathered(NamedTuple):
    """What is known of a parameter since it was gathered.

    Attributes:
        version: The parameter's version then.
        forwards: The number of forwards of layers until then.
        forwards_now: Counts the forwards until now.
        writes: Sums up what user code writes.
    """

    version: int
    forwards: int
    forwards_now: Callable[[], int]
    writes: Writes


def _may_be_written(parameter: nn.Parameter, seen: _Gathered) -> bool:
    """Return True if user code may have written into a gathered parameter, as in a layer's forward.

    Writes through ``.data`` leave no trace. So after a forward this rank's part is taken from what was
    gathered without looking, which costs less; not over devices.

    Args:
        parameter: The parameter, before it is cut.
        seen: What was noted when it was gathered.
    """
    if parameter.shape != parameter.ds_shape:  # type: ignore[attr-defined]
        return False
    if parameter._version != seen.version:
        return True
    return seen.forwards_now() != seen.forwards and parameter.device == local_partition(parameter).device


@locally
def _show(parameter: nn.Parameter) -> None:
    partition = local_partition(parameter)
    if partition.device == parameter.device and partition.numel():  # neither offloaded nor on disk
        parameter.data = own_range(parameter)[1]
    show_whole(parameter)


def _take_whole(parameter: nn.Parameter) -> None:
    """Let this rank's part follow the whole."""
    held = vars(parameter)
    if "_nnx_range" not in held:  # at each release of a layer there is no time to look again
        start, part = own_range(parameter)
        held["_nnx_range"] = start, part.numel()
    start, length = held["_nnx_range"]
    whole = parameter.detach().reshape(-1).narrow(0, start, length)
    local_partition(parameter).narrow(0, 0, length).copy_(whole)


def is_copied(parameter: nn.Parameter) -> bool:
    """Return True if each rank has a whole of its own between steps, which the step makes equal again."""
    if not hasattr(parameter, "ds_tensor"):
        return True
    return bool(getattr(parameter, "ds_persist", False)) and not is_cut(parameter)


def is_cut(parameter: nn.Parameter) -> bool:
    """Stage 3: whether there is something to gather."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return bool(getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE)


@locally
@torch.no_grad()
def gather_for_user(parameters: Sequence[nn.Parameter]) -> None:
    """Stage 3: make cut parameters whole until `release_touched`. Collective."""
    cut = [parameter for parameter in parameters if is_cut(parameter) and parameter.ds_numel]  # type: ignore[attr-defined]
    for parameter in cut:
        parameter._nnx_touched = True  # type: ignore[attr-defined]
    if cut:
        cut[0].all_gather(cut)  # type: ignore[attr-defined]
    for parameter in cut:
        parameter.ds_active_sub_modules.add(_FOR_USER)  # type: ignore[attr-defined]
    see_empty_parameters([p for p in parameters if is_cut(p)])
    for parameter in parameters:
        show_plain(parameter)


@locally
@torch.no_grad()
def release_touched(parameters: Iterable[nn.Parameter]) -> None:
    """Stage 3: cut what user code had whole; what it wrote counts."""
    for parameter in parameters:
        if "_nnx_touched" not in vars(parameter):
            continue
        parameter.ds_active_sub_modules.discard(_FOR_USER)  # type: ignore[attr-defined]
        if parameter.ds_active_sub_modules - {_PERSISTENT}:  # type: ignore[attr-defined]
            continue
        if getattr(parameter, "ds_persist", False):
            del parameter._nnx_touched  # type: ignore[attr-defined]
            _take_whole(parameter)
        else:
            parameter.partition()  # type: ignore[attr-defined]


@locally
@torch.no_grad()
def take_assigned(parameters: Mapping[nn.Parameter, Tensor]) -> list[nn.Parameter]:
    """Notice parameters whose ``data`` was replaced, and bring the new values to where DeepSpeed looks.

    Args:
        parameters: With what each had as its data, for stages 1 and 2; stage 3 knows it.

    Returns:
        Those whose new data is of another size, which cannot be brought there.
    """
    misfits = []
    for parameter, home in parameters.items():
        is_cut = hasattr(parameter, "ds_tensor")
        if parameter.data_ptr() == (local_partition(parameter) if is_cut else home).data_ptr():
            continue
        if is_cut and parameter.shape == getattr(parameter, "ds_shape", None):
            continue  # `take_persistent` looks at these
        start, place = own_range(parameter) if is_cut else (0, home)
        present = parameter.data
        if present.data_ptr() == place.data_ptr() or not place.numel() or not present.numel():
            continue
        parameter.data = place
        if is_cut and present.numel() == getattr(parameter, "ds_numel", None):
            present = present.flatten()[start : start + place.numel()]
        if present.numel() == place.numel():
            parameter.copy_(present.view_as(place))
        else:
            misfits.append(parameter)
    return misfits


@locally
def see_empty_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Stage 3: make parameters without elements available, as there is nothing that it would gather."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in parameters:
        parameter.data = parameter.data.new_empty(parameter.ds_shape)  # type: ignore[attr-defined]
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]


def reduces_whole_gradients(zero: Any) -> bool:
    """Return True if every rank reduces all of its gradient sums at once: stage 1 with 16-bit weights."""
    return not hasattr(zero, "_coalesce_grad_reduction")


@locally
def ends_of_backward(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Where a backward comes to each parameter. As long as these are held, they stay the same."""
    with torch.enable_grad():
        return [end_of_backward(parameter) for parameter in parameters]


def will_be_used(nodes: Sequence[Any]) -> list[bool]:
    """Which parameters the backward that runs now comes to; called by one of its hooks."""
    return [will_execute(node) for node in nodes]


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return True if a gradient waits on this rank to be reduced."""
    return parameter.grad is not None or getattr(parameter, "grad_accum", None) is not None


def have_sums(zero: Any, parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Stage 1 with 16-bit weights: which parameters have had a gradient on this rank since the last step."""
    had: dict[nn.Parameter, bool] = {}
    for group, flags in zip(zero.bf16_groups, zero.fp32_groups_has_gradients, strict=True):
        had.update(zip(group, flags, strict=True))
    return [had[parameter] for parameter in parameters]


@locally
@torch.no_grad()
def zero_gradient(zero: Any, parameter: nn.Parameter) -> None:
    """Give a parameter a gradient of zero to reduce, where DeepSpeed looks for it."""
    if getattr(zero, "use_grad_accum_attribute", False):
        dtype = zero.gradient_accumulation_dtype
        parameter.grad_accum = torch.zeros_like(parameter, dtype=dtype)  # type: ignore[attr-defined]
        return
    present = parameter.data
    shape = getattr(parameter, "ds_shape", present.shape)
    parameter.data = present.new_empty(()).expand(shape)
    parameter.grad = torch.zeros(shape, dtype=present.dtype, device=present.device)
    parameter.data = present


def hold_back_reduction(engine: Any) -> Callable[[], None]:
    """Let this backward leave its gradients where they are; returns what reduces them, in one order.

    Upstream: ``DeepSpeedEngine.coalesce_grad_reduction``, but for a backward that runs already.
    """
    zero = engine.optimizer
    zero._coalesce_grad_reduction = engine.inside_no_sync_ctxt = True

    @locally
    def reduce() -> None:
        reduce_at_once(engine)
        zero.set_gradient_accumulation_boundary(engine.is_gradient_accumulation_boundary())
        if hasattr(zero, "fp16_groups"):
            engine._flush_coalesced_reduction_zero3(zero)
        else:
            engine._flush_coalesced_reduction_zero12(zero)

    return reduce


def reduce_at_once(engine: Any) -> None:
    """Undo `hold_back_reduction`."""
    engine.optimizer._coalesce_grad_reduction = engine.inside_no_sync_ctxt = False


def watch_gradients(
    zero: Any,
    parameters: Sequence[nn.Parameter],
    take: Callable[[int], None],
    check: Callable[[], None],
) -> None:
    """Watch the gradients that DeepSpeed puts into a bucket.

    Args:
        zero: DeepSpeed's optimizer.
        parameters: The trained ones.
        take: Called with the number of the parameter before; -1 is one without elements.
        check: Called for each gradient before DeepSpeed looks whether it is held back.
    """
    name = "reduce_ready_partitions_and_remove_grads"
    own = getattr(zero, name)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    always = getattr(zero, "partition_gradients", True)

    def note(parameter: nn.Parameter, *args: Any) -> Any:
        check()
        if (always or zero.is_gradient_accumulation_boundary()) and not zero._coalesce_grad_reduction:
            take(numbers.get(id(parameter), -1))
        return own(parameter, *args)

    setattr(zero, name, note)
    if hasattr(zero, "process_gradients"):  # stages 1 and 2 look here
        process = zero.process_gradients

        def check_and_process(*args: Any) -> None:
            check()
            process(*args)

        zero.process_gradients = check_and_process


def drop_stale_gradients(zero: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Stage 3: zero what an earlier step left for parameters that no rank uses in this one."""
    if not hasattr(zero, "fp16_groups") or zero.micro_step_id:
        return
    partitions = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    for parameter in parameters:
        partitions[parameter.ds_id].zero_()  # type: ignore[attr-defined]


def before_each_gather(
    names: Mapping[nn.Parameter, str],
    announce: Callable[[str, bool], None],
    forwards: Callable[[], int],
    writes: Writes,
) -> None:
    """Stage 3: announce each gather: by the names of what it gathers, and whether it is for user code.

    Args:
        names: The names of all parameters.
        announce: Called before each gather.
        forwards: Counts the forwards of layers, by which a release knows whether there was one.
        writes: Sums up what each release finds.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    def name_of(parameters: Sequence[nn.Parameter]) -> str:
        missing = [p for p in parameters if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
        return " and ".join(sorted(names[parameter] for parameter in missing))

    def announcing(gather: Any, own: Sequence[nn.Parameter]) -> Any:
        @locally
        def announce_and_gather(*args: Any, **kwargs: Any) -> Any:
            listed = args[0] if args else kwargs.get("param_list", kwargs.get("params"))
            if listed is None and not any("_nnx_touched" in vars(parameter) for parameter in own):
                return gather_for_user(own)  # read off a layer in the middle of another one's forward
            listed = own if listed is None else list(listed)
            name = name_of(listed)
            if name:
                announce(name, any("_nnx_touched" in vars(parameter) for parameter in listed))
            missing = [parameter for parameter in listed if is_cut(parameter)]
            for parameter in listed:
                show_plain(parameter)
            with announced(doing := f"waits for the gather of {name or 'a layer'}"):
                result = gather(*args, **kwargs)
            if hasattr(result, "wait"):  # launched only: DeepSpeed waits for it where the layer is called
                result.wait = announced(doing)(result.wait)
            for parameter in missing:
                if not getattr(parameter, "ds_persist", False):  # those are for `take_persistent`
                    seen = _Gathered(parameter._version, forwards(), forwards, writes)
                    vars(parameter)["_nnx_gathered"] = seen
            return result

        return announce_and_gather

    def kept(partition: Any, own: nn.Parameter) -> Any:
        @locally
        def partition_others(param_list: Sequence[nn.Parameter] | None = None, **kwargs: Any) -> None:
            listed = (own,) if param_list is None else param_list
            others = [p for p in listed if _FOR_USER not in p.ds_active_sub_modules]  # type: ignore[attr-defined]
            if others:
                partition(param_list=others, **kwargs)

        return partition_others

    for parameter in names:
        if hasattr(parameter, "ds_id"):
            parameter.partition = kept(parameter.partition, parameter)  # type: ignore[attr-defined]
            for gather in ("all_gather", "all_gather_coalesced"):
                setattr(parameter, gather, announcing(getattr(parameter, gather), (parameter,)))


def leave_loss_alone(zero: Any) -> None:
    """Let backward begin at the loss itself and not at one times the loss: nothing scales it here."""
    zero.scale_if_loss = lambda loss: loss


def skip_what_is_no_parameter() -> None:
    """Stage 3: let modules hold tensors where they held parameters, as ``functional_call`` gives them.

    Changes DeepSpeed's modules, once in a process.
    """
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    own = partitioned_param_coordinator.iter_params
    if hasattr(own, "_nnx_prepared"):
        return

    def laid_out(module: nn.Module, recurse: bool = False) -> Iterator[Any]:
        return (parameter for parameter in own(module, recurse) if hasattr(parameter, "ds_status"))

    laid_out._nnx_prepared = True  # type: ignore[attr-defined]
    partitioned_param_coordinator.iter_params = parameter_offload.iter_params = laid_out


def watch_backward(zero: Any, check: Callable[[], None]) -> None:
    """Stage 3: call `check` where a backward comes to a layer whose weights are cut."""
    offload = zero.parameter_offload
    own = offload.pre_sub_module_backward_function

    def before_backward(submodule: nn.Module) -> None:
        if any(is_cut(p) for _, p in submodule.named_parameters(recurse=False)):
            check()
        own(submodule)

    offload.pre_sub_module_backward_function = before_backward
