"""Exchange control messages and errors between ranks.

A rank that fails alone leaves the others waiting in their next collective. Work that can fail on some
ranks only runs inside `together`, so that every rank raises the same error.
Control messages use a CPU (gloo) group, so that they arrive while a GPU is busy or broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from socket import gethostname
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_gather_object as _all_gather_object
from torch.distributed import gather_object as _gather_object

from nnx_base._torch_compat import default_group, default_store, timeout_of
from nnx_base.clean_up import note
from nnx_base.dtypes import as_bytes
from nnx_base.errors import CheckpointError, NnxError, RankLostError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "all_arrive",
    "all_gather_object",
    "ask_store",
    "background_group",
    "broadcast_tensor",
    "control_group",
    "copy_group",
    "deliver",
    "engine_group",
    "exchange",
    "gather_object",
    "group_timeout",
    "is_distributed",
    "rank_and_size",
    "share",
    "together",
]

T = TypeVar("T")
R = TypeVar("R")

_ANSWER = 5.0
"""Seconds within which a reachable store answers."""
_NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)

_control_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_background_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_copy_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_engine_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def is_distributed() -> bool:
    """Return True if a process group with more than one rank exists in this process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def control_group() -> dist.ProcessGroup | None:
    """Return the gloo group over all ranks for control messages; None in a single process.

    The first call is collective: every rank must call it at the same point.
    """
    if not is_distributed():
        return None
    world = default_group()
    return world if dist.get_backend(world) == "gloo" else _gloo_group(world, _control_groups)


def background_group() -> dist.ProcessGroup | None:
    """Return a gloo group over all ranks for one background thread; None in a single process.

    Two threads on one group would mix up their collectives. The first call is collective.
    """
    return _gloo_group(default_group(), _background_groups) if is_distributed() else None


def copy_group() -> dist.ProcessGroup | None:
    """Return a gloo group over all ranks for the thread that copies to memory; None in a single process.

    It is not that of background saves, which may take much longer. The first call is collective.
    """
    return _gloo_group(default_group(), _copy_groups) if is_distributed() else None


def engine_group() -> dist.ProcessGroup | None:
    """Return a gloo group over all ranks for engines' collectives inside user code; None in one process.

    On the world's group, a gather of one rank would pair with a reduction in the user code of another
    rank that skips the gather. The first call is collective.
    """
    if not is_distributed():
        return None
    return _gloo_group(default_group(), _engine_groups)


def _gloo_group(
    world: dist.ProcessGroup, made: dict[dist.ProcessGroup, dist.ProcessGroup]
) -> dist.ProcessGroup:
    if world not in made:
        made.clear()  # drop the groups of a destroyed world
        timeout = timedelta(seconds=group_timeout())
        made[world] = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
    return made[world]


def group_timeout() -> float:
    """Return the timeout in seconds of collectives on the world's group."""
    return timeout_of(default_group()).total_seconds()


def all_gather_object(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's value, in rank order; only this value without a group."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    _all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def gather_object(value: T, group: dist.ProcessGroup | None) -> list[T] | None:
    """Return every rank's value in rank order on rank 0, else None; only this value without a group."""
    if group is None:
        return [value]
    is_target = dist.get_rank(group) == 0
    values: list[T | None] | None = [None] * dist.get_world_size(group) if is_target else None
    _gather_object(value, values, group=group, group_dst=0)
    return cast("list[T] | None", values)


@torch.no_grad()
def broadcast_tensor(tensor: Tensor) -> None:
    """Broadcast a tensor from rank 0 to the world in place, for any strides. Collective.

    ``torch.distributed`` writes the elements one after the other from the first address on and
    ignores strides. For a slice it would overwrite the neighbours, for an expanded tensor other objects.
    """
    data = tensor.detach()
    data = data[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in data.stride())]
    if data.numel() == 0:
        return
    dense = data.contiguous()
    # NCCL and gloo lack some integer types; a view as bytes sends the same data.
    dist.broadcast(as_bytes(dense) if dense.dtype in _NOT_SENT else dense, src=0)
    if dense is not data:
        data.copy_(dense)


def all_arrive(place: str, *, timeout: float) -> bool:
    """Return True if every rank makes this call within a time. Use it where a collective would hang.

    After an error on one rank the others may be inside another collective. One more, unmatched, would hang
    or abort the process. So this call uses the store of the group's rendezvous.

    Args:
        place: Name of the call. The n-th call of each rank under this name belongs to the others' n-th.
        timeout: Seconds to wait for the others.
    """
    if not is_distributed():
        return True
    with suppress(RuntimeError):  # the rank that hosts the store is gone
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
        store.add(key, -1)  # later ranks must not count this one,
        store.add(f"{key}, left", 1)  # nor wait for it
    return arrived == dist.get_world_size()


def ask_store(operation: Callable[[Store], T], *, timeout: float) -> T:
    """Return the result of an operation on the store of the process group's rendezvous.

    torch waits without limit for a store on an unreachable machine. So the operation runs in its own
    thread, which is abandoned after the timeout.

    Args:
        operation: A function of the store, which may use it several times.
        timeout: Seconds for the complete operation.

    Raises:
        RankLostError: The operation did not end in time.
    """
    store = default_store()
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
            f"rank 0, which hosts the store of the process group, did not answer within {timeout:.0f} s."
        )
    return ended[0]()


def _raise(error: BaseException) -> NoReturn:
    raise error


@contextmanager
def together(group: dist.ProcessGroup | None, *, doing: str) -> Iterator[None]:
    """Run a block that may fail on some ranks; raise on every rank if it fails on any.

    The block must not contain collectives: a rank that fails before one leaves the others waiting in it.

    Args:
        group: The participating ranks; None outside distributed runs.
        doing: Name of the block's work in the message on ranks that did not fail.

    Raises:
        NnxError: The own error on a rank that failed; the error of the lowest failing rank on the others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    with _first_error_wins(error, f"reporting to the other ranks that {doing} failed"):
        failures = all_gather_object(_picklable(error), group)
    if error is not None and (group is None or isinstance(error, NnxError)):
        raise error
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if failed:
        rank, failure = failed[0]
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        message = f"{doing} failed on rank {rank}{others}: {failure.message}"
        raise type(failure)(message, remedy=failure.remedy) from error


@contextmanager
def _first_error_wins(first: Exception | None, doing: str) -> Iterator[None]:
    """Context manager for a collective after an error: raise that error if the other ranks are gone."""
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        note(first, f"After this error, {doing} failed as well: {type(error).__name__}: {error}")
        raise first  # noqa: B904 - the other error came later


def _picklable(error: Exception | None) -> NnxError | None:
    """Return the error in a form that pickles, for the other ranks."""
    if error is None or isinstance(error, NnxError):
        return error
    return NnxError(f"{type(error).__name__}: {error}")


# A save has a few rounds: describe, plan, then write and commit. In each round all ranks work, and the
# coordinator (rank 0 of the group) gathers all results and answers each rank. A rank that fails still
# sends its error, because the others would wait for it; then all ranks raise the same error.


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in the group and the number of ranks; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def exchange(
    group: dist.ProcessGroup | None,
    work: Callable[[], T],
    decide: Callable[[list[T]], list[R]],
    *,
    doing: str,
    give_up: Callable[[], str] = str,
) -> R:
    """Run one round.

    Args:
        group: The participating ranks, over a CPU backend; None for this process alone.
        work: The function that every rank calls. It must not communicate.
        decide: Function on the coordinator from all results, in rank order, to one answer for each rank.
        doing: The purpose of the round, used in messages.
        give_up: Function called on the coordinator after a failure, before the others learn of it. It returns
            a sentence about the state of the checkpoint, which the error repeats.

    Returns:
        The coordinator's answer to this rank.

    Raises:
        CheckpointError: A rank's work or the coordinator's decision failed (the same error on every rank).
    """
    outcome = _attempt(work)
    if group is None:
        answers = _decide([outcome], decide, doing, give_up)
        answer: Any = answers[0]
        if isinstance(answer, _Failure):
            if answer.error is answer.raised:
                raise answer.raised
            raise answer.raised from answer.error
        return cast(R, answer)
    own = outcome if isinstance(outcome, _Failure) else None
    with _first_error_wins(own.raised if own else None, f"reporting to the other ranks that {doing} failed"):
        answer = _communicate(group, outcome, decide, doing, give_up)
    if isinstance(answer, _Failure):
        raise answer.raised from (own.error if own else None)
    return cast(R, answer)


class _Failure:
    """An error in the form that is sent to other ranks; the original exception stays on its rank."""

    def __init__(self, error: Exception, host: str = "") -> None:
        self.error: Exception | None = error
        self.raised: NnxError = error if isinstance(error, NnxError) else _wrapped(error)
        self.host = host or gethostname()

    def __reduce__(self) -> tuple[object, ...]:
        return (_Failure, (self.raised, self.host))


def _wrapped(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"unexpected {type(error).__name__}: {error}.", remedy="Please report this as a bug of nnx."
    )


def _attempt(work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except Exception as error:
        return _Failure(error)


def _communicate(
    group: dist.ProcessGroup,
    outcome: T | _Failure,
    decide: Callable[[list[T]], list[R]],
    doing: str,
    give_up: Callable[[], str],
) -> R | _Failure:
    received: list[Any] = [None]
    with _explained(doing):
        gathered = gather_object(outcome, group)
        answers = _decide(gathered, decide, doing, give_up) if gathered is not None else None
        dist.scatter_object_list(received, cast("list[Any]", answers), group=group, group_src=0)
    return cast("R | _Failure", received[0])


def share(group: dist.ProcessGroup | None, value: T | None, *, doing: str) -> T:
    """Broadcast the coordinator's value to every rank; the values of other ranks are ignored."""
    if group is None:
        return cast(T, value)
    values: list[Any] = [value]
    with _explained(doing):
        dist.broadcast_object_list(values, group=group, group_src=0)
    return cast(T, values[0])


def deliver(
    group: dist.ProcessGroup, outgoing: Sequence[bytes], senders: Sequence[int], *, doing: str
) -> list[bytes]:
    """Send large messages from a few ranks to the coordinator; other ranks communicate nothing.

    Args:
        group: The ranks.
        outgoing: The bytes that this rank sends; the coordinator itself sends nothing.
        senders: On the coordinator, the rank of each message; messages of one rank in the order of its
            `outgoing`.
        doing: The purpose of the messages, used in errors.

    Returns:
        The messages, on the coordinator.
    """
    with _explained(doing):
        for message in outgoing:
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            dist.send(torch.tensor([len(message)]), group=group, group_dst=0)
            dist.send(data, group=group, group_dst=0)
        return [_receive(group, rank) for rank in senders]


def _receive(group: dist.ProcessGroup, rank: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, group=group, group_src=rank)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, group=group, group_src=rank)
    return data.numpy().tobytes()


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"{doing} stopped because a rank left: {error}.",
            remedy="Look for the first error in the logs of the other ranks; the last checkpoint is intact.",
        ) from error


def _decide(
    outcomes: list[T | _Failure],
    decide: Callable[[list[T]], list[R]],
    doing: str,
    give_up: Callable[[], str],
) -> list[R | _Failure]:
    failed = [(rank, item) for rank, item in enumerate(outcomes) if isinstance(item, _Failure)]
    if not failed:
        try:
            return cast("list[R | _Failure]", decide(cast("list[T]", outcomes)))
        except Exception as error:
            failure = _Failure(error)
    elif len(outcomes) == 1:
        failure = failed[0][1]
    else:
        failure = _Failure(_named(failed, doing))
    failure.raised.add(give_up())
    return [failure] * len(outcomes)


def _named(failed: list[tuple[int, _Failure]], doing: str) -> NnxError:
    rank, first, host = failed[0][0], failed[0][1].raised, failed[0][1].host
    where = f" on {host}" if host != gethostname() else ""
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    return type(first)(f"{doing} failed on rank {rank}{where}{others}: {first.message}", remedy=first.remedy)
