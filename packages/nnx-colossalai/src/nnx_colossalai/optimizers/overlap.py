"""Stepping chunk by chunk in one background thread, and what the main thread waits for.

A `Share` holds tensors that alias masters and gradients, taken on the main thread: whatever becomes of the
parameter objects meanwhile (their data switches to working weights, their gradient is set to None, they wait
for whoever reads them), the thread steps what was to be stepped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx.errors import NnxError
from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.chunks.pending import guard, unguard
from nnx_colossalai.optimizers._torch_compat import without_guards

__all__ = ["Background", "OptimizerStepError", "Share", "Ticket", "give_back_state", "take_share"]


class OptimizerStepError(NnxError, RuntimeError):
    """An optimizer failed in the background thread; raised where its result was to be used.

    Attributes:
        seen: Whether it was raised already, so that whoever cleans up need not raise it again.
    """

    seen = False


@dataclass(slots=True, eq=False)
class Share:
    """One chunk's share of a step.

    Attributes:
        chunk: Whose masters are stepped.
        groups: Param groups as they are at this step, over aliases of this rank's part.
        state: Of the optimizer, by alias; its tensors are this rank's part.
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
        chunk: To be stepped.
        optimizer: Whose state and settings are used.
        groups: Param groups, each with those of its parameters that are the chunk's and have a gradient.
    """
    share = Share(chunk)
    for group, parameters in groups:
        aliases = []
        for parameter in parameters:
            alias = local_part(parameter)
            alias.grad = local_part(parameter.grad)  # type: ignore[arg-type] # those with a gradient only
            share.owners[alias] = parameter
            share.state[alias] = _local_state(optimizer.state.get(parameter, {}))
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
    for alias, parameter in share.owners.items():
        stepped = share.state[alias]
        if not stepped:
            continue
        own = optimizer.state[parameter]
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
        """Whether nobody needs to wait for it any more."""
        return self.over.is_set() and self._error is None


def _guard_gradient(parameter: nn.Parameter, ticket: Ticket) -> None:
    """Let whoever uses the gradient wait: it must not be overwritten. Letting go of it needs no wait."""
    gradient = cast("nn.Parameter", parameter.grad)
    held = weakref.ref(gradient)  # in its own attribute it would keep itself alive

    def wait() -> None:
        ticket.over.wait()
        used = held()
        if used is not None:
            unguard([used])

    guard([gradient], wait)


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
        self._pool.submit(self._run, optimizer, list(zip(shares, tickets, strict=True)), step)

    def _enter_thread(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _run(
        self,
        optimizer: Optimizer,
        work: list[tuple[Share, Ticket]],
        step: Callable[[Optimizer, Share], None],
    ) -> None:
        with torch.no_grad(), without_guards():
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


def _failure(optimizer: Optimizer, chunk: Chunk, error: BaseException) -> OptimizerStepError:
    failure = OptimizerStepError(
        f"{type(optimizer).__name__} failed to step chunk {chunk.name!r} in the background: "
        f"{type(error).__name__}: {error}",
        remedy="It and the chunks after it are not stepped: resume from a checkpoint. With "
        "overlap='none' the error is raised where it happens.",
    )
    failure.__cause__ = error
    return failure
