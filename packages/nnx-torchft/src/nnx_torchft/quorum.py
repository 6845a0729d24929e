"""One group's side of the quorum: join it, sum gradients over its groups, and decide together on the step.

`Quorum` owns torchft's manager and knows neither Lightning nor loaders. A step is: `begin`, one backward per
micro batch with the loss times the share's weight, `commit`. If `commit` returns False a group was lost, and
the step begins again. All ranks of a group call these together; each exchanges with the ranks of the same
place in the other groups.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nnx_base.ranks import all_gather_object, control_group
from nnx_core.backend import ParallelContext
from nnx_core.errors import DisagreementError, NnxError, RankLostError
from nnx_torchft._torchft_compat import HTTPTransport, Manager, forget_quorum
from nnx_torchft.data import Share
from nnx_torchft.members import Beginning, Identity, Introduction, local_of, new_process_group
from nnx_torchft.options import ElasticOptions

__all__ = ["Counts", "LeftBehindError", "Quorum"]

log = logging.getLogger("nnx.torchft")


class LeftBehindError(NnxError, RuntimeError):
    """The other groups went on without this one, which has to start again to heal from them."""


@dataclass(slots=True)
class Counts:
    """The events of the groups of a run, as this group saw them.

    Attributes:
        groups: The groups of the quorum.
        joins: Groups that joined after the beginning.
        losses: Groups that were lost or left.
        heals: Groups that this one healed, and its own healing.
        steps_again: Steps that were computed again, because a group was lost in them.
        quorum_ms: Milliseconds of the last quorum.
    """

    groups: int = 0
    joins: int = 0
    losses: int = 0
    heals: int = 0
    steps_again: int = 0
    quorum_ms: float = 0.0


class Quorum:
    """Joins quorums and reduces gradients over their groups.

    Attributes:
        counts: The events of the groups.
        groups: The groups of the quorum: the id of each start, and its name.
        healed: The state that another group sent in `begin`; None without one.
        is_finite: False if the last sums have elements that are not finite, on all groups alike.

    Args:
        options: The options of elastic training.
        identity: The identity of the run.
        state: Returns the state of the run for a group that heals from this one.
        context: This rank of the group, and the device of the gradients.
        step: The number of committed steps that this group begins with.
        weights: A digest of this rank's weights at that step.

    Raises:
        NnxError: The lighthouse does not answer within `connect_timeout`.
    """

    def __init__(
        self,
        options: ElasticOptions,
        identity: Identity,
        state: Callable[[], dict[str, Any]],
        *,
        context: ParallelContext,
        step: int,
        weights: str,
    ) -> None:
        self.counts = Counts()
        self.groups: dict[str, str] = {}
        self.healed: dict[str, Any] | None = None
        self.is_finite = True
        self._place = (0, 1)  # of this group among those of the quorum, as of the last `begin`
        self._options, self._state = options, state
        self._rank, self._ranks = context.rank, context.world_size
        beginning = Beginning(step, weights if self._ranks > 1 else "")
        self._introduction = Introduction(options.group_name, identity, beginning, options.group_timeout)
        _reach(options)
        own = (socket.gethostname(), 0)
        self._store = TCPStore(*own, is_master=True, wait_for_workers=False)
        host, port = all_gather_object((own[0], self._store.port), control_group())[0]
        self._between = new_process_group(context.device.type, self._introduction, options.group_timeout)
        timeout = timedelta(seconds=options.group_timeout)
        self._transport = HTTPTransport(timeout=timeout, num_chunks=0)
        self._manager = Manager(
            pg=self._between,
            load_state_dict=self._receive,
            state_dict=self._send,
            min_replica_size=options.min_groups,
            use_async_quorum=False,
            checkpoint_transport=self._transport,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=options.quorum_timeout),
            connect_timeout=timedelta(seconds=options.connect_timeout),
            rank=self._rank,
            world_size=self._ranks,
            store_addr=host,
            store_port=port,
            lighthouse_addr=f"http://{options.address}",
            replica_id=options.group_name,
            init_sync=self._ranks == 1,  # it takes the first state of each rank from another group
        )
        self._go_to(step)

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return int(self._manager.current_step())

    def _go_to(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    @property
    def share(self) -> Share:
        """The share of this rank: that of its group, divided over the ranks of the group."""
        group, groups = self._place
        return Share(group + groups * self._rank, groups * self._ranks)

    @property
    def is_first(self) -> bool:
        """True in the first group of the quorum."""
        return self._place[0] == 0

    def begin(self) -> None:
        """Wait for a quorum, and meet its groups if it changed; `healed` has the state if this group heals.

        Raises:
            RankLostError: There was no quorum within `quorum_timeout`.
            UnsupportedError: This group belongs to another run.
        """
        began, step = time.monotonic(), self.step
        while True:
            self._wait(began)
            self._introduction.refuse_others()
            enough = self._manager.num_participants() >= self._options.min_groups
            if self._all(enough and self._manager.errored() is None):
                break
            self._manager.should_commit()  # ends the quorum
            self.healed = None  # another rank of the group may not have healed
            self._go_to(step)
        # User code asks for the place, and the manager would not answer the thread that sends the state.
        self._place = int(self._manager.participating_rank() or 0), int(self._manager.num_participants())
        self.counts.quorum_ms = 1000 * (time.monotonic() - began)
        self._note_changes()

    def _all(self, own: bool) -> bool:
        """Return True if it is true of every rank of the group."""
        if self._ranks == 1:
            return own
        everywhere = torch.tensor(int(own))
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=control_group())
        return bool(everywhere)

    def _wait(self, began: float) -> None:
        """Wait for a quorum, also while the lighthouse is gone."""
        warned = False
        while True:
            try:
                self._manager.start_quorum()
                return
            except Exception as error:
                forget_quorum(self._manager)
                if time.monotonic() - began > self._options.quorum_timeout:
                    raise RankLostError(
                        f"group {self._options.group_name!r} found no quorum at {self._options.address} in "
                        f"{self._options.quorum_timeout:g} s: {_first_line(error)}",
                        remedy="Check that the lighthouse runs; then start the group again.",
                    ) from error
                if not warned:
                    log.warning("elastic: no quorum at %s; trying again", self._options.address)
                    warned = True
                time.sleep(0.2)

    def _note_changes(self) -> None:
        before, now = self.groups, dict(self._introduction.groups)
        self.groups = now
        if before == now:
            return
        self.counts.groups = len(now)
        if before:
            joined = [name for start, name in now.items() if start not in before]
            lost = [name for start, name in before.items() if start not in now]
            self.counts.joins += len(joined)
            self.counts.losses += len(lost)
            changes = " ".join([*(f"+{name}" for name in joined), *(f"-{name}" for name in lost)])
        else:
            changes = ", ".join(now.values())
        self._log("%d groups (%s)", len(now), changes)

    def _log(self, what: str, *values: Any) -> None:
        """Log an event of the group, on its first rank."""
        if self._rank == 0:
            log.info(f"elastic: step %d: {what}", self.step, *values)

    def _send(self) -> dict[str, Any]:
        self.counts.heals += 1
        self._log("sending the state to a group that joins")
        return self._state()

    def _receive(self, state: dict[str, Any]) -> None:
        self.counts.heals += 1
        self.healed = state

    def commit(self, parameters: Iterable[nn.Parameter], facts: str) -> bool:
        """Sum the gradients over the groups of the quorum; return True if every sum is complete.

        A parameter that no group used has no gradient afterwards.

        Args:
            parameters: The parameters of the module.
            facts: The values that every group must have alike in this step, as text.

        Raises:
            DisagreementError: The groups have other facts.
        """
        listed = [parameter for parameter in parameters if parameter.requires_grad]
        sums = [(bucket, _flat(bucket)) for bucket in _by_dtype(listed)]
        digest = int.from_bytes(blake2b(facts.encode(), digest_size=4).digest(), "little") >> 12
        checks = torch.tensor([digest, digest**2], dtype=torch.float64, device=listed[0].device)
        self._sum([checks, *(flat for _, flat in sums)])
        error, groups = self._manager.errored(), self._manager.num_participants()
        if not self._manager.should_commit():
            self.counts.steps_again += 1
            cause = _first_line(error) or "a group was lost"
            self._log("computing the step again: %.50s", cause)
            return False
        first, second = (int(each) for each in checks.tolist())
        if first**2 != groups * second:  # equal only if all digests are
            raise DisagreementError(
                f"the groups differ in step {self.step - 1}; group {self._options.group_name!r} has {facts}.",
                remedy="Decide by values that all groups have alike, as those of validation; a training "
                "metric is of a group's own samples.",
            )
        self._introduction.has_trained = True
        self.is_finite = self._all(all(bool(flat.isfinite().all()) for _, flat in sums))
        for bucket, flat in sums:
            _unflatten(bucket, flat)
        return True

    def _sum(self, tensors: list[Tensor]) -> None:
        """Sum tensors over the groups, in place; the manager notes an error."""
        works = [self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()

    def close(self) -> None:
        """Leave the quorum."""
        self._manager.shutdown(wait=False)  # an interrupted quorum may take long
        self._transport.shutdown()
        self._between.shutdown()


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        buckets.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(buckets.values())


def _flat(bucket: list[nn.Parameter]) -> Tensor:
    """Return the gradients in one tensor, followed by 1 for each parameter that has one, and 0 for others."""
    owned = [local_of(parameter) for parameter in bucket]
    used = [float(parameter.grad is not None) for parameter in bucket]
    pieces = [
        torch.zeros_like(own) if parameter.grad is None else local_of(parameter.grad)
        for parameter, own in zip(bucket, owned, strict=True)
    ]
    return torch.cat([*(piece.reshape(-1) for piece in pieces), owned[0].new_tensor(used)])


def _unflatten(bucket: list[nn.Parameter], flat: Tensor) -> None:
    owned = [local_of(parameter) for parameter in bucket]
    *pieces, used = torch.split(flat, [*(own.numel() for own in owned), len(bucket)])
    for parameter, own, piece, is_used in zip(bucket, owned, pieces, used.tolist(), strict=True):
        if not is_used:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_of(parameter.grad).copy_(piece.view_as(own))


def _reach(options: ElasticOptions) -> None:
    """Raise unless the lighthouse accepts a connection."""
    host, _, port = options.address.rpartition(":")
    began = time.monotonic()
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=options.connect_timeout).close()
            return
        except OSError as error:
            if time.monotonic() - began > options.connect_timeout - 0.2:
                raise RankLostError(
                    f"no lighthouse answers at {options.address} in {options.connect_timeout:g} s: {error}.",
                    remedy="Start the groups with `nnx run --elastic 2 -- train.py`, or check the address.",
                ) from error
            time.sleep(0.2)


def _first_line(error: BaseException | None) -> str:
    return "" if error is None else str(error).partition("\n")[0]
