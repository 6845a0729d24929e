"""DeepSpeed 0.19.8's private parts that nnx needs: the only file that may touch them.

Each says what it is for; when DeepSpeed offers it publicly, the function goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx.collective import control_group, is_distributed

__all__ = [
    "forget_gradients",
    "fragment",
    "gradient_tensors",
    "join_world",
    "local_partition",
    "number_parameters_alike",
    "overwritten_gradients",
    "position",
    "reload_weights",
    "remove_from_module",
    "trainable_groups",
    "weights_agree_already",
]

_world: dist.ProcessGroup | None = None


def join_world() -> None:
    """Make DeepSpeed use the process group that exists, and compile nothing.

    ``init_distributed`` compiles a shared-memory operator on CPU (ninja, g++, one to three minutes) unless it
    is marked as not compatible. DeepSpeed also keeps the groups of a world that was destroyed since.
    """
    global _world
    import deepspeed.comm.comm as comm
    import deepspeed.ops
    from deepspeed.utils import groups

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    world = dist.distributed_c10d._get_default_group()
    if _world is not None and _world is not world:
        groups._release_process_group_references(group=None)
        comm.cdb = None
    _world = world
    comm.init_distributed(dist_init_required=False, auto_mpi_discovery=False, verbose=False)


def trainable_groups(zero: Any) -> list[tuple[list[nn.Parameter], Tensor]]:
    """For each flat partition of fp32 masters, the parameters that lie in it, in order."""
    if hasattr(zero, "fp16_groups"):  # stage 3
        return list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
    if hasattr(zero, "bf16_groups"):  # stage 1 with 16-bit weights
        return list(zip(zero.bf16_groups, zero.fp32_groups_flat_partition, strict=True))
    return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))


def fragment(parameter: nn.Parameter) -> tuple[int, int, int] | None:
    """Stages 1 and 2: where this rank's part begins in the parameter and in the flat partition, and its length."""
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

    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if hook is not None:
            hook.remove()
    parameter_offload.FWD_MODULE_STACK.clear()
    for submodule in module.modules():
        if isinstance(submodule._parameters, parameter_offload.ZeROOrderedDict):
            submodule._parameters = dict(submodule._parameters)
        for name in set(vars(submodule)) - before.get(submodule, set(vars(submodule))):
            del submodule.__dict__[name]


@contextmanager
def weights_agree_already() -> Iterator[None]:
    """Keep the engine from broadcasting weights as bytes, which fails for 0-d and strided ones; nnx has done it."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda self: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = own


def number_parameters_alike() -> None:
    """Let stage 3 number parameters from one value on all ranks; it counts on for as long as a process lives."""
    from deepspeed.runtime.zero.partition_parameters import Init

    if is_distributed():
        next_number = torch.tensor(Init.param_id)
        dist.all_reduce(next_number, op=dist.ReduceOp.MAX, group=control_group())
        Init.param_id = int(next_number)
