"""Touch DeepSpeed 0.19.8's private names: only this module and `_operators_compat` do.

Each function names its purpose. Remove a function when DeepSpeed offers the same publicly.
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
from nnx_core.agree.divergence import Writes
from nnx_core.view.guard import Part, guard, local_mode, show_plain, show_unsharded, unguard

P = ParamSpec("P")
T = TypeVar("T")

_LEFT_ON_MODULES = (
    *("_original_parameters", "_external_params", "all_parameters"),
    *("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt"),
)
_worlds: list[dist.ProcessGroup] = []
"""The process group that DeepSpeed uses."""


def join_world() -> None:
    """Make DeepSpeed use the existing process group, and compile nothing.

    ``init_distributed`` compiles a shared-memory operator on CPU (ninja, g++, one to three minutes) unless it
    is marked as not compatible. DeepSpeed also keeps the groups of a destroyed world, so they are released.
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
    """Let a function see this rank's shards of sharded parameters, on any thread."""

    @wraps(function)
    def run_locally(*args: P.args, **kwargs: P.kwargs) -> T:
        with local_mode():
            return function(*args, **kwargs)

    return run_locally


_ENTRY_POINTS = {
    "parameter_offload": (
        *("pre_sub_module_forward_function", "post_sub_module_forward_function"),
        *("pre_sub_module_backward_function", "post_sub_module_backward_function"),
    ),
    "parameter_offload.param_coordinator": ("reset_step",),
    "": ("reduce_ready_partitions_and_remove_grads", "independent_gradient_partition_epilogue"),
}
"""The functions of stage 3 that forward and backward of user code call, by their owner in the optimizer."""


def _wrap_entry_points(engine: Any) -> None:
    """Let DeepSpeed see shards wherever forward and backward enter it, in stage 3.

    Local mode ends at each return, because a backward also runs user code, as when it recomputes activations.
    """
    for owner, names in _ENTRY_POINTS.items():
        found = attrgetter(owner)(engine.optimizer) if owner else engine.optimizer
        for name in names:
            setattr(found, name, locally(getattr(found, name)))
    for name in ("_forward_prologue", "_forward_epilogue", "_backward_prologue", "_backward_epilogue"):
        setattr(engine, name, locally(getattr(engine, name)))


@contextmanager
def local_gradient_hooks() -> Iterator[None]:
    """Let the hooks that DeepSpeed registers on parameters meanwhile see shards, in stage 3."""
    from deepspeed.runtime.zero import stage3

    own = stage3.register_grad_hook
    stage3.register_grad_hook = lambda parameter, hook: own(parameter, locally(hook))
    try:
        yield
    finally:
        stage3.register_grad_hook = own


def is_tested_optimizer(optimizer: Optimizer) -> bool:
    """Return True if DeepSpeed has tested the optimizer with ZeRO."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    return bool(is_zero_supported_optimizer(optimizer))


def trainable_groups(zero: Any) -> list[tuple[list[nn.Parameter], Tensor]]:
    """Return each flat partition of fp32 masters with its parameters, in order."""
    if hasattr(zero, "fp16_groups"):  # stage 3
        return list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
    if hasattr(zero, "bf16_groups"):  # stage 1 with 16-bit weights
        return list(zip(zero.bf16_groups, zero.fp32_groups_flat_partition, strict=True))
    return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))


@locally
def weights_and_masters(zero: Any) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of this rank's flat weights and masters, which may share memory."""
    masters = [flat for _, flat in trainable_groups(zero)]
    if hasattr(zero, "fp16_groups"):
        update_persistent_shards(zero)
        weights = zero.fp16_partitioned_groups_flat
        return [(w, m) for w, m in zip(weights, masters, strict=True) if w is not None]  # None: on disk
    groups = getattr(zero, "bf16_partitioned_groups", None) or zero.parallel_partitioned_bit16_groups
    rank = dist.get_rank()
    return [(of_ranks[rank], m) for of_ranks, m in zip(groups, masters, strict=True)]


def share_masters(zero: Any) -> None:
    """Let float32 weights be their own masters; DeepSpeed would make a second copy.

    Writes into such weights need no comparison and no copy.
    """
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        return
    shared = False
    for weights, masters in weights_and_masters(zero):
        if weights.dtype == masters.dtype and weights.device == masters.device:
            masters.data = weights.data
            shared = True
    if shared and hasattr(zero, "_link_all_hp_params"):
        zero._link_all_hp_params()  # stages 1 and 2 also do this after they have moved the masters


def update_persistent_shards(zero: Any) -> None:
    """Copy gathered persistent parameters into their shards, in stage 3.

    Backward releases and gathers these parameters, which would drop values that user code wrote.
    """
    gathered = [p for p in getattr(zero, "persistent_parameters", ()) if p.numel() and p.shape == p.ds_shape]
    shards, slices = [], []
    for parameter in gathered:
        start, shard = local_range(parameter)
        shards.append(shard)
        slices.append(parameter.detach().flatten()[start : start + shard.numel()])
    if shards:
        foreach_copy_(shards, slices)


_PERSISTENT = -1
"""The id of DeepSpeed itself among the modules that keep a parameter gathered."""


def gather_persistent(zero: Any) -> None:
    """Gather the persistent parameters before ranks take different paths, in stage 3. Collective.

    DeepSpeed would gather them one by one, and releases them until it knows the model's order of layers.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    persistent = getattr(zero, "persistent_parameters", ())
    for parameter in persistent:
        parameter.ds_active_sub_modules.add(_PERSISTENT)  # no module has this id, so none releases it
    missing = [
        parameter
        for parameter in persistent
        if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE and parameter.ds_numel
    ]
    if missing:
        missing[0].all_gather(missing)


@locally
def local_range(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """Return where this rank's shard begins, and the shard without padding.

    In stages 1 and 2 this is the shard of a frozen parameter, which all ranks hold in full.
    """
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
    """Return where this rank's shard begins in the parameter and in the flat partition, and its length.

    For stages 1 and 2. None if this rank holds no element.
    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    within, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
    return within.start, flat.start, flat.numel


def position(zero: Any, parameter: nn.Parameter) -> tuple[int, int]:
    """Return the start of a parameter's shard in its flat partition, and its padded length (stage 3)."""
    _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
    return offset, length


def local_partition(parameter: nn.Parameter) -> Tensor:
    """Return this rank's padded shard of a parameter (stage 3)."""
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


def gradient_slices(zero: Any) -> list[list[Tensor]]:
    """Return this rank's reduced gradients as the step will use them.

    The result has a list for each flat partition, in the order of `trainable_groups`. The slices of a list
    follow each other in the partition. A list without a gradient is empty.
    """
    if hasattr(zero, "fp32_groups_gradient_flat_partition"):  # stage 1 with 16-bit weights
        return [[flat] for flat in zero.fp32_groups_gradient_flat_partition]
    flats = [flat for _, flat in trainable_groups(zero)]
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        return [[] if flat.grad is None else [flat.grad] for flat in flats]
    found: list[list[Tensor]] = []
    for index in range(len(flats)):
        slices = zero.averaged_gradients.get(index)
        if slices is None:
            slices = []
        found.append([slices] if isinstance(slices, Tensor) else [t for t in slices if t is not None])
    return found


def overwritten_gradients(zero: Any) -> list[Tensor]:
    """Return the gradients that a second backward before a step overwrites, in stages that do not add."""
    adds = hasattr(zero, "fp16_groups") or hasattr(zero, "fp32_groups_gradient_flat_partition")
    return [] if adds else [tensor for slices in gradient_slices(zero) for tensor in slices]


def restart_backward_count(zero: Any) -> None:
    """Let stages 1 and 2 treat the next backward as the first, which overwrites gradients."""
    if hasattr(zero, "setup_buckets"):
        zero.micro_step_id = -1


def forget_gradients(zero: Any) -> None:
    """Drop reduced gradients without a step."""
    restart_backward_count(zero)
    for name in ("averaged_gradients", "all_grad_tensors"):
        reduced = getattr(zero, name, {})
        for index in reduced:
            reduced[index] = None


def remove_from_module(engine: Any, module: nn.Module, before: Mapping[nn.Module, set[str]]) -> None:
    """Remove the attributes and hooks that ``engine.destroy`` leaves on modules and in DeepSpeed's globals.

    Args:
        engine: The destroyed engine.
        module: The root module.
        before: The attributes that each module had before the engine was created.
    """
    from deepspeed.runtime.zero import parameter_offload

    restore_globals()
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if hook is not None:
            hook.remove()
    for submodule in module.modules():
        if isinstance(submodule._parameters, parameter_offload.ZeROOrderedDict):
            # Copy by items: after an error in forward, each lookup by key would gather the parameter.
            submodule._parameters = dict(submodule._parameters.items())
        for name in set(vars(submodule)) - before.get(submodule, set(vars(submodule))):
            if name in _LEFT_ON_MODULES or name.startswith("ds_"):
                del submodule.__dict__[name]


def restore_globals() -> None:
    """Restore globals of the process that stage 3 has changed, even if its engine cannot be removed."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk
    parameter_offload.FWD_MODULE_STACK.clear()


@contextmanager
def without_weight_broadcast() -> Iterator[None]:
    """Keep DeepSpeed from broadcasting weights as bytes, which fails for 0-d ones. nnx has broadcast them."""
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
def without_module_move(module: nn.Module) -> Iterator[None]:
    """Keep DeepSpeed's engine from moving the full module to the device.

    Stage 3 moves each parameter when it shards it, so the device never holds the full module.
    """
    module.to = lambda *_: module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.to


def align_ids() -> None:
    """Let stage 3 number parameters and modules from one value on all ranks.

    DeepSpeed compares these numbers between ranks, and each process counts on for its whole life.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    if is_distributed():
        modules: list[int] = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0]
        following = torch.tensor([Init.param_id, modules[0]])
        dist.all_reduce(following, op=dist.ReduceOp.MAX, group=control_group())
        Init.param_id, modules[0] = following.tolist()


def show_partitions(engine: Any, part: Callable[[nn.Parameter], Part]) -> None:
    """Guard the parameters of stage 3, and let a sharded one hold this rank's 1-d shard instead of nothing.

    Args:
        engine: DeepSpeed's engine, which sees the shard.
        part: A function that makes the guard's view of a parameter.
    """
    from deepspeed.runtime.zero import partition_parameters

    _wrap_entry_points(engine)

    if partition_parameters.free_param is not _free_and_show:
        _frees.append(partition_parameters.free_param)
        partition_parameters.free_param = _free_and_show
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_tensor"):
            is_gathered = parameter.shape == parameter.ds_shape
            guard(parameter, part(parameter))
            if is_gathered:
                show_plain(parameter)
            else:
                _show(parameter)


def hide_partitions(parameter: nn.Parameter) -> None:
    """Undo `show_partitions`."""
    if "_part" in vars(parameter):
        show_unsharded(parameter)  # `unguard` needs it
        unguard(parameter)


_frees: list[Any] = []
_FOR_USER = -2
"""The id of user code among the modules that keep a parameter gathered."""


@locally
def _free_and_show(parameter: nn.Parameter) -> None:
    touched, seen = vars(parameter).pop("_nnx_touched", False), vars(parameter).pop("_nnx_gathered", None)
    if seen is not None and seen.writes.are_compared() and parameter.shape == parameter.ds_shape:  # type: ignore[attr-defined]
        seen.writes.add(parameter, parameter)
    if touched or (seen is not None and _may_be_written(parameter, seen)):
        _update_shard(parameter)
    _frees[0](parameter)
    if "_part" in vars(parameter):
        _show(parameter)


class _Gathered(NamedTuple):
    """The state of a parameter at its last gather.

    Attributes:
        version: The parameter's version.
        forwards: The number of layers' forwards until the gather.
        forwards_now: A function that returns the number of forwards until now.
        writes: The checksums of values that user code writes.
    """

    version: int
    forwards: int
    forwards_now: Callable[[], int]
    writes: Writes


def _may_be_written(parameter: nn.Parameter, seen: _Gathered) -> bool:
    """Return True if user code may have written into a gathered parameter, as in a layer's forward.

    Writes through ``.data`` change no version. So after a forward this rank's shard is copied from the
    gathered parameter without a comparison, which costs less. A copy across devices would cost more, so it
    follows a change of version only.

    Args:
        parameter: The parameter, before it is sharded.
        seen: The parameter's state at its gather.
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
        parameter.data = local_range(parameter)[1]
    show_unsharded(parameter)


def _update_shard(parameter: nn.Parameter) -> None:
    """Copy this rank's range of the gathered parameter into its shard."""
    held = vars(parameter)
    if "_nnx_range" not in held:  # cached, because every release of a layer comes here
        start, shard = local_range(parameter)
        held["_nnx_range"] = start, shard.numel()
    start, length = held["_nnx_range"]
    written = parameter.detach().reshape(-1).narrow(0, start, length)
    local_partition(parameter).narrow(0, 0, length).copy_(written)


def is_replicated(parameter: nn.Parameter) -> bool:
    """Return True if each rank has its own full copy between steps; the step makes the copies equal."""
    if not hasattr(parameter, "ds_tensor"):
        return True
    return bool(getattr(parameter, "ds_persist", False)) and not is_sharded(parameter)


def is_sharded(parameter: nn.Parameter) -> bool:
    """Return True if DeepSpeed has released the full parameter (stage 3)."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return bool(getattr(parameter, "ds_status", None) == ZeroParamStatus.NOT_AVAILABLE)


@locally
@torch.no_grad()
def gather_for_user(parameters: Sequence[nn.Parameter]) -> None:
    """Unshard parameters for user code until `release_touched`, in stage 3. Collective."""
    sharded = [p for p in parameters if is_sharded(p) and p.ds_numel]  # type: ignore[attr-defined]
    for parameter in sharded:
        parameter._nnx_touched = True  # type: ignore[attr-defined]
    if sharded:
        sharded[0].all_gather(sharded)  # type: ignore[attr-defined]
    for parameter in sharded:
        parameter.ds_active_sub_modules.add(_FOR_USER)  # type: ignore[attr-defined]
    mark_empty_as_available([p for p in parameters if is_sharded(p)])
    for parameter in parameters:
        show_plain(parameter)


@locally
@torch.no_grad()
def release_touched(parameters: Iterable[nn.Parameter]) -> None:
    """Shard the parameters that user code had in full, with the values that it wrote (stage 3)."""
    for parameter in parameters:
        if "_nnx_touched" not in vars(parameter):
            continue
        parameter.ds_active_sub_modules.discard(_FOR_USER)  # type: ignore[attr-defined]
        if parameter.ds_active_sub_modules - {_PERSISTENT}:  # type: ignore[attr-defined]
            continue
        if getattr(parameter, "ds_persist", False):
            del parameter._nnx_touched  # type: ignore[attr-defined]
            _update_shard(parameter)
        else:
            parameter.partition()  # type: ignore[attr-defined]


@locally
@torch.no_grad()
def take_assigned(parameters: Mapping[nn.Parameter, Tensor]) -> list[nn.Parameter]:
    """Find parameters with a replaced ``data``, and copy the new values to the memory that DeepSpeed uses.

    Args:
        parameters: The parameters with their original data, which only stages 1 and 2 use.

    Returns:
        The parameters whose new data has another size and cannot be copied.
    """
    misfits = []
    for parameter, original in parameters.items():
        is_stage_3 = hasattr(parameter, "ds_tensor")
        if parameter.data_ptr() == (local_partition(parameter) if is_stage_3 else original).data_ptr():
            continue
        if is_stage_3 and parameter.shape == getattr(parameter, "ds_shape", None):
            continue  # `update_persistent_shards` handles gathered parameters
        start, target = local_range(parameter) if is_stage_3 else (0, original)
        present = parameter.data
        if present.data_ptr() == target.data_ptr() or not target.numel() or not present.numel():
            continue
        parameter.data = target
        if is_stage_3 and present.numel() == getattr(parameter, "ds_numel", None):
            present = present.flatten()[start : start + target.numel()]
        if present.numel() == target.numel():
            parameter.copy_(present.view_as(target))
        else:
            misfits.append(parameter)
    return misfits


@locally
def mark_empty_as_available(parameters: Sequence[nn.Parameter]) -> None:
    """Mark parameters without elements as gathered, because they have nothing to gather (stage 3)."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in parameters:
        parameter.data = parameter.data.new_empty(parameter.ds_shape)  # type: ignore[attr-defined]
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]


def reduces_whole_gradients(zero: Any) -> bool:
    """Return True if every rank reduces all its gradient sums at once: stage 1 with 16-bit weights."""
    return not hasattr(zero, "_coalesce_grad_reduction")


@locally
def gradient_nodes(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Return the nodes where a backward ends at each parameter. They stay the same while the list is held."""
    with torch.enable_grad():
        return [end_of_backward(parameter) for parameter in parameters]


def will_be_used(nodes: Sequence[Any]) -> list[bool]:
    """Return a flag for each node: True if the running backward executes it. Call it from a hook."""
    return [will_execute(node) for node in nodes]


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return True if a gradient on this rank waits for its reduction."""
    return parameter.grad is not None or getattr(parameter, "grad_accum", None) is not None


def had_gradients(zero: Any, parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return a flag for each parameter: True if it had a gradient on this rank since the last step.

    For stage 1 with 16-bit weights.
    """
    had: dict[nn.Parameter, bool] = {}
    for group, flags in zip(zero.bf16_groups, zero.fp32_groups_has_gradients, strict=True):
        had.update(zip(group, flags, strict=True))
    return [had[parameter] for parameter in parameters]


@locally
@torch.no_grad()
def zero_gradient(zero: Any, parameter: nn.Parameter) -> None:
    """Give a parameter a gradient of zero in the place where DeepSpeed reduces it."""
    if getattr(zero, "use_grad_accum_attribute", False):
        dtype = zero.gradient_accumulation_dtype
        parameter.grad_accum = torch.zeros_like(parameter, dtype=dtype)  # type: ignore[attr-defined]
        return
    # torch refuses a gradient of another shape than its parameter's, and a sharded parameter is empty. So the
    # parameter takes an expanded tensor of the full shape, which needs no memory, while `grad` is set.
    present = parameter.data
    shape = getattr(parameter, "ds_shape", present.shape)
    parameter.data = present.new_empty(()).expand(shape)
    parameter.grad = torch.zeros(shape, dtype=present.dtype, device=present.device)
    parameter.data = present


def defer_reduction(engine: Any) -> Callable[[], None]:
    """Let this backward leave its gradients in place, and return a function that reduces them in one order.

    Upstream: ``DeepSpeedEngine.coalesce_grad_reduction``, which cannot begin during a backward.
    """
    zero = engine.optimizer
    zero._coalesce_grad_reduction = engine.inside_no_sync_ctxt = True

    @locally
    def reduce() -> None:
        end_deferral(engine)
        zero.set_gradient_accumulation_boundary(engine.is_gradient_accumulation_boundary())
        if hasattr(zero, "fp16_groups"):
            engine._flush_coalesced_reduction_zero3(zero)
        else:
            engine._flush_coalesced_reduction_zero12(zero)

    return reduce


def end_deferral(engine: Any) -> None:
    """Undo `defer_reduction`."""
    engine.optimizer._coalesce_grad_reduction = engine.inside_no_sync_ctxt = False


def watch_gradients(
    zero: Any,
    parameters: Sequence[nn.Parameter],
    take: Callable[[int], None],
    check: Callable[[nn.Parameter], None],
) -> None:
    """Call hooks for the gradients that DeepSpeed puts into a bucket.

    Args:
        zero: DeepSpeed's optimizer.
        parameters: The trained parameters.
        take: A hook for each gradient that enters a bucket. It gets the parameter's number, or -1 for a
            parameter without elements.
        check: A hook for each gradient, before DeepSpeed decides whether to defer it.
    """
    name = "reduce_ready_partitions_and_remove_grads"
    own = getattr(zero, name)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    always = getattr(zero, "partition_gradients", True)

    def note(parameter: nn.Parameter, *args: Any) -> Any:
        check(parameter)
        if (always or zero.is_gradient_accumulation_boundary()) and not zero._coalesce_grad_reduction:
            take(numbers.get(id(parameter), -1))
        return own(parameter, *args)

    setattr(zero, name, note)
    if hasattr(zero, "process_gradients"):  # stages 1 and 2 decide here
        process = zero.process_gradients

        def check_and_process(parameter: nn.Parameter, *args: Any) -> None:
            check(parameter)
            process(parameter, *args)

        zero.process_gradients = check_and_process


def drop_stale_gradients(zero: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Zero the gradients of an earlier step for parameters that no rank uses in this step (stage 3)."""
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
    """Announce each gather with the names of its parameters, in stage 3.

    Args:
        names: The names of all parameters.
        announce: A function to call before each gather. It gets the names, and True if user code needs them.
        forwards: A function that returns the number of layers' forwards. A release compares it with the
            number at the gather.
        writes: The checksums that each release updates.
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
                return gather_for_user(own)  # user code reads a weight inside another layer's forward
            listed = own if listed is None else list(listed)
            name = name_of(listed)
            if name:
                announce(name, any("_nnx_touched" in vars(parameter) for parameter in listed))
            missing = [parameter for parameter in listed if is_sharded(parameter)]
            for parameter in listed:
                show_plain(parameter)
            with announced(doing := f"waits for the gather of {name or 'a layer'}"):
                result = gather(*args, **kwargs)
            if hasattr(result, "wait"):  # asynchronous: DeepSpeed waits when the layer is called
                result.wait = announced(doing)(result.wait)
            for parameter in missing:
                if not getattr(parameter, "ds_persist", False):  # `update_persistent_shards` handles these
                    seen = _Gathered(parameter._version, forwards(), forwards, writes)
                    vars(parameter)["_nnx_gathered"] = seen
            return result

        return announce_and_gather

    for parameter in names:
        if hasattr(parameter, "ds_id"):
            parameter.partition = _keeping_gathered(parameter.partition, parameter)  # type: ignore[attr-defined]
            for gather in ("all_gather", "all_gather_coalesced"):
                setattr(parameter, gather, announcing(getattr(parameter, gather), (parameter,)))


def _keeping_gathered(partition: Any, own: nn.Parameter) -> Any:
    """Return a function that partitions parameters, but for those that user code reads."""

    @locally
    def partition_others(param_list: Sequence[nn.Parameter] | None = None, **kwargs: Any) -> None:
        listed = (own,) if param_list is None else param_list
        others = [p for p in listed if _FOR_USER not in p.ds_active_sub_modules]  # type: ignore[attr-defined]
        if others:
            partition(param_list=others, **kwargs)

    return partition_others


def disable_loss_scaling(zero: Any) -> None:
    """Let backward begin at the loss itself, because nothing scales the loss here."""
    zero.scale_if_loss = lambda loss: loss


def skip_plain_tensors() -> None:
    """Let modules hold plain tensors in place of parameters, as ``functional_call`` sets them, in stage 3.

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
    """Call `check` when a backward enters a layer with sharded weights (stage 3)."""
    offload = zero.parameter_offload
    own = offload.pre_sub_module_backward_function

    def before_backward(submodule: nn.Module) -> None:
        if any(is_sharded(p) for _, p in submodule.named_parameters(recurse=False)):
            check()
        own(submodule)

    offload.pre_sub_module_backward_function = before_backward
