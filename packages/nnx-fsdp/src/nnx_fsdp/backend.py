"""The FSDP2 engine behind the fsdp_* strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer

from nnx_base.clean_up import clean_up_after_error
from nnx_checkpoint.reading.state import ModelState
from nnx_core.backend import ParallelContext, Sample
from nnx_core.errors import OptionError
from nnx_core.parts_backend import PartsBackend
from nnx_core.view.hidden_optimizer_state import StateParts
from nnx_core.view.modules import Layers
from nnx_fsdp.meshes import mesh_of
from nnx_fsdp.optimizer_state import shard_state
from nnx_fsdp.options import FSDPOptions
from nnx_fsdp.sharding import ShardedUnit, Sharding
from nnx_fsdp.units import UnitChoice, choose_units
from nnx_fsdp.weights import Weights

__all__ = ["FSDPBackend"]

T = TypeVar("T")


class FSDPBackend(PartsBackend[FSDPOptions]):
    """Shards parameters, gradients and optimizer state over the ranks with torch's FSDP2.

    Every parameter becomes a DTensor under its own name on the user's own module. The module's class has
    FSDP2's prefix during training; `unparallelize` restores the class.
    """

    Options = FSDPOptions

    def __init__(self, options: FSDPOptions) -> None:
        super().__init__(options)
        self._sharding: Sharding | None = None
        self._summaries: dict[nn.Module, str] = {}

    def setup(self, context: ParallelContext) -> None:
        """Make the mesh, and what shards over it."""
        super().setup(context)
        if self._sharding is not None:  # a Trainer keeps it from one stage to the next
            return
        self._sharding = Sharding(
            self.make_mesh(context),
            context.device,
            mixed_precision=self._mixed_precision(),
            offload=self._offload_policy(),
            compile=self.options.compile,
            checkpointed=Layers(self.options.activation_checkpointing, option="activation_checkpointing"),
            sync_module_states=self.options.sync_module_states,
            is_watched=lambda: self.is_watched and self.context.world_size > 1,
            has_by_choice=self.options.auto_wrap,
        )

    def make_mesh(self, context: ParallelContext) -> DeviceMesh:
        """Return the mesh: one dim, or (replicate, shard) for hybrid sharding. Collective."""
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

    @property
    def sharding(self) -> Sharding:
        """FSDP2 over the modules of this backend; available after `setup`."""
        assert self._sharding is not None
        return self._sharding

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which torch's ``wrap()`` shards its module, for manual wrapping only."""
        if self.options.auto_wrap:
            return nullcontext()
        return enable_wrap(wrapper_cls=self._wrap)

    def _wrap(self, module: nn.Module, **_: Any) -> nn.Module:
        if not isinstance(module, FSDPModule):
            reshard = self.options.reshard_after_forward
            unit = ShardedUnit(type(module).__name__, module, True if reshard is None else reshard)
            self.sharding.shard_unit(unit)
        return module

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Shard the chosen units bottom-up, then all other parameters with the root."""
        if self.sharding.holds(module) or isinstance(module, FSDPModule):
            return {}
        choice = self._choose_units(module)
        self._summaries[module] = self._describe(module, choice)
        reshard = self.options.reshard_after_forward
        units = [ShardedUnit(name, unit, choice.reshards(name, reshard)) for name, unit in choice.units]
        return self.sharding.shard(module, units, reshard_root=reshard)

    def _choose_units(self, root: nn.Module) -> UnitChoice:
        if not self.options.auto_wrap:
            return UnitChoice((), "wrap() in configure_model chose them")
        return choose_units(
            root,
            policy=self.options.auto_wrap_policy,
            min_num_params=self.options.min_num_params,
            by_choice=self.options.by_choice,
        )

    def _describe(self, module: nn.Module, choice: UnitChoice) -> str:
        if self.options.auto_wrap:
            return choice.describe(module)
        count = sum(isinstance(part, FSDPModule) for part in module.modules())
        return f"the root and {count} {'unit' if count == 1 else 'units'} of wrap()"

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Shard existing optimizer state; choose owners of parameters that an optimizer steps unsharded."""
        self.sharding.take_optimizers(module, optimizers)
        for optimizer in optimizers:
            shard_state(optimizer)
        super().setup_optimizers(module, optimizers)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Gather every parameter into the user's own object and remove FSDP2 from the modules."""
        self._states.remove()
        self._summaries.pop(module, None)
        return {} if self._sharding is None else self._sharding.unshard(module, self.at_end)

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step inside the root's forward."""
        return self.sharding.run_step(module, step, *args, **kwargs)

    def backward(self, module: nn.Module, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute and reduce gradients, also those that only other ranks have.

        After an error it drops all unreduced gradients, accumulated ones included.
        """
        sharding = self.sharding
        with (
            clean_up_after_error("dropping its gradients", lambda: sharding.drop_failed_backward(module)),
            nullcontext() if sharding.order is None else sharding.order.reporting(),
            sharding.backward_pass(),
        ):
            super().backward(module, loss, *args, **kwargs)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank until the first backward outside, unless hooks read them."""
        return self.sharding.no_sync(module)

    def local(self) -> AbstractContextManager[None]:
        """Return a context that shows the DTensors instead of unsharded tensors."""
        return nullcontext() if self._sharding is None else self._sharding.local()

    def views(self, optimizer: Optimizer) -> list[Weights]:
        """Return the parameters of every module."""
        return self.sharding.views()

    def state_parts(self, module: nn.Module) -> StateParts:
        """Return a view of the optimizer state that reads as unsharded."""
        return self.sharding.state_parts(self.state_refusal)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step, on owner ranks if it reads unsharded parameters; free gathered old weights first."""
        self.sharding.free_gathered()  # copies user code's writes to gathered weights into the shards
        result = super().optimizer_step(optimizer, step, *args, **kwargs)
        self.sharding.free_gathered()  # a forward in the optimizer's closure gathered them
        return result

    def decisions(self, module: nn.Module) -> str:
        """Return the units, for comparison over the ranks."""
        return " ".join(name or "." for name, part in module.named_modules() if isinstance(part, FSDPModule))

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """Return checksums of user code's writes to sharded parameters."""
        return self.sharding.written(module)

    def summary(self, module: nn.Module) -> str:
        """Return the units and the reason for them."""
        return self._summaries.get(module, "")

    def model_state(self, module: nn.Module) -> ModelState:
        """Return handles on the shards; frees gathered units first (in a process that has sharded)."""
        if self._sharding is not None:
            self._sharding.free(module)
        return super().model_state(module)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
