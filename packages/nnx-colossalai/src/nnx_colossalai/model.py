"""One model that is laid out in chunks: its units, its plan, its engine and what steps it.

It owns the order in which these are made and taken down, and how the plan changes between two steps. What the
core asks of a strategy is `backend`'s; where things lie is decided in `placing`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from nnx_checkpoint.state import repoint_optimizer
from nnx_colossalai.chunks._torch_compat import makes_cuda_graphs
from nnx_colossalai.chunks.chunk import ChunkEngine
from nnx_colossalai.device.device import Device
from nnx_colossalai.errors import DeviceMemoryError
from nnx_colossalai.optimizers.stepping import Stepper
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.placing import Placing
from nnx_colossalai.plan.cost import Memory
from nnx_colossalai.plan.model import widths
from nnx_colossalai.plan.spec import Tier
from nnx_core.backend import ParallelContext, Sample
from nnx_core.errors import UnsupportedError
from nnx_core.hidden_state import held_state
from nnx_core.layer_classes import as_classes

__all__ = ["ChunkedModel", "Recomputing", "move_states"]


log = logging.getLogger("nnx.colossalai")


class ChunkedModel:
    """A module whose parameters lie in chunks.

    Args:
        module: The user's.
        sample: Yields example inputs, from which the activations are estimated if the budget is short.
        context: The place of this process in the world.
        device: Memory and copies.
        options: The strategy's.
        before: The memory that models laid out earlier take, at most.

    Attributes:
        module: The user's.
        replaced: Maps each parameter object that was replaced to what took its place.
        engine: Holds the chunks.
        stepper: Steps optimizers over them.
    """

    def __init__(
        self,
        module: nn.Module,
        sample: Sample,
        *,
        context: ParallelContext,
        device: Device[Any],
        options: ColossalAIOptions,
        before: Sequence[Memory] = (),
    ) -> None:
        self.module, self._torch_device = module, device.torch_device
        self._recomputing = Recomputing(module, options.activation_checkpointing)
        kinds = widths(context.precision)
        dtype = kinds.working if kinds.mixed else None
        try:
            self.placing = Placing(
                module, sample, context=context, device=device, options=options, before=before
            )
            self._refuse_cuda_graphs()
            self.engine = make_engine(context, device, dtype)
            self.replaced = self.engine.parallelize(module, self.placing.units())
        except BaseException:
            self._recomputing.undo()
            raise
        self.stepper = Stepper(
            self.engine.chunks,
            overlap=options.overlap,
            cpu_adam=options.cpu_adam,
            device=device.torch_device,
            show_masters=self.engine.end_step,
        )
        self._optimizers: Sequence[Optimizer] = ()
        self._with_gradients: bool | None = None

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Take over the optimizers, and correct the plan by the size of their state where that matters."""
        # One call for all of them, or one for each, as in Fabric.
        self._optimizers = [*dict.fromkeys([*self._optimizers, *optimizers])]
        if optimizers and self.placing.correct(self._optimizers):
            self._move()
        self.stepper.setup_optimizers(optimizers)

    def move_down(self, error: DeviceMemoryError, *, rather: int = 0) -> int:
        """Place chunks so that the device needs less memory. Collective.

        Args:
            error: Why: the device ran out of memory.
            rather: Bytes to free where that is possible, although the error tells of fewer.

        Returns:
            Bytes that the device needs less.

        Raises:
            PlanError: There is no such placement.
            UnsupportedError: The model was compiled to CUDA graphs.
        """
        before = self.placing.planned.memory.device
        self.placing.lower(error.used + error.asked - error.allowed, rather=rather)
        self.finish()
        self._move()
        return before - self.placing.planned.memory.device

    def _refuse_cuda_graphs(self) -> None:
        if self._torch_device.type == "cuda":
            refuse_cuda_graphs(self.module, self.placing.planned.placement.tiers.values())

    def _move(self) -> None:
        self._refuse_cuda_graphs()
        before = dict(self.module.named_parameters())
        self.engine.move(self.module, self.placing.planned.placement.tiers)
        after = dict(self.module.named_parameters())
        replaced = {old: after[name] for name, old in before.items() if after[name] is not old}
        for optimizer in self._optimizers:
            repoint_optimizer(optimizer, replaced)
            move_states(optimizer)
        self.stepper.chunks = self.engine.chunks

    def begin_step(self) -> None:
        """Before a step, or an evaluation: take notice of what callbacks may have done to masters unseen.

        Averaging callbacks, for one, write through ``data`` between training and evaluation, which no version
        counter tells.
        """
        with_gradients = torch.is_grad_enabled()
        if with_gradients is not self._with_gradients:
            self._with_gradients = with_gradients
            self.refresh()
        elif not with_gradients:
            self.finish()

    def distrust(self) -> None:
        """An evaluation begins: masters may have been changed since the last one."""
        self._with_gradients = None

    def finish(self) -> None:
        """Wait for steps in the background and whatever the engine has under way."""
        self.stepper.finish()
        self.engine.finish()

    def refresh(self) -> None:
        """Make the working weights those of masters that were changed from outside."""
        self.finish()
        for chunk in self.engine.chunks:
            chunk.refresh()

    def undo(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give the module its plain parameters back."""
        self.stepper.close()
        self.finish()
        replaced = self.engine.unparallelize(self.module)
        self._recomputing.undo()
        return replaced


def refuse_cuda_graphs(root: nn.Module, tiers: Iterable[Tier]) -> None:
    """Refuse a model of which a part was compiled to CUDA graphs, where weights come from host memory.

    Args:
        root: The model.
        tiers: The tiers of its chunks.

    Raises:
        UnsupportedError: A graph reads the addresses that it has recorded, and such weights get others.
    """
    compiled = [name or "the model itself" for name, one in root.named_modules() if makes_cuda_graphs(one)]
    hosted = {tier.value for tier in tiers if tier.steps_on_host}
    if compiled and hosted:
        raise UnsupportedError(
            f"{', '.join(compiled)}: compiled to CUDA graphs, which read weights where they were when it "
            f"was recorded, but the plan has weights from host memory ({', '.join(sorted(hosted))}).",
            remedy="Compile in mode 'default' or 'max-autotune-no-cudagraphs', or keep all weights on the "
            "device with placement_policy='cuda'.",
        )


def make_engine(context: ParallelContext, device: Device[Any], dtype: torch.dtype | None) -> ChunkEngine:
    """The engine for this number of ranks.

    Args:
        context: The place of this process in the world.
        device: Memory and copies.
        dtype: The dtype of working weights; None means that of the masters.
    """
    if context.world_size == 1:
        from nnx_colossalai.chunks.local import LocalEngine

        return LocalEngine(context, device, dtype)
    from nnx_colossalai.chunks.sharded import ShardedEngine

    return ShardedEngine(context, device, dtype)


# --- moving ----------------------------------------------------------------------------------------------
#
# Optimizer state follows parameters whose memory has changed.


@torch.no_grad()
def move_states(optimizer: Optimizer) -> None:
    """Put every tensor of the optimizer's state where its parameter is now.

    Args:
        optimizer: Holds the present parameters; its state was made for the former ones.
    """
    held = held_state(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = held.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = _beside(value, parameter, group)


def _beside(value: Tensor, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
    here, there = _device(value), _device(parameter)
    counter_of_the_host = value.ndim == 0 and not (group.get("fused") or group.get("capturable"))
    if here == there or (counter_of_the_host and here.type == "cpu"):
        return value
    if value.shape != parameter.shape:
        return value.to(there)
    moved = torch.empty_like(parameter.detach(), dtype=value.dtype)
    _local(moved).copy_(_local(value))
    return moved


def _device(tensor: Tensor) -> torch.device:
    return _local(tensor).device


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- recomputing -----------------------------------------------------------------------------------------
#
# Activation checkpointing of chosen layers: their forwards are replaced on the instances, and put back.
#
# No name in the model changes, and hooks on the layers, those of chunks among them, stay outside of what is
# recomputed.


class Recomputing:
    """Layers whose activations are computed again in backward instead of being kept.

    Args:
        root: The model.
        classes: A layer class or several; None: none.

    Raises:
        OptionError: Something in `classes` is not a module class.
    """

    def __init__(self, root: nn.Module, classes: object) -> None:
        wanted = as_classes(classes or (), option="activation_checkpointing")  # type: ignore[arg-type]
        self.layers = [module for module in root.modules() if isinstance(module, wanted)]
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def undo(self) -> None:
        """Give the layers their own forward back."""
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.layers = []
