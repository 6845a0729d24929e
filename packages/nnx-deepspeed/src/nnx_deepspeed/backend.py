"""Train with DeepSpeed: the engine of the nnx_deepspeed_* strategies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.clean_up import clean_up
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.reading.filling import fill_optimizer_tensors, restore_groups
from nnx_checkpoint.reading.state import ModelState, OptimizerState, parameter_names
from nnx_core.agree.divergence import Writes
from nnx_core.backend import Backend, ParallelContext, Sample
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import Gradient
from nnx_core.optimizers.own_optimizers import no_optimizer, refuse_no_optimizer
from nnx_core.view.modules import broadcast_module, forward_as, materialize, move_to
from nnx_deepspeed._deepspeed_compat import join_world, restore_globals
from nnx_deepspeed._operators_compat import prepare_operators
from nnx_deepspeed.config import make_config
from nnx_deepspeed.engine import ZeroEngine
from nnx_deepspeed.options import DeepSpeedOptions

__all__ = ["DeepSpeedBackend"]

T = TypeVar("T")

_LIGHTNING = ("lightning", "pytorch_lightning")
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class DeepSpeedBackend(Backend[DeepSpeedOptions]):
    """Trains with DeepSpeed's ZeRO stages 1 to 3; the module's parameters stay the same objects.

    `setup_optimizers` creates the engine, because DeepSpeed needs module and optimizer together. Without an
    optimizer (validation, prediction) every rank holds the full module.
    """

    Options = DeepSpeedOptions

    def __init__(self, options: DeepSpeedOptions) -> None:
        super().__init__(options)
        self._engine: ZeroEngine | None = None
        self._writes = Writes(lambda: self.is_watched)

    def setup(self, context: ParallelContext) -> None:
        """Let DeepSpeed join the world.

        Raises:
            UnsupportedError: The precision needs masters of another dtype than float32.
        """
        super().setup(context)
        if context.precision not in _PRECISIONS:
            raise UnsupportedError(
                f"DeepSpeed keeps float32 masters; precision={context.precision!r} needs another dtype.",
                remedy=f"Use one of {', '.join(map(repr, _PRECISIONS))}, or strategy 'fsdp_auto'.",
            )
        logging.getLogger("DeepSpeed").setLevel(self.options.logging_level)
        # '16-mixed' is autocast over float32 weights. DeepSpeed's own loss scale would scale the gradients
        # that Trainer clips, and no checkpoint would hold its state.
        self._config = make_config(self.options, bf16=context.precision == "bf16-mixed")
        join_world()
        prepare_operators()

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give every rank rank zero's weights in host memory; `setup_optimizers` moves and shards them."""
        if self._engine is None or self._engine.module is not module:
            materialize(module, torch.device("cpu"), name="")
            broadcast_module(module, through=self.context.device)
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Create the engine from the module and its optimizer; without an optimizer, move the module."""
        if not optimizers:
            if self._engine is None or self._engine.module is not module:
                move_to(module, self.context.device)
            return
        refuse_no_optimizer(module, optimizers, engine="DeepSpeed")
        if len(optimizers) > 1 or self._engine is not None:
            count = max(2, len(optimizers))
            raise UnsupportedError(
                f"DeepSpeed trains one module with one optimizer; there are {count} optimizers.",
                remedy="Use one optimizer with several param groups, or a strategy such as 'fsdp_auto'.",
            )
        self._engine = ZeroEngine(
            module,
            optimizers[0],
            config=self._config,
            rank=self.context.rank,
            local_rank=self.context.local_rank,
            device=self.context.device,
            writes=self._writes,
        )

    def exchange_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse another optimizer than the one with DeepSpeed's partitions.

        Raises:
            UnsupportedError: The optimizer is another one.
        """
        if self._engine is not None and list(optimizers) != [self._engine.optimizer]:
            raise UnsupportedError(
                "another optimizer was assigned while training; DeepSpeed's partitions are fixed when "
                "training begins.",
                remedy="Change the settings in the param groups of the present one, call `fit` once for "
                "each optimizer, or use strategy 'fsdp_auto'.",
            )

    def summary(self, module: nn.Module) -> str:
        """Return DeepSpeed's stage."""
        return f"ZeRO stage {self.options.stage}"

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Gather the masters into the user's parameters and remove DeepSpeed from the module."""
        if self._engine is not None:
            with clean_up("taking DeepSpeed off", self._remove_engine):
                self._engine.agreement.refuse_other_order()
        return {}

    def _remove_engine(self) -> None:
        if self._engine is not None:
            self._engine.remove(self.at_end, with_state=self.gather_at_end == "all")
            self._engine = None  # after an error above, `teardown` cleans up without the other ranks

    def teardown(self) -> None:
        """Restore the process, also after an error on one rank has left the module sharded."""
        if self._engine is not None:
            self._engine.forget()
            restore_globals()
        super().teardown()

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step inside the module's forward, where DeepSpeed's hooks are."""
        if self._engine is None or self._engine.module is not module:
            return step(*args, **kwargs)
        result: T
        if step is module:
            result = self._engine.run(*args, **kwargs)
        else:
            with forward_as(module, step):
                result = self._engine.run(*args, **kwargs)
        return result

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Let DeepSpeed accumulate: more backwards follow before the step."""
        if self._engine is None:
            yield
            return
        self._engine.set_boundary(False)
        try:
            yield
        finally:
            self._engine.set_boundary(True)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients through DeepSpeed.

        Raises:
            UnsupportedError: ``Tensor.backward`` got arguments that DeepSpeed does not accept.
        """
        if self._engine is None:
            raise no_optimizer("DeepSpeed")
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if args or kwargs:
            raise UnsupportedError(
                "DeepSpeed's backward takes a loss and `retain_graph`, nothing else.",
                remedy="Reduce to a scalar loss before backward.",
            )
        self._engine.backward(
            loss,
            partial(super().backward, module),
            retain_graph=retain_graph,
            in_one_go=not _has_own_backward(module),
        )

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Return the reduced gradients of this rank's partitions, or the full ones while they are visible."""
        if self._engine is None:
            return []
        if self._engine.gathered_gradients.are_shown:
            return super().gradients(optimizer)
        return self._engine.partitions.gradients()

    def publish_gradients(self, module: nn.Module) -> None:
        """Gather the reduced gradients; `ZeroEngine.step` reads them after user code."""
        if self._engine is not None:
            self._engine.gathered_gradients.show(self._engine.agreement.unused)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Step through DeepSpeed, with the user's hooks and closure."""
        if self._engine is None or optimizer is not self._engine.optimizer:
            return step(*args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        return self._engine.step(step, closure)

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Describe this rank's shard of a parameter's masters, or of a tensor with a parameter's layout."""
        if self._engine is None:
            return shard_of(tensor)
        partitions = self._engine.partitions
        if isinstance(tensor, nn.Parameter) and tensor in partitions:
            return partitions.master(tensor)
        if parameter is not None and parameter in partitions:
            return partitions.shard_like(parameter, tensor)
        return shard_of(tensor)

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """Return checksums of writes, before a step equalises replicas or drops what other ranks wrote."""
        return {} if self._engine is None else self._engine.written()

    def model_state(self, module: nn.Module) -> ModelState:
        """Return handles on the masters, updated from values that user code has written into the weights."""
        if self._engine is not None:
            self._engine.agreement.refuse_other_order()
            self._engine.take_written_weights(across_devices=True)
        return super().model_state(module)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return handles on this rank's shard of the optimizer state, by parameter name."""
        engine = self._engine
        if engine is None or optimizer is not engine.optimizer:
            return super().optimizer_state(module, optimizer)
        with engine.state.stepping():
            described = super().optimizer_state(module, optimizer)
        names = parameter_names(module)
        states = {names[p]: engine.partitions.state(p, engine.shadow) for p in engine.partitions.parameters()}
        described["state"] = {name: state for name, state in states.items() if state}
        return described

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the optimizer in place."""
        engine = self._engine
        if engine is None or optimizer is not engine.optimizer:
            super().load_optimizer_state(module, optimizer, saved)
            return
        restore_groups(optimizer, parameter_names(module), saved["param_groups"])
        names = {name: parameter for parameter, name in parameter_names(module).items()}
        entries = {names[name]: state for name, state in saved["state"].items()}
        engine.partitions.allocate(entries, engine.shadow)
        state = self.optimizer_state(module, optimizer)
        state["state"] = {
            name: {
                key: value
                for key, value in mine.items()
                if key in saved["state"][name] and _is_sharded(value)
            }
            for name, mine in state["state"].items()
            if name in saved["state"]
        }
        fill_optimizer_tensors(state, saved)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Compute with the loaded weights."""
        if self._engine is not None:
            self._engine.reload()


def _has_own_backward(module: nn.Module) -> bool:
    """Return True if a LightningModule overrides ``backward``, which may run through the model twice."""
    backward = getattr(type(module), "backward", None)
    return backward is not None and backward.__module__.partition(".")[0] not in _LIGHTNING


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Shard) and value.shape != ()
