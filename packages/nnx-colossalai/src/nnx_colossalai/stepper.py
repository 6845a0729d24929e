"""The user's own optimizer over masters that lie in chunks: at once, or chunk by chunk in the background.

`Stepper` is what the backend's ``optimizer_step`` calls. The user's ``step`` always runs, once, with its
closure, its hooks and whatever schedulers wrapped around it; what differs is which parameters it finds.
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
    needs_whole_tensors,
    steps_each_parameter,
)
from nnx_core._torch_compat import shadow_of
from nnx_core.errors import NnxError
from nnx_core.optimizers.step_arguments import take_closure
from nnx_core.options import check_choice
from nnx_core.view.hidden_state import held_state
from nnx_core.view.pending import guard_pending, unguard_pending

T = TypeVar("T")
Overlap = Literal["none", "exact"]
CpuAdam = Literal["torch", "deepspeed"]
log = logging.getLogger("nnx.colossalai")


class Stepper:
    """Steps optimizers over the masters of chunks, and refreshes the chunks' working weights.

    Args:
        chunks: Of the model. The attribute may be set again when chunks have moved.
        overlap: "exact" steps chunks of the tiers that step on the host in a background thread, in the order
            of the next forward; each waits for its own only. The numbers are those of "none".
        cpu_adam: The function that steps Adam and AdamW in host memory.
        device: This rank's.
        show_masters: Called before masters are looked at, when a closure has run: working weights may be
            there in their places.
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
        self._said: set[str] = set()

    def setup_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Make whoever reads or loads their state wait; call it before the first step."""
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
            optimizer: Whose.
            step: The user's own, bound; runs exactly once.
            args: The arguments for it, such as a closure, which runs forward and backward.
            kwargs: The keyword arguments for it.

        Returns:
            What `step` returns.

        Raises:
            OptimizerStepError: An earlier step failed in the background.
        """
        if not steps_each_parameter(step):
            return self._step_unknown(optimizer, step, *args, **kwargs)
        given = take_closure(args, kwargs)
        touched: list[Chunk] = []

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
        """A step that may look at anything, and call its closure as often as it likes: all masters wait."""
        self._say(optimizer, "its step is not one of torch.optim's that treat each parameter by itself")
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
        """A closure whose second and later calls compute with the masters as the step has changed them."""
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
        """Now that gradients are there: leave the optimizer what it steps itself, and see to the rest.

        Args:
            optimizer: Its `param_groups` are replaced until its step ends.
            touched: Gets the chunks to refresh after it.
        """
        parts = _parts_with_gradients(optimizer, self.chunks)
        goes_on = self._can_go_on_in_background(optimizer)
        if not goes_on:
            self._background.finish()
        now: dict[Chunk, Part] = {}
        later: dict[Chunk, Part] = {}
        for chunk, part in parts.items():
            if goes_on and chunk.tier.steps_on_host and _lies_in_host_memory(part):
                later[chunk] = part
                continue
            touched.append(chunk)
            if self._goes_by_shares(optimizer, part):
                now[chunk] = part
        shares = self._take_shares(optimizer, {**now, **later})
        optimizer.param_groups = _without(optimizer, (*now.values(), *later.values()))
        optimizer.param_groups = groups_for_step(optimizer)
        for share in shares[: len(now)]:
            self._step_share(optimizer, share)
        if later:
            # Last, so that on all ranks the optimizer's state begins with the same parameters.
            self._background.submit(optimizer, shares[len(now) :], self._step_and_refresh)

    def _goes_by_shares(self, optimizer: Optimizer, part: Part) -> bool:
        """Return True if something else than the optimizer's own step must step a chunk at once."""
        if self._deepspeed is not None and self._deepspeed.serves(optimizer):
            return _lies_in_host_memory(part)
        # Most fused kernels do not know sharded parameters, but all can step one rank's part.
        if not _is_sharded(parameter for _, parameters in part for parameter in parameters):
            return False
        whole = needs_whole_tensors(optimizer) or _reason_to_step_whole(optimizer) is not None
        return not whole and _lies_in_host_memory(part)

    def _take_shares(self, optimizer: Optimizer, parts: Mapping[Chunk, Part]) -> list[Share]:
        """Taken when no earlier step of the same parameters is still to come: its state would be missing."""
        self._background.wait_for(
            parameter for part in parts.values() for _, parameters in part for parameter in parameters
        )
        return [take_share(chunk, optimizer, part) for chunk, part in parts.items()]

    def _step_and_refresh(self, optimizer: Optimizer, share: Share) -> None:
        self._step_share(optimizer, share)
        share.chunk.refresh()

    def _step_share(self, optimizer: Optimizer, share: Share) -> None:
        """Step one chunk as the optimizer would."""
        shadow = shadow_of(optimizer, share.groups, share.state)
        if self._deepspeed is not None and self._deepspeed.serves(shadow):
            self._deepspeed.step(shadow)
        shadow.param_groups = groups_for_step(shadow)
        shadow.step()
        give_back_state(share, optimizer)

    def _can_go_on_in_background(self, optimizer: Optimizer) -> bool:
        if not self._overlaps:
            return False
        reason = _reason_against(optimizer)
        if reason is not None:
            self._say(optimizer, reason)
        return reason is None

    def _say(self, optimizer: Optimizer, reason: str) -> None:
        message = f"{type(optimizer).__name__} does not step in the background: {reason}."
        if self._overlaps and message not in self._said:
            self._said.add(message)
            log.info(message)

    def finish(self) -> None:
        """Wait until every step that was begun is complete.

        Raises:
            OptimizerStepError: One failed, and nobody has been told yet.
        """
        self._background.finish()

    def close(self) -> None:
        """Wait, end the thread, and leave the optimizers as they came."""
        self._background.close()
        for handles in self._guarded.values():
            for handle in handles:
                handle.remove()
        self._guarded.clear()
        self.finish()


Part = list[tuple[dict[str, Any], list[nn.Parameter]]]
"""Param groups, each with those of its parameters that are in one chunk and have a gradient."""


@contextmanager
def _groups_kept(optimizer: Optimizer) -> Iterator[None]:
    """Give the optimizer its own list of param groups back at the end."""
    groups = optimizer.param_groups
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _parts_with_gradients(optimizer: Optimizer, chunks: Iterable[Chunk]) -> dict[Chunk, Part]:
    """What the optimizer will change, chunk by chunk in the order of the next forward."""
    ordered = sorted(chunks, key=lambda chunk: chunk.index)
    chunk_of = {parameter: chunk for chunk in ordered for parameter in chunk.masters.values()}
    parts: dict[Chunk, Part] = {chunk: [] for chunk in ordered}
    for group in optimizer.param_groups:
        inside: dict[Chunk, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None and parameter in chunk_of:
                inside.setdefault(chunk_of[parameter], []).append(parameter)
        for chunk, parameters in inside.items():
            parts[chunk].append((group, parameters))
    return {chunk: part for chunk, part in parts.items() if part}


def _lies_in_host_memory(part: Part) -> bool:
    return all(in_host_memory(parameter) for _, parameters in part for parameter in parameters)


def _without(optimizer: Optimizer, taken: Iterable[Part]) -> list[dict[str, Any]]:
    """The optimizer's groups less the parameters that are stepped in the background."""
    gone = {parameter for part in taken for _, parameters in part for parameter in parameters}
    if not gone:
        return optimizer.param_groups
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter not in gone]}
        for group in optimizer.param_groups
    ]
    return [group for group in groups if group["params"]]


def _is_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _reason_to_step_whole(optimizer: Optimizer) -> str | None:
    for switch in ("capturable", "differentiable"):
        if any(group.get(switch) for group in optimizer.param_groups):
            return f"a param group has {switch}=True"
    if any(getattr(optimizer, name, None) is not None for name in ("found_inf", "grad_scale")):
        return "it looks for overflow itself"
    return None


def _reason_against(optimizer: Optimizer) -> str | None:
    """Why a step cannot go on in the background; None if it can."""
    reason = _reason_to_step_whole(optimizer)
    if reason is not None:
        return reason
    if has_hooks_that_see_the_result(optimizer):
        return "a step hook may look at the result"
    sharded = _is_sharded(parameter for group in optimizer.param_groups for parameter in group["params"])
    if sharded and needs_whole_tensors(optimizer):
        return "it communicates about sharded parameters"
    return None


# Stepping chunk by chunk in one background thread, and what the main thread waits for.
#
# A `Share` holds tensors that alias masters and gradients, taken on the main thread: whatever becomes of the
# parameter objects meanwhile (their data switches to working weights, their gradient is set to None, they
# wait for whoever reads them), the thread steps what was to be stepped.


class OptimizerStepError(NnxError, RuntimeError):
    """An optimizer failed in the background thread; raised where its result was to be used.

    Attributes:
        seen: True if it was raised already, so that whoever cleans up need not raise it again.
    """

    seen = False


@dataclass(slots=True, eq=False)
class Share:
    """One chunk's share of a step.

    Attributes:
        chunk: Whose masters are stepped.
        groups: Param groups as they are at this step, over aliases of this rank's part.
        state: The state of the optimizer, by alias; its tensors are this rank's part.
        owners: The parameter that each alias stands for.
    """

    chunk: Chunk
    groups: list[dict[str, Any]] = field(default_factory=list)
    state: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    owners: dict[Tensor, nn.Parameter] = field(default_factory=dict)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's elements, sharing memory with `tensor` and needing no gradient."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def take_share(
    chunk: Chunk, optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], list[nn.Parameter]]]
) -> Share:
    """Take what stepping a chunk needs, as it is now.

    Args:
        chunk: The chunk to be stepped.
        optimizer: Whose state and settings are used.
        groups: Param groups, each with those of its parameters that are the chunk's and have a gradient.
    """
    share, held = Share(chunk), held_state(optimizer)
    for group, parameters in groups:
        aliases = []
        for parameter in parameters:
            alias = local_part(parameter)
            alias.grad = local_part(parameter.grad)  # type: ignore[arg-type] # those with a gradient only
            share.owners[alias] = parameter
            share.state[alias] = _local_state(held.get(parameter, {}))
            aliases.append(alias)
        share.groups.append({**_copied(group), "params": aliases})
    return share


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of this step: a scheduler may change a learning rate that is a tensor in place."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: local_part(value) if isinstance(value, DTensor) else value for key, value in state.items()}


def give_back_state(share: Share, optimizer: Optimizer) -> None:
    """Give the optimizer what a step has added to its state; existing tensors were changed in place."""
    held = held_state(optimizer)
    for alias, parameter in share.owners.items():
        stepped = share.state[alias]
        if not stepped:
            continue
        own = held[parameter]
        for key, value in stepped.items():
            if key not in own or _is_another(own[key], value):
                own[key] = _like(parameter, alias, value)


def _is_another(own: Any, stepped: Any) -> bool:
    if isinstance(own, DTensor) and isinstance(stepped, Tensor):
        return bool(local_part(own).data_ptr() != stepped.data_ptr())
    return own is not stepped


def _like(parameter: Tensor, alias: Tensor, value: Any) -> Any:
    """A state tensor of the parameter's shape is divided as the parameter is."""
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
    """What the main thread waits for before it uses a chunk.

    Attributes:
        over: Set when the background thread is done with the chunk, one way or the other.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self._error: OptimizerStepError | None = None

    def finish(self, error: OptimizerStepError | None = None) -> None:
        """Called by the background thread when the chunk is stepped, or will not be."""
        self._error = error
        self.over.set()

    def wait(self) -> None:
        """Wait until the chunk is stepped.

        Raises:
            OptimizerStepError: It could not be.
        """
        self.over.wait()
        if self._error is not None:
            self._error.seen = True
            raise self._error

    @property
    def has_succeeded(self) -> bool:
        """True if nobody needs to wait for it any more."""
        return self.over.is_set() and self._error is None


def _guard_gradient(parameter: nn.Parameter, ticket: Ticket) -> None:
    """Let whoever uses the gradient wait: it must not be overwritten. Letting go of it needs no wait."""
    gradient = cast("nn.Parameter", parameter.grad)
    held = weakref.ref(gradient)  # in its own attribute it would keep itself alive

    def wait() -> None:
        ticket.over.wait()
        used = held()
        if used is not None:
            unguard_pending([used])

    guard_pending([gradient], wait)


class Background:
    """One thread that steps chunks in the order they are given.

    Args:
        device: The thread's own, for those that have one current.
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
        """Step shares in their order; every chunk waits for its own from now on."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "nnx-optimizer-step", initializer=self._enter_thread)
        tickets = [Ticket() for _ in shares]
        self._tickets = [*(old for old in self._tickets if not old.has_succeeded), *tickets]
        self._latest = {key: old for key, old in self._latest.items() if not old.over.is_set()}
        for share, ticket in zip(shares, tickets, strict=True):
            self._latest.update(dict.fromkeys(share.owners.values(), ticket))
            for parameter in share.owners.values():
                _guard_gradient(parameter, ticket)
            share.chunk.set_pending(ticket.wait)
        work = list(zip(shares, tickets, strict=True))
        self._pool.submit(self._run, self._stream(), optimizer, work, step)

    def _is_on_card(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def _stream(self) -> AbstractContextManager[Any]:
        """That of the thread that submits: new weights are for what it computes next."""
        if not self._is_on_card():
            return nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(self._device))

    def _enter_thread(self) -> None:
        if self._is_on_card():
            torch.cuda.set_device(self._device)
        threads = threads_for_steps(os.environ)
        if threads is not None:
            log.info("torchrun set OMP_NUM_THREADS=1: the background steps on %s threads.", threads)
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
            share, ticket = work.pop(0)  # its aliases, and with them the gradients, are freed when it is done
            if self._failure is None:
                try:
                    step(optimizer, share)
                except BaseException as error:  # whatever it is, somebody waits for this ticket
                    self._failure = _failure(optimizer, share.chunk, error)
            del share
            ticket.finish(self._failure)

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until whatever was submitted of these parameters is stepped.

        Raises:
            OptimizerStepError: It could not be.
        """
        for ticket in {self._latest[parameter] for parameter in parameters if parameter in self._latest}:
            ticket.wait()

    def finish(self) -> None:
        """Wait for everything that was submitted.

        Raises:
            OptimizerStepError: A chunk could not be stepped; raised once.
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
        """End the thread when it has done what it was given."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def threads_for_steps(environment: Mapping[str, str]) -> int | None:
    """Threads of steps in the background where torchrun has set one for every rank; None: as many as set.

    It changes no bit: kernels that step each element by itself give the same on any number of threads.

    Args:
        environment: The variables of this process.

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
        remedy="It and the chunks after it are not stepped: resume from a checkpoint. With "
        "overlap='none' the error is raised where it happens.",
    )
    failure.__cause__ = error
    return failure
