"""The contract that an engine implements to become a strategy: one class, no Lightning.

The core calls a backend in this order::

    setup(context)
    module_init_context()            while the user builds the module
    parallelize(module, sample)      lay parameters out; returns old -> new parameters
    setup_optimizers(module, optimizers)
    per step:  run_step, no_sync, backward, clip_grad_norm / clip_grad_value, optimizer_step;
               publish_gradients and collect_gradients around code of the user's that may look at ``p.grad``
    state(), allocate_optimizer_state(), finish_load()
    teardown(module)

Everything but `parallelize` and `unparallelize` has a default that suits engines whose parameters
are plain tensors or DTensors on the user's own module. ``docs/backend-contract.md`` shows how four
very different engines sit on it.
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
"""Yields positional and keyword example inputs of the module's forward; only tracing engines call it."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a module's forward.

    Attributes:
        module: The module that is called: the root, or the submodule that its steps call in its place.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def first_call(module: nn.Module, sample: Sample) -> Call:
    """The call of the model that a step begins with, as far as the sample knows it.

    Trainer's sample looks at what the running stage's step does with the first batch, because
    ``training_step`` may take the batch apart before it calls ``self(x)``, or call ``self.model(x)`` instead.
    Any other sample yields inputs of the root's forward.
    """
    find: Callable[[], Call] | None = getattr(sample, "first_call", None)
    return find() if find is not None else Call(module, *sample())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """The place of this process among the others, its device and its precision.

    Attributes:
        device: The device of this rank.
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank within the node.
        local_world_size: Ranks on each node.
        num_nodes: Number of nodes.
        precision: Lightning's precision string, such as ``"bf16-mixed"``; for information, the
            precision plugin applies it.
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
    """The options of an engine that has none of its own."""


class Backend(ABC, Generic[OptionsT]):
    """One way of distributing a model.

    Args:
        options: An instance of the class's `Options`, checked by its own ``__post_init__``.

    Attributes:
        Options: Frozen dataclass of the engine's keyword-only options; none unless the engine says so.
        context: Set by `setup`.
        evaluation_without_inference_mode: True if evaluation must run under ``no_grad``, because tensors
            made in inference mode would end up in the engine's parameters.
        reduces_in_backward: True if gradients are reduced only where they come by `backward`. Trainer then
            refuses ``loss.backward()`` in manual optimization, where nothing would reduce them.
        own_batch: The option that lets each rank read batches of its own, where ranks may share one.
        gather_at_end: The ranks that hold whole weights after the run; set by the adapter.
        is_watched: True if the ranks are compared after this step; set by `nnx_core.agree.watch`.
    """

    Options: ClassVar[type[Any]] = NoOptions
    evaluation_without_inference_mode: ClassVar[bool] = True
    reduces_in_backward: ClassVar[bool] = False
    own_batch: ClassVar[str] = ""
    context: ParallelContext
    gather_at_end: GatherAtEnd = "all"
    is_watched: bool = False

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class and its options: groups, hooks and laid-out modules stay in this process."""
        return type(self), (self.options,)

    def setup(self, context: ParallelContext) -> None:
        """Take this rank's place: create meshes and groups. Collective; the world group exists.

        Raises:
            UnsupportedError: The device, precision or world cannot be served.
        """
        self.context = context

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        """Which share of the data this rank reads: ranks that work on one sample together agree."""
        return self.context.rank, self.context.world_size

    def share_before_setup(
        self, *, rank: int, world_size: int, local_world_size: int
    ) -> tuple[int, int] | None:
        """Predict `data_parallel_rank_and_size` before `setup`, for loaders that are made earlier.

        By default None, for not known yet, where the engine has a `data_parallel_rank_and_size` of its own.
        """
        has_own = type(self).data_parallel_rank_and_size is not Backend.data_parallel_rank_and_size
        return None if has_own else (rank, world_size)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Active while the user's module is built, for engines that shard or wrap at construction."""
        return nullcontext()

    @abstractmethod
    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Lay the module out over the ranks, in place, and move it to the device. Collective.

        The module keeps its class behaviour, its parameter and submodule names and its hooks.
        Calling it again on a module that is already laid out must change nothing.

        Args:
            module: The user's module, built alike on every rank. Where its values differ, those of rank 0
                count on all of them. Parameters may be on the meta device.
            sample: Lazily yields example inputs.

        Returns:
            For every parameter object that was replaced, the object that took its place, so that
            optimizers built earlier can be re-pointed.
        """

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take over optimizers over the module's current parameters; their objects stay the user's.

        Called after `parallelize`, with an empty sequence when there is nothing to train. An engine that
        needs module and optimizers together (DeepSpeed) does its work here.
        """

    def exchange_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take over the optimizers that user code has put in the place of others while training.

        Called before the next step of any rank. The default does nothing, which is right where any optimizer
        may step the module's parameters.

        Args:
            module: The module that was laid out.
            optimizers: All that there are now; some may be of those before.
        """

    @abstractmethod
    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give the module its plain parameters, class and methods back, complete on every rank.

        Collective. It must also succeed on a module that was never laid out. An engine that gathers
        parameters does so one by one, each through `at_end`, so that no device holds the whole model.

        Returns:
            For every parameter object that was replaced, the object that took its place.
        """

    @property
    def keeps_weights(self) -> bool:
        """True if this rank's module has whole weights after the run."""
        return self.gather_at_end == "all" or (self.gather_at_end == "rank0" and self.context.rank == 0)

    def at_end(self, gather: Callable[[], Tensor], *, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor that this rank keeps at the end of the run. Collective.

        Args:
            gather: Yields the complete tensor, on any device. Collective; called where some rank keeps it.
            shape: The shape of the complete tensor.
            dtype: The dtype of the complete tensor.

        Returns:
            The complete tensor in host memory, or a placeholder of its shape that takes no memory.
        """
        whole = None if self.gather_at_end == "none" else gather()
        if whole is not None and self.keeps_weights:
            return whole.cpu()
        return torch.full((1,) * len(shape), math.nan).to(dtype).expand(tuple(shape))

    def teardown(self) -> None:
        """Release threads and files; `setup` may follow again. The world group is not the backend's."""

    def run_step(self, module: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one training or evaluation step through the engine; by default it is just called."""
        return step(*args, **kwargs)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward accumulates without communication, if the engine can."""
        return nullcontext()

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; arguments after the loss are those of ``Tensor.backward``.

        A LightningModule's own ``backward`` is called where a Trainer runs it. Engines that override this
        method come here in its middle, so that they honour it as well.
        """
        run: Callable[..., Any] = loss.backward
        if getattr(module, "fabric", module) is None:  # a LightningModule, in which Fabric names itself
            run = partial(cast(Any, module).backward, loss)
        self.failed_backward.refuse()
        with self.failed_backward.remembering():
            run(*args, **kwargs)

    @cached_property
    def failed_backward(self) -> FailedBackward:
        """Refuses a step on what a failed backward has left; the adapters watch optimizers for it."""
        return FailedBackward()

    def publish_gradients(self, module: nn.Module) -> None:
        """Put into each ``p.grad`` what PyTorch would have there now: whole and reduced. Collective.

        Called after a backward that reduced gradients, where user code may look at them before the step: a
        hook of the module or of a callback is overridden, or the user optimizes by hand. From now on until
        `collect_gradients` the engine's `gradients` are those in ``p.grad``, and another backward adds to
        what user code left there. By default nothing, as gradients are in ``p.grad`` anyway.
        """

    def collect_gradients(self, module: nn.Module) -> None:
        """Take over what user code left in published gradients: scaled, clipped, zeroed or None. Collective.

        Called right before each step of an optimizer, after the last code of the user's; it does nothing
        where nothing was published since the last call.
        """

    def gradients(self, optimizer: Optimizer) -> list[Gradient]:
        """Handles on the local gradients of the optimizer's parameters, where they live.

        Clipping and loss scaling are written over these, so an engine that keeps gradients elsewhere
        than in ``param.grad`` overrides only this.
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
        """The loss scaler to use where Lightning would use `default`; None if the engine scales by itself.

        By default one that unscales `gradients` and takes the same decision on every rank.
        """
        if isinstance(default, ParallelGradScaler):
            return default
        return ParallelGradScaler(self.gradients, self.context.device, replaces=default)

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the optimizer's step (already bound to its closure); an engine may defer or overlap it."""
        return step(*args, **kwargs)

    def decisions(self, module: nn.Module) -> str:
        """Return the engine's decisions about a laid-out module, which must be equal on all ranks, as text.

        `nnx_core.agree.watch` compares it over the ranks: a plan, or the names of the units.
        """
        return ""

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """A checksum of what user code wrote into each parameter since the last call, by name.

        `nnx_core.agree.watch` compares it over the ranks. An engine returns it where each rank keeps only its
        own shard of its writes, or where a step replaces a rank's writes by another rank's values. It
        computes it only while it `is_watched`; `nnx_core.agree.watch.Writes` does so.
        """
        return {}

    def summary(self, module: nn.Module) -> str:
        """Summarize a laid-out module in a clause such as ``4 units and the root``.

        It is part of the one line that a run begins with, on rank 0.
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
        """Handles on parameters and persistent buffers under their original names. No copy, no gather."""
        return describe_model(module, self.shard)

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Handles on the optimizer's state, keyed by parameter name. No copy, no gather, no dummy step."""
        return describe_optimizer(module, optimizer, self.shard)

    def state(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> State:
        """The whole training state of this rank, as handles; the core saves it or fills it in place."""
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
        """Allocate one state tensor that a checkpoint holds and the optimizer does not have yet.

        Args:
            parameter: The parameter it belongs to, as the optimizer holds it.
            name: Its name in the optimizer's state, such as ``exp_avg``.
            shape: Logical shape of the state tensor.
            dtype: Its dtype.
            group: The param group, for switches such as ``fused`` and ``capturable``.
        """
        like_parameter = shape == self.shard(parameter).shape
        return new_state_tensor(
            parameter, name, shape=shape, like_parameter=like_parameter, dtype=dtype, group=group
        )

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore one optimizer in place. It must not communicate: each rank fills its own tensors.

        Engines whose optimizer does not hold the module's own parameters override this.

        Args:
            module: Owner of the parameters.
            optimizer: The optimizer to restore.
            saved: By parameter name; tensors are complete, or handles
                (`nnx_checkpoint.reading.naming.StoredName`).
        """
        from nnx_checkpoint.reading.filling import fill_optimizer

        fill_optimizer(self, module, optimizer, saved)

    def finish_load(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refresh derived state, after state was filled in place."""

    def sync_buffers(self, module: nn.Module) -> None:
        """Give every rank rank 0's buffers, as evaluation and checkpoints must not depend on the rank."""
        if not is_distributed():
            return
        buffers = [buffer for buffer in module.buffers() if not isinstance(buffer, DTensor)]
        for buffer in buffers:
            broadcast_tensor(buffer)
