"""Acting together: what all ranks of a group must agree on.

One rank that fails alone leaves the others waiting in their next collective. Everything in nnx
that can fail on some ranks only runs inside `together`, so that every rank gets the same error.
Control messages travel over a CPU (gloo) group, so that they work while a GPU is busy or broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nnx_checkpoint.errors import NnxError, RankLostError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "all_arrive",
    "all_gather_object",
    "ask_store",
    "background_group",
    "broadcast_tensor",
    "control_group",
    "engine_group",
    "gather_object",
    "group_timeout",
    "is_distributed",
    "together",
    "wait_for_collective",
]

T = TypeVar("T")

_ANSWER = 5.0
"""Seconds in which a store that can be reached answers."""
_NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)

_control_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_background_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_engine_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def is_distributed() -> bool:
    """Whether a process group with more than one rank exists in this process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def control_group() -> dist.ProcessGroup | None:
    """The gloo group over all ranks for control messages; None in a single process.

    The first call is collective: every rank must make it at the same point.
    """
    if not is_distributed():
        return None
    world = dist.distributed_c10d._get_default_group()
    return world if dist.get_backend(world) == "gloo" else _gloo_group(world, _control_groups)


def background_group() -> dist.ProcessGroup | None:
    """A gloo group over all ranks for one thread beside the main one; None in a single process.

    Two threads that used one group would mix up their collectives. The first call is collective.
    """
    return (
        _gloo_group(dist.distributed_c10d._get_default_group(), _background_groups)
        if is_distributed()
        else None
    )


def engine_group() -> dist.ProcessGroup | None:
    """A gloo group over all ranks for what engines do in the middle of user code; None in a single process.

    On the world's group, a gather of one rank would pair with a reduction in the user code of another
    rank, which does not come to that gather. The first call is collective.
    """
    if not is_distributed():
        return None
    return _gloo_group(dist.distributed_c10d._get_default_group(), _engine_groups)


def _gloo_group(
    world: dist.ProcessGroup, made: dict[dist.ProcessGroup, dist.ProcessGroup]
) -> dist.ProcessGroup:
    if world not in made:
        made.clear()  # groups of a world that was destroyed since
        timeout = timedelta(seconds=group_timeout())
        made[world] = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    return made[world]


def group_timeout() -> float:
    """Seconds after which a collective of the world's group gives up waiting for a rank."""
    world = dist.distributed_c10d._get_default_group()
    timeout: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return timeout.total_seconds()


def all_gather_object(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in rank order; just this one without a group."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def gather_object(value: T, group: dist.ProcessGroup | None) -> list[T] | None:
    """Every rank's value on rank 0, in rank order, and None on the others; just this one without a group."""
    if group is None:
        return [value]
    is_target = dist.get_rank(group) == 0
    values: list[T | None] | None = [None] * dist.get_world_size(group) if is_target else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return cast("list[T] | None", values)


@torch.no_grad()
def broadcast_tensor(tensor: Tensor) -> None:
    """Give a tensor rank 0's values on every rank of the world, in place, whatever its strides. Collective.

    ``torch.distributed`` writes a tensor's elements one after the other from its first address on, also
    where they do not lie so: for a slice that hits its neighbours, for an expanded tensor other objects.
    """
    data = tensor.detach()
    data = data[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in data.stride())]
    if data.numel() == 0:
        return
    dense = data.contiguous()
    # NCCL and gloo lack some integers; what travels is the same either way.
    dist.broadcast(dense.view(-1).view(torch.uint8) if dense.dtype in _NOT_SENT else dense, src=0)
    if dense is not data:
        data.copy_(dense)


def all_arrive(place: str, *, timeout: float) -> bool:
    """Whether every rank makes this call within a time. Usable where a collective would hang.

    After an error on one rank the others may be in the middle of some collective; one more, unmatched,
    would hang or abort the process. So this goes through the store that the group was started with.

    Args:
        place: Names the call; the ranks' first visits to it belong together, then their second ones.
        timeout: Seconds to wait for the others.
    """
    if not is_distributed():
        return True
    with suppress(RuntimeError):  # the rank that keeps the store is gone
        return ask_store(lambda store: _arrive(store, place, timeout), timeout=timeout + _ANSWER)
    return False


def _arrive(store: Store, place: str, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    visit = store.add(f"nnx/{place}/of rank {dist.get_rank()}", 1)
    key = f"nnx/{place}/visit {visit}"
    arrived = store.add(key, 1)
    while arrived < dist.get_world_size() and time.monotonic() < deadline:
        if store.add(f"{key}, left", 0):
            break
        time.sleep(0.05)
        arrived = store.add(key, 0)
    if arrived < dist.get_world_size():
        store.add(key, -1)  # whoever comes from now on must not count this rank,
        store.add(f"{key}, left", 1)  # nor wait for it
    return arrived == dist.get_world_size()


def ask_store(operation: Callable[[Store], T], *, timeout: float) -> T:
    """What an operation on the store that the process group was started with returns.

    torch waits without limit for a store whose machine is cut off. So the operation runs in a thread of its
    own, which is left behind if it does not end.

    Args:
        operation: Gets the store, and may use it several times.
        timeout: Seconds for all of it.

    Raises:
        RankLostError: It did not end in time.
    """
    store = dist.distributed_c10d._get_default_store()
    ended: list[Callable[[], T]] = []

    def run() -> None:
        try:
            result = operation(store)
            ended.append(lambda: result)
        except BaseException as error:
            ended.append(partial(_raise, error))

    thread = Thread(target=run, name="nnx-store", daemon=True)
    thread.start()
    thread.join(timeout)
    if not ended:
        raise RankLostError(
            f"rank 0, which keeps the store of the process group, did not answer within {timeout:.0f} s."
        )
    return ended[0]()


def _raise(error: BaseException) -> NoReturn:
    raise error


def wait_for_collective(work: dist.Work) -> None:
    """Wait for what was launched with ``async_op``, where `nnx_core.used.CollectiveOrder` sees it."""
    work.wait()


@contextmanager
def together(group: dist.ProcessGroup | None, *, doing: str) -> Iterator[None]:
    """Run a block that may fail on some ranks, and make it fail on all of them or none.

    The block itself must not contain collectives that a failing rank would leave open.

    Args:
        group: Ranks that take part; None outside distributed runs.
        doing: Names the work of the block in the message on ranks that did not fail themselves.

    Raises:
        NnxError: On a rank that failed its own error, on the others that of the lowest failing rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failures = all_gather_object(_portable(error), group)
    if error is not None and (group is None or isinstance(error, NnxError)):
        raise error
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if failed:
        rank, failure = failed[0]
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        message = f"{doing} failed on rank {rank}{others}: {failure.message}"
        raise type(failure)(message, remedy=failure.remedy) from error


def _portable(error: Exception | None) -> NnxError | None:
    """An error that survives the trip to another rank."""
    if error is None or isinstance(error, NnxError):
        return error
    return NnxError(f"{type(error).__name__}: {error}")
