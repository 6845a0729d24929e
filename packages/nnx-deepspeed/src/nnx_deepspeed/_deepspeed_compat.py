"""DeepSpeed 0.19.8's private parts that nnx needs: only here and in `_deepspeed_operators` are they touched.

Each says what it is for; when DeepSpeed offers it publicly, the function goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx.collective import control_group, is_distributed

__all__ = [
    "forget_gradients",
    "fragment",
    "gradient_tensors",
    "is_tested_optimizer",
    "join_world",
    "local_partition",
    "number_alike",
    "overwritten_gradients",
    "position",
    "reload_weights",
    "remove_from_module",
    "see_empty_parameters",
    "share_masters",
    "show_partitions",
    "take_persistent",
    "trainable_groups",
    "weights_agree_already",
    "weights_and_masters",
]

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
    world = dist.distributed_c10d._get_default_group()
    if _worlds and _worlds[-1] is not world:
        groups._release_process_group_references(group=None)
        comm.cdb = None
    _worlds[:] = [world]
    comm.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)


def is_tested_optimizer(optimizer: Optimizer) -> bool:
    """Whether DeepSpeed has tested it with ZeRO."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    return bool(is_zero_supported_optimizer(optimizer))


def trainable_groups(zero: Any) -> list[tuple[list[nn.Parameter], Tensor]]:
    """For each flat partition of fp32 masters, the parameters that lie in it, in order."""
    if hasattr(zero, "fp16_groups"):  # stage 3
        return list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
    if hasattr(zero, "bf16_groups"):  # stage 1 with 16-bit weights
        return list(zip(zero.bf16_groups, zero.fp32_groups_flat_partition, strict=True))
    return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))


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
        start, part = _own_range(parameter)
        parts.append(part)
        slices.append(parameter.detach().flatten()[start : start + part.numel()])
    if parts:
        torch._foreach_copy_(parts, slices)


def _own_range(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """Stage 3: where this rank's part begins, and the part without its padding."""
    partition = local_partition(parameter)
    numel: int = parameter.ds_numel  # type: ignore[attr-defined]
    start = min(dist.get_rank() * partition.numel(), numel)
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


@torch.no_grad()
def reload_weights(zero: Any) -> None:
    """Make the weights that the module computes with from the masters. Collective."""
    if not hasattr(zero, "fp16_groups"):
        zero.update_lp_params()
        return
    for index in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gradient_tensors(zero: Any) -> list[Tensor]:
    """This rank's reduced gradients, flat or in pieces, as the step will take them."""
    if hasattr(zero, "fp32_groups_gradient_flat_partition"):  # stage 1 with 16-bit weights
        return list(zero.fp32_groups_gradient_flat_partition)
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        return [flat.grad for _, flat in trainable_groups(zero) if flat.grad is not None]
    found: list[Tensor] = []
    for pieces in zero.averaged_gradients.values():
        if isinstance(pieces, Tensor):
            found.append(pieces)
        elif pieces is not None:
            found += [piece for piece in pieces if piece is not None]
    return found


def overwritten_gradients(zero: Any) -> list[Tensor]:
    """What a second backward before a step would overwrite; stage 3 and 16-bit stage 1 add to it."""
    adds = hasattr(zero, "fp16_groups") or hasattr(zero, "fp32_groups_gradient_flat_partition")
    return [] if adds else gradient_tensors(zero)


def forget_gradients(zero: Any) -> None:
    """Drop gradients that were reduced and will not be stepped with."""
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
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    if torch.nn.functional.linear is zero3_linear_wrap:  # stage 3 puts it there for the whole process
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if hook is not None:
            hook.remove()
    parameter_offload.FWD_MODULE_STACK.clear()
    for submodule in module.modules():
        if isinstance(submodule._parameters, parameter_offload.ZeROOrderedDict):
            # By items: an error in forward leaves it gathering whatever is looked up.
            submodule._parameters = dict(submodule._parameters.items())
        for name in set(vars(submodule)) - before.get(submodule, set(vars(submodule))):
            if name in _LEFT_ON_MODULES or name.startswith("ds_"):
                del submodule.__dict__[name]


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


def show_partitions(module: nn.Module) -> None:
    """Stage 3: from now on a parameter that is not gathered is this rank's part, 1-d, instead of nothing.

    So callbacks that go from parameter to parameter, such as averages, work on parts.
    """
    from deepspeed.runtime.zero import partition_parameters

    if partition_parameters.free_param is not _free_and_show:
        _frees.append(partition_parameters.free_param)
        partition_parameters.free_param = _free_and_show
    for parameter in module.parameters():
        if hasattr(parameter, "ds_tensor"):
            parameter._nnx_shows_partition = True  # type: ignore[attr-defined]
            if parameter.shape != parameter.ds_shape:  # type: ignore[attr-defined]
                _show(parameter)


_frees: list[Any] = []


def _free_and_show(parameter: nn.Parameter) -> None:
    _frees[0](parameter)
    if hasattr(parameter, "_nnx_shows_partition"):
        _show(parameter)


def _show(parameter: nn.Parameter) -> None:
    partition = local_partition(parameter)
    if partition.device == parameter.device and partition.numel():  # neither offloaded nor on disk
        parameter.data = _own_range(parameter)[1]


def see_empty_parameters(parameters: Sequence[nn.Parameter]) -> None:
    """Stage 3: make parameters without elements available, as there is nothing that it would gather."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in parameters:
        parameter.data = parameter.data.new_empty(parameter.ds_shape)  # type: ignore[attr-defined]
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
