"""Step the user's optimizer over the master weights of chunks, at once or chunk by chunk in the background.

The backend's ``optimizer_step`` calls `Stepper`. The user's ``step`` always runs exactly once, with its
closure, its hooks and the wrappers of schedulers. `Stepper` only changes the parameters that it finds.

Steps in the background run on one thread, `Background`. Each chunk has a `Share` of a step, and a `Ticket`
that the main thread waits for before it uses the chunk.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nnx_colossalai._torch_compat import has_hooks_that_see_the_result, without_guards
from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.optimizers import (
    DeepSpeedAdam,
    groups_for_step,
    in_host_memory,
    needs_full_tensors,
    steps_each_parameter,
)
from nnx_core._torch_compat import shadow_of
from nnx_core.errors import NnxError
from nnx_core.optimizers.step_arguments import take_closure
from nnx_core.options import check_choice
from nnx_core.view.hidden_optimizer_state import held_state
from nnx_core.view.pending import guard_pending, unguard_pending

T = TypeVar("T")
Overlap = Literal["none", "exact"]
CpuAdam = Literal["torch", "deepspeed"]
log = logging.getLogger("nnx.colossalai")


class Stepper:
    """Steps optimizers over the masters of chunks, and refreshes the chunks' working weights.

    Args:
        chunks: The chunks of the model. The attribute may be set again when chunks have moved.
        overlap: "exact" steps offloaded chunks in a background thread, in the order of the next forward.
            A forward waits for its own chunk only. The result is bitwise that of "none".
        cpu_adam: The kernel that steps Adam and AdamW in host memory.
        device: The device of this rank.
        show_masters: A function that shows the masters after a closure, whose forward may have left working
            weights on the parameters.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        overlap: Overlap = "none",
        cpu_adam: CpuAdam = "torch",
        device: torch.device | None = None,
        show_masters: Callable[[], None] = lambda: None,
    ) -> None:
        check_choice("overlap", overlap, ("none", "exact"))
        check_choice("cpu_adam", cpu_adam, ("torch", "deepspeed"))
        self.chunks = chunks
        self._show_masters = show_masters
        self._overlaps = overlap == "exact"
        self._deepspeed = DeepSpeedAdam() if cpu_adam == "deepspeed" else None
        self._background = Background(device)
        self._guarded: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()
        self._logged: set[str] = set()

    def setup_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Register state dict hooks that wait for background steps; call it before the first step."""
        if not self._overlaps:
            return
        for optimizer in optimizers:
            if optimizer not in self._guarded:
                self._guarded[optimizer] = (
                    optimizer.register_state_dict_pre_hook(lambda _: self.finish()),
                    optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish()),
                )

    def step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one step of an optimizer.

        Args:
            optimizer: The user's optimizer.
            step: Its bound ``step``, which runs exactly once.
            args: The arguments of ``step``, such as a closure that runs forward and backward.
            kwargs: The keyword arguments of ``step``.

        Returns:
            The result of ``step``.

        Raises:
            OptimizerStepError: An earlier step failed in the background.
        """
        if not steps_each_parameter(step):
            return self._step_unknown(optimizer, step, *args, **kwargs)
        given = take_closure(args, kwargs)
        touched: list[Chunk] = []

        # torch's steps call the closure first and read param_groups after it. Only in between are gradients
        # complete and groups still exchangeable, and the user's own pre-step hooks have run.
        def closure_then_take_over() -> Any:
            loss = None if given.closure is None else given.closure()
            self._show_masters()
            with torch.no_grad(), without_guards():
                self._take_over(optimizer, touched)
            return loss

        with _groups_kept(optimizer):
            result = step(closure_then_take_over, *given.args, **given.kwargs)
        for chunk in touched:
            chunk.refresh()
        return result

    def _step_unknown(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a step that may read any parameter and call its closure several times, on this thread."""
        self._log_once(optimizer, "its step is not a per-parameter step of torch.optim")
        self.finish()
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        chunks = [chunk for chunk in self.chunks if not own.isdisjoint(chunk.masters.values())]
        given = take_closure(args, kwargs)
        if given.closure is not None:
            args, kwargs = given.calling(self._at_new_weights(given.closure, chunks))
        self._show_masters()
        result = step(*args, **kwargs)
        self.finish()
        for chunk in chunks:
            chunk.refresh()
        return result

    def _at_new_weights(self, closure: Callable[[], Any], chunks: Sequence[Chunk]) -> Callable[[], Any]:
        """Return a closure that refreshes the working weights before its second and later calls."""
        first = True

        def evaluate() -> Any:
            nonlocal first
            if not first:
                for chunk in chunks:
                    chunk.refresh()
            first = False
            loss = closure()
            self._show_masters()
            return loss

        return evaluate

    def _take_over(self, optimizer: Optimizer, touched: list[Chunk]) -> None:
        """Split the step after the closure: the optimizer keeps some parameters, shares step the others.

        Args:
            optimizer: The optimizer; its ``param_groups`` are replaced until its step ends.
            touched: A list that receives the chunks to refresh after the step.
        """
        by_chunk = _groups_with_gradients(optimizer, self.chunks)
        overlaps = self._can_overlap(optimizer)
        if not overlaps:
            # This thread is about to read state that a pending step may still write.
            self._background.finish()
        now: dict[Chunk, ChunkGroups] = {}
        later: dict[Chunk, ChunkGroups] = {}
        for chunk, groups in by_chunk.items():
            # A step in host memory is slow enough for the background; one on the device is quick.
            if overlaps and chunk.tier.steps_on_host and _is_in_host_memory(groups):
                later[chunk] = groups
                continue
            touched.append(chunk)
            if self._steps_as_share(optimizer, groups):
                now[chunk] = groups
        shares = self._take_shares(optimizer, {**now, **later})
        # The user's own step finds only the parameters that no share steps; `_groups_kept` restores the rest.
        optimizer.param_groups = _without(optimizer, (*now.values(), *later.values()))
        optimizer.param_groups = groups_for_step(optimizer)
        for share in shares[: len(now)]:
            self._step_share(optimizer, share)
        if later:
            # Submit last, so that the optimizer's state begins with the same parameters on all ranks.
            self._background.submit(optimizer, shares[len(now) :], self._step_and_refresh)

    def _steps_as_share(self, optimizer: Optimizer, groups: ChunkGroups) -> bool:
        """Return True if a share, not the optimizer's own step, must step these parameters at once."""
        if self._deepspeed is not None and self._deepspeed.serves(optimizer):
            return _is_in_host_memory(groups)
        # Most fused kernels reject DTensors, but all of them can step the local shard.
        if not _is_sharded(parameter for _, parameters in groups for parameter in parameters):
            return False
        needs_own_step = needs_full_tensors(optimizer) or _reason_for_own_step(optimizer) is not None
        return not needs_own_step and _is_in_host_memory(groups)

    def _take_shares(self, optimizer: Optimizer, by_chunk: Mapping[Chunk, ChunkGroups]) -> list[Share]:
        # A pending first step of a parameter has not written its state yet: a share taken now would lack it.
        self._background.wait_for(
            parameter for groups in by_chunk.values() for _, parameters in groups for parameter in parameters
        )
        return [take_share(chunk, optimizer, groups) for chunk, groups in by_chunk.items()]

    def _step_and_refresh(self, optimizer: Optimizer, share: Share) -> None:
        self._step_share(optimizer, share)
        share.chunk.refresh()

    def _step_share(self, optimizer: Optimizer, share: Share) -> None:
        """Step one chunk with the optimizer's own class and settings."""
        # A shadow over the share's aliases: the main thread may change the real optimizer's groups meanwhile.
        shadow = shadow_of(optimizer, share.groups, share.state)
        if self._deepspeed is not None and self._deepspeed.serves(shadow):
            self._deepspeed.step(shadow)
        shadow.param_groups = groups_for_step(shadow)
        shadow.step()
        write_back_state(share, optimizer)

    def _can_overlap(self, optimizer: Optimizer) -> bool:
        if not self._overlaps:
            return False
        reason = _reason_against(optimizer)
        if reason is not None:
            self._log_once(optimizer, reason)
        return reason is None

    def _log_once(self, optimizer: Optimizer, reason: str) -> None:
        message = f"{type(optimizer).__name__} does not step in the background: {reason}."
        if self._overlaps and message not in self._logged:
            self._logged.add(message)
            log.info(message)

    def finish(self) -> None:
        """Wait until every submitted step is complete.

        Raises:
            OptimizerStepError: A step failed, and its error was not raised yet.
        """
        self._background.finish()

    def close(self) -> None:
        """Wait for all steps, end the thread, and remove the hooks of the optimizers."""
        self._background.close()
        for handles in self._guarded.values():
            for handle in handles:
                handle.remove()
        self._guarded.clear()
        self.finish()


ChunkGroups = list[tuple[dict[str, Any], list[nn.Parameter]]]
"""Param groups, each with the parameters that are in one chunk and have a gradient."""


@contextmanager
def _groups_kept(optimizer: Optimizer) -> Iterator[None]:
    """Restore the optimizer's own list of param groups at the end."""
    groups = optimizer.param_groups
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _groups_with_gradients(optimizer: Optimizer, chunks: Iterable[Chunk]) -> dict[Chunk, ChunkGroups]:
    """Return the parameters that the optimizer will change, by chunk."""
    # The order of the next forward: the chunk that it waits for first is stepped first.
    ordered = sorted(chunks, key=lambda chunk: chunk.index)
    chunk_of = {parameter: chunk for chunk in ordered for parameter in chunk.masters.values()}
    by_chunk: dict[Chunk, ChunkGroups] = {chunk: [] for chunk in ordered}
    for group in optimizer.param_groups:
        inside: dict[Chunk, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None and parameter in chunk_of:
                inside.setdefault(chunk_of[parameter], []).append(parameter)
        for chunk, parameters in inside.items():
            by_chunk[chunk].append((group, parameters))
    return {chunk: groups for chunk, groups in by_chunk.items() if groups}


def _is_in_host_memory(groups: ChunkGroups) -> bool:
    return all(in_host_memory(parameter) for _, parameters in groups for parameter in parameters)


def _without(optimizer: Optimizer, taken: Iterable[ChunkGroups]) -> list[dict[str, Any]]:
    """Return the optimizer's groups without the parameters that shares step."""
    gone = {parameter for groups in taken for _, parameters in groups for parameter in parameters}
    if not gone:
        return optimizer.param_groups
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter not in gone]}
        for group in optimizer.param_groups
    ]
    return [group for group in groups if group["params"]]


def _is_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _reason_for_own_step(optimizer: Optimizer) -> str | None:
    """Return the reason why no shadow may step for the optimizer; None if it may."""
    for switch in ("capturable", "differentiable"):
        if any(group.get(switch) for group in optimizer.param_groups):
            return f"a param group has {switch}=True"
    if any(getattr(optimizer, name, None) is not None for name in ("found_inf", "grad_scale")):
        return "it checks for overflow itself"
    return None


def _reason_against(optimizer: Optimizer) -> str | None:
    """Return the reason why a step cannot run in the background; None if it can."""
    reason = _reason_for_own_step(optimizer)
    if reason is not None:
        return reason
    if has_hooks_that_see_the_result(optimizer):
        return "a step hook may look at the result"
    sharded = _is_sharded(parameter for group in optimizer.param_groups for parameter in group["params"])
    if sharded and needs_full_tensors(optimizer):
        # Collectives of two threads could be issued in different orders on different ranks.
        return "it communicates to step sharded parameters"
    return None


class OptimizerStepError(NnxError, RuntimeError):
    """An optimizer failed in the background thread; the next use of the chunk raises it.

    Attributes:
        seen: True if it was raised already, so that cleanup does not raise it again.
    """

    seen = False


@dataclass(slots=True, eq=False)
class Share:
    """One chunk's share of a step: aliases of its masters and gradients, taken on the main thread.

    The parameter objects may change before the background steps the share: ``data`` shows working weights,
    and ``zero_grad`` drops gradients. The aliases keep the masters and gradients of the submitted step.

    Attributes:
        chunk: The chunk whose masters are stepped.
        groups: Param groups with the settings of this step, over aliases of the local shards.
        state: The state of the optimizer, by alias; its tensors are local shards.
        owners: The parameter of each alias.
    """

    chunk: Chunk
    groups: list[dict[str, Any]] = field(default_factory=list)
    state: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    owners: dict[Tensor, nn.Parameter] = field(default_factory=dict)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the elements on this rank: a detached tensor that shares memory with `tensor`."""
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard.detach()


def take_share(
    chunk: Chunk, optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], list[nn.Parameter]]]
) -> Share:
    """Return the masters, gradients, settings and state for the step of a chunk.

    Args:
        chunk: The chunk to be stepped.
        optimizer: The optimizer that steps it.
        groups: Param groups, each with its parameters that are in the chunk and have a gradient.
    """
    share, held = Share(chunk), held_state(optimizer)
    for group, parameters in groups:
        aliases = []
        for parameter in parameters:
            alias = local_shard(parameter)
            alias.grad = local_shard(parameter.grad)  # type: ignore[arg-type] # those with a gradient only
            share.owners[alias] = parameter
            share.state[alias] = _local_state(held.get(parameter, {}))
            aliases.append(alias)
        share.groups.append({**_copied(group), "params": aliases})
    return share


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    # Clones, because a scheduler changes a learning rate that is a tensor in place.
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: local_shard(value) if isinstance(value, DTensor) else value for key, value in state.items()}


def write_back_state(share: Share, optimizer: Optimizer) -> None:
    """Add new state entries of a step to the optimizer; existing tensors were changed in place."""
    held = held_state(optimizer)
    for alias, parameter in share.owners.items():
        stepped = share.state[alias]
        if not stepped:
            continue
        own = held[parameter]
        for key, value in stepped.items():
            if key not in own or _is_replaced(own[key], value):
                own[key] = _sharded_like(parameter, alias, value)


def _is_replaced(own: Any, stepped: Any) -> bool:
    if isinstance(own, DTensor) and isinstance(stepped, Tensor):
        # Each call of local_shard makes a new tensor object, so only the memory tells.
        return bool(local_shard(own).data_ptr() != stepped.data_ptr())
    return own is not stepped


def _sharded_like(parameter: Tensor, alias: Tensor, value: Any) -> Any:
    """Return state of the parameter's shape as a DTensor that is sharded like the parameter."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != alias.shape or not alias.dim():
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class Ticket:
    """One pending step of a chunk; the main thread waits for it before it uses the chunk.

    Attributes:
        over: Set when the background thread has stepped the chunk, or failed.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self._error: OptimizerStepError | None = None

    def finish(self, error: OptimizerStepError | None = None) -> None:
        """Release the waiters, with the error if the step failed; the background thread calls it."""
        # The error first: a waiter reads it as soon as the event is set.
        self._error = error
        self.over.set()

    def wait(self) -> None:
        """Wait until the chunk is stepped.

        Raises:
            OptimizerStepError: The step failed.
        """
        self.over.wait()
        if self._error is not None:
            self._error.seen = True
            raise self._error

    @property
    def has_succeeded(self) -> bool:
        """True if the chunk is stepped, without an error."""
        return self.over.is_set() and self._error is None


def _guard_gradient(parameter: nn.Parameter, ticket: Ticket) -> None:
    """Make every use of the gradient wait for its step, except setting ``grad`` to None."""
    # The thread still reads the gradient: an in-place change such as zero_() would reach the step.
    gradient = cast("nn.Parameter", parameter.grad)
    held = weakref.ref(gradient)  # a strong reference in its own guard would keep it alive

    def wait() -> None:
        # Not `ticket.wait`: the error of a failed step belongs to the masters, the gradient is readable.
        ticket.over.wait()
        used = held()
        if used is not None:
            unguard_pending([used])

    guard_pending([gradient], wait)


class Background:
    """One thread that steps chunks in the order of submission.

    Args:
        device: The device of this rank, which becomes the thread's current CUDA device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._tickets: list[Ticket] = []
        self._latest: dict[nn.Parameter, Ticket] = {}
        self._failure: OptimizerStepError | None = None

    def submit(
        self, optimizer: Optimizer, shares: Sequence[Share], step: Callable[[Optimizer, Share], None]
    ) -> None:
        """Step shares in their order; every use of a chunk waits for its own share from now on."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "nnx-optimizer-step", initializer=self._enter_thread)
        tickets = [Ticket() for _ in shares]
        # Failed tickets stay, so that `finish` still raises their error.
        self._tickets = [*(old for old in self._tickets if not old.has_succeeded), *tickets]
        # One thread steps in order, so the latest ticket of a parameter covers all earlier ones.
        self._latest = {key: old for key, old in self._latest.items() if not old.over.is_set()}
        for share, ticket in zip(shares, tickets, strict=True):
            self._latest.update(dict.fromkeys(share.owners.values(), ticket))
            for parameter in share.owners.values():
                _guard_gradient(parameter, ticket)
            share.chunk.set_pending(ticket.wait)
        # Submitted after set_pending: the thread's refresh must find the chunk pending.
        work = list(zip(shares, tickets, strict=True))
        self._pool.submit(self._run, self._stream(), optimizer, work, step)

    def _is_on_card(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def _stream(self) -> AbstractContextManager[Any]:
        """Return a context of the submitting thread's current stream."""
        # `Device.copy` waits for the current stream: its kernels may still read the old working weights.
        if not self._is_on_card():
            return nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(self._device))

    def _enter_thread(self) -> None:
        if self._is_on_card():
            torch.cuda.set_device(self._device)
        threads = threads_for_steps(os.environ)
        if threads is not None:
            log.info("torchrun set OMP_NUM_THREADS=1: background steps use %s threads.", threads)
            torch.set_num_threads(threads)

    def _run(
        self,
        stream: AbstractContextManager[Any],
        optimizer: Optimizer,
        work: list[tuple[Share, Ticket]],
        step: Callable[[Optimizer, Share], None],
    ) -> None:
        with stream, torch.no_grad(), without_guards():
            self._step_all(optimizer, work, step)

    def _step_all(
        self,
        optimizer: Optimizer,
        work: list[tuple[Share, Ticket]],
        step: Callable[[Optimizer, Share], None],
    ) -> None:
        while work:
            # Popped, so that the gradients of each chunk are freed as soon as it is stepped.
            share, ticket = work.pop(0)
            # After a failure no chunk is stepped, but every ticket is finished: its waiter would hang.
            if self._failure is None:
                try:
                    step(optimizer, share)
                except BaseException as error:
                    self._failure = _failure(optimizer, share.chunk, error)
            del share
            ticket.finish(self._failure)

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until these parameters are stepped, if they are pending.

        Raises:
            OptimizerStepError: Their step failed.
        """
        for ticket in {self._latest[parameter] for parameter in parameters if parameter in self._latest}:
            ticket.wait()

    def finish(self) -> None:
        """Wait for all submitted steps.

        Raises:
            OptimizerStepError: A step failed; each failure is raised once.
        """
        tickets, self._tickets = self._tickets, []
        self._latest.clear()
        for ticket in tickets:
            ticket.over.wait()
        failure, self._failure = self._failure, None
        if failure is not None and not failure.seen:
            failure.seen = True
            raise failure

    def close(self) -> None:
        """Wait for the submitted steps and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def threads_for_steps(environment: Mapping[str, str]) -> int | None:
    """Return the number of threads for background steps; None keeps the current number.

    torchrun sets one thread per rank by default; background steps use this rank's share of the cores then.
    Elementwise kernels give bitwise the same result on any number of threads.

    Args:
        environment: The environment variables of this process.

    Example:
        >>> threads_for_steps({"OMP_NUM_THREADS": "1"}) is None
        True
    """
    if environment.get("OMP_NUM_THREADS") != "1" or "TORCHELASTIC_RUN_ID" not in environment:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // int(environment.get("LOCAL_WORLD_SIZE", "1")), 1)


def _failure(optimizer: Optimizer, chunk: Chunk, error: BaseException) -> OptimizerStepError:
    failure = OptimizerStepError(
        f"{type(optimizer).__name__} failed to step chunk {chunk.name!r} in the background: "
        f"{type(error).__name__}: {error}",
        remedy="This chunk and the chunks after it are not stepped: resume from a checkpoint. With "
        "overlap='none' optimizer.step() itself raises the error.",
    )
    failure.__cause__ = error
    return failure
