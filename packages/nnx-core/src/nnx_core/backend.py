"""The contract that an engine implements to become a strategy: one class, no Lightning.

The core calls a backend in this order::

    setup(context)
    module_init_context()            while the user builds the module
    parallelize(module, sample)      lay parameters out; returns old -> new parameters
    setup_optimizers(module, optimizers)
    per step:  run_step, no_sync, backward, clip_grad_norm / clip_grad_value, optimizer_step;
               publish_gradients and collect_gradients around user code that may read ``p.grad``
    state(), allocate_optimizer_state(), finish_load()
    teardown(module)

All members except `parallelize` and `unparallelize` have a default for engines whose parameters are plain
tensors or DTensors on the user's own module. ``docs/backend-contract.md`` shows four different engines.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base.ranks import broadcast_tensor, is_distributed
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.reading.state import (
    ModelState,
    OptimizerState,
    State,
    describe_model,
    describe_optimizer,
    new_state_tensor,
)
from nnx_core.optimizers.failed_backward import FailedBackward
from nnx_core.optimizers.gradients import (
    Gradient,
    ParallelGradScaler,
    clip_gradients_by_norm,
    clip_gradients_by_value,
    gradients_of,
    refuse_complex_clamp,
)
from nnx_core.options import GatherAtEnd

__all__ = ["Backend", "Call", "NoOptions", "ParallelContext", "Sample", "first_call"]

OptionsT = TypeVar("OptionsT")
T = TypeVar("T")

Sample = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
"""Returns positional and keyword example inputs of the module's forward; only tracing engines call it."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a module's forward.

    Attributes:
        module: The called module: the root, or the submodule that its steps call in its place.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def first_call(module: nn.Module, sample: Sample) -> Call:
    """Return the first call of the model in a step.

    Trainer's sample runs the running stage's step on the first batch up to that call, because
    ``training_step`` may unpack the batch before it calls ``self(x)``, or call ``self.model(x)`` instead. Any
    other sample returns inputs of the root's forward.
    """
    find: Callable[[], Call] | None = getattr(sample, "first_call", None)
    return find() if find is not None else Call(module, *sample())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """The rank of this process, its device and its precision.

    Attributes:
        device: The device of this rank.
        rank: The global rank.
        world_size: The number of ranks.
        local_rank: The rank within the node.
        local_world_size: The number of ranks on each node.
        num_nodes: The number of nodes.
        precision: Lightning's precision string, such as ``"bf16-mixed"``, for information; the precision
            plugin applies it.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    precision: str = "32-true"


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of an engine without options of its own."""


class Backend(ABC, Generic[OptionsT]):
    """One way of distributing a model.

    Args:
        options: An instance of the class's `Options`, checked by its own ``__post_init__``.

    Attributes:
        Options: A frozen dataclass of the engine's keyword-only options; by default without options.
        context: The `ParallelContext`; `setup` sets it.
        evaluation_without_inference_mode: True if evaluation must run under ``no_grad``, because the engine
            would store tensors of inference mode in its parameters.
        reduces_in_backward: True if only `backward` reduces gradients. Trainer then refuses
            ``loss.backward()`` in manual optimization.
        own_batch: The option that gives each rank batches of its own, for engines whose ranks share batches.
        data_order: The number added to the seed of samplers that Lightning injects. Each process of an engine
            without ranks has its own, because it reads all data.
        gather_at_end: The ranks that hold unsharded weights after the run; set by the adapter.
        is_watched: True if the ranks are compared after this step; set by `nnx_core.agree.divergence`.
    """

    Options: ClassVar[type[Any]] = NoOptions
    evaluation_without_inference_mode: ClassVar[bool] = True
    reduces_in_backward: ClassVar[bool] = False
    own_batch: ClassVar[str] = ""
    data_order: int = 0
    context: ParallelContext
    gather_at_end: GatherAtEnd = "all"
    is_watched: bool = False

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class and its options: groups, hooks and laid-out modules stay in this process."""
        return type(self), (self.options,)

    def setup(self, context: ParallelContext) -> None:
        """Create meshes and groups for this rank. Collective; the world group exists.

        Raises:
            UnsupportedError: The device, precision or world size is not supported.
        """
        self.context = context

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """The share of the data that this rank reads; ranks that compute a sample together share it."""
        return self.context.rank, self.context.world_size

    def share_before_setup(
        self, *, rank: int, world_size: int, local_world_size: int
    ) -> tuple[int, int] | None:
        """Predict `data_parallel_rank_and_size` before `setup`, for loaders that are made earlier.

        The default is None, for unknown, if the engine overrides `data_parallel_rank_and_size`.
        """
        has_own = type(self).data_parallel_rank_and_size is not Backend.data_parallel_rank_and_size
        return None if has_own else (rank, world_size)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the user's module is built, to shard or wrap at construction."""
        return nullcontext()

    @abstractmethod
    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Lay the module out over the ranks, in place, and move it to the device. Collective.

        The module keeps its class behaviour, its parameter and submodule names and its hooks.
        Calling it again on a module that is already laid out must change nothing.

        Args:
            module: The user's module, built alike on every rank. Rank zero's values are broadcast. Parameters
                may be on the meta device.
            sample: Returns example inputs.

        Returns:
            The replacement of every replaced parameter object, to update existing optimizers.
        """

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take over optimizers over the module's current parameters; their objects stay the user's.

        Called after `parallelize`, with an empty sequence when there is nothing to train. An engine that
        needs module and optimizers together (DeepSpeed) does its work here.
        """

    def exchange_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take over optimizers after user code has replaced some of them during training.

        Called before the next step of any rank. The default does nothing, for engines in which any optimizer
        can step the module's parameters.

        Args:
            module: The laid-out module.
            optimizers: All current optimizers; some may be known already.
        """

    @abstractmethod
    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Restore the module's plain, unsharded parameters, its class and its methods. Collective.

        It must also succeed on a module that was never laid out. An engine gathers parameters one by one,
        each through `at_end`, so that no device holds the unsharded model.

        Returns:
            The replacement of every replaced parameter object.
        """

    @property
    def keeps_weights(self) -> bool:
        """True if this rank's module has unsharded weights after the run."""
        return self.gather_at_end == "all" or (self.gather_at_end == "rank0" and self.context.rank == 0)

    def at_end(self, gather: Callable[[], Tensor], *, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor that this rank keeps at the end of the run. Collective.

        Args:
            gather: Returns the unsharded tensor, on any device. Collective; called if any rank keeps it.
            shape: The shape of the unsharded tensor.
            dtype: The dtype of the unsharded tensor.

        Returns:
            The unsharded tensor in CPU memory, or a placeholder of its shape that takes no memory.
        """
        unsharded = None if self.gather_at_end == "none" else gather()
        if unsharded is not None and self.keeps_weights:
            return unsharded.cpu()
        return torch.full((1,) * len(shape), math.nan).to(dtype).expand(tuple(shape))

    def teardown(self) -> None:
        """Release threads and files; `setup` may follow again. The backend does not own the world group."""

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one training or evaluation step through the engine; the default just calls it."""
        return step(*args, **kwargs)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward accumulates without communication, if the engine can."""
        return nullcontext()

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; arguments after the loss are those of ``Tensor.backward``.

        Under a Trainer this calls the LightningModule's own ``backward``. Engines that override this method
        call it inside theirs, so that a user's ``backward`` runs there, too.
        """
        run: Callable[..., Any] = loss.backward
        if getattr(module, "fabric", module) is None:  # a LightningModule without Fabric
            run = partial(cast(Any, module).backward, loss)
        self.failed_backward.refuse()
        with self.failed_backward.remembering():
            run(*args, **kwargs)

    @cached_property
    def failed_backward(self) -> FailedBackward:
        """Refuses a step on gradients of a failed backward; the adapters register optimizers with it."""
        return FailedBackward()

    def publish_gradients(self, module: nn.Module) -> None:
        """Set each ``p.grad`` to the reduced, unsharded gradient, as in one process. Collective.

        Called after a backward that reduced gradients, if user code may read them before the step: it
        overrides a hook of the module or of a callback, or it uses manual optimization. Until
        `collect_gradients` the engine's `gradients` are those in ``p.grad``, and another backward accumulates
        into them. The default does nothing, for engines with gradients in ``p.grad``.
        """

    def collect_gradients(self, module: nn.Module) -> None:
        """Take over published gradients, which user code may have scaled, zeroed or removed. Collective.

        Called right before each step of an optimizer, after the last user code. It does nothing if no
        gradients were published since the last call.
        """

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Return handles on the local gradients of the optimizer's parameters.

        Clipping and loss scaling use these handles, so an engine that keeps gradients outside of
        ``param.grad`` overrides only this method.
        """
        return gradients_of(optimizer, world_size=self.context.world_size)

    def clip_grad_norm(
        self,
        optimizer: Optimizer,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`. Collective.

        Returns:
            The norm before clipping, a 0-d float32 (or float64) tensor, equal on every rank.
        """
        return clip_gradients_by_norm(
            self.gradients(optimizer),
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            device=self.context.device,
        )

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every gradient element into ``[-clip_value, clip_value]``.

        Raises:
            UnsupportedError: A parameter is complex, or a gradient sparse.
        """
        refuse_complex_clamp(optimizer)
        clip_gradients_by_value(self.gradients(optimizer), clip_value)

    def grad_scaler(self, default: torch.amp.GradScaler) -> torch.amp.GradScaler | None:
        """Return the loss scaler to use in place of `default`; None if the engine scales by itself.

        The default unscales `gradients` and takes the same decision on every rank.
        """
        if isinstance(default, ParallelGradScaler):
            return default
        return ParallelGradScaler(self.gradients, self.context.device, replaces=default)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the optimizer's step (already bound to its closure); an engine may defer or overlap it."""
        return step(*args, **kwargs)

    def decisions(self, module: nn.Module) -> str:
        """Return the engine's decisions about a laid-out module, which must be equal on all ranks, as text.

        `nnx_core.agree.divergence` compares it over the ranks: a plan, or the names of the units.
        """
        return ""

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """Return a checksum of user code's writes into each parameter since the last call, by name.

        `nnx_core.agree.divergence` compares it over the ranks. An engine returns it if each rank keeps only
        its own shard of its writes, or if a step replaces a rank's writes by another rank's values. It
        computes it only while it `is_watched`; `nnx_core.agree.divergence.Writes` does so.
        """
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Return numbers of the last optimizer step, which Trainer logs as often as loggers write values."""
        return {}

    def summary(self, module: nn.Module) -> str:
        """Summarize a laid-out module in a clause such as ``4 units and the root``.

        Rank zero logs it at the beginning of a run.
        """
        return ""

    def shard(self, tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
        """Return the boxes of a tensor of this rank in its logical tensor.

        Engines that keep local shards as plain tensors override this.

        Args:
            tensor: A parameter, a buffer, or a tensor of an optimizer's state.
            parameter: The parameter that it belongs to, if it is optimizer state.
        """
        return shard_of(tensor)

    def model_state(self, module: nn.Module) -> ModelState:
        """Return handles on parameters and persistent buffers by name, without copy or gather."""
        return describe_model(module, self.shard)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return handles on the optimizer's state by parameter name, without copy, gather or dummy step."""
        return describe_optimizer(module, optimizer, self.shard)

    def state(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> State:
        """Return handles on this rank's training state, which the core saves or fills in place."""
        return State(
            model=self.model_state(module),
            optimizers=[self.optimizer_state(module, optimizer) for optimizer in optimizers],
        )

    def new_optimizer_state(
        self,
        parameter: nn.Parameter,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        group: Mapping[str, Any],
    ) -> Tensor:
        """Allocate a state tensor that a checkpoint holds and the optimizer does not have yet.

        Args:
            parameter: The parameter that it belongs to, in the optimizer.
            name: Its name in the optimizer's state, such as ``exp_avg``.
            shape: The logical shape of the state tensor.
            dtype: The dtype of the state tensor.
            group: The param group, with options such as ``fused`` and ``capturable``.
        """
        like_parameter = shape == self.shard(parameter).shape
        return new_state_tensor(
            parameter, name, shape=shape, like_parameter=like_parameter, dtype=dtype, group=group
        )

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore one optimizer in place, without communication: each rank fills its own tensors.

        Engines whose optimizer does not hold the module's own parameters override this method.

        Args:
            module: Owner of the parameters.
            optimizer: The optimizer to restore.
            saved: The state by parameter name, with unsharded tensors, or handles on them
                (`nnx_checkpoint.reading.naming.StoredName`).
        """
        from nnx_checkpoint.reading.filling import fill_optimizer

        fill_optimizer(self, module, optimizer, saved)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refresh derived state after the state was filled in place."""

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank zero's buffers: evaluation and checkpoints must not depend on the rank."""
        if not is_distributed():
            return
        buffers = [buffer for buffer in module.buffers() if not isinstance(buffer, DTensor)]
        for buffer in buffers:
            broadcast_tensor(buffer)
