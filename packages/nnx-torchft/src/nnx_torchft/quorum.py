"""One group's side of the quorum: join it, sum gradients over its groups, and decide together on the step.

`Quorum` owns torchft's manager and knows neither Lightning nor loaders. A step is: `begin`, one backward per
micro batch with the loss times the share's weight, `commit`. If `commit` returns False a group was lost, and
the step begins again.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nnx_core.errors import DisagreementError, NnxError, RankLostError
from nnx_torchft._torchft_compat import Manager, forget_quorum
from nnx_torchft.data import Share
from nnx_torchft.members import Identity, Introduction, new_process_group
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

    def as_metrics(self) -> dict[str, float]:
        """Return the metrics that are logged in each step."""
        return {f"elastic/{name}": float(value) for name, value in asdict(self).items()}


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
        device: The device of the gradients.
        step: The number of committed steps that this group begins with.

    Raises:
        NnxError: The lighthouse does not answer within `connect_timeout`.
    """

    def __init__(
        self,
        options: ElasticOptions,
        identity: Identity,
        state: Callable[[], dict[str, Any]],
        *,
        device: torch.device,
        step: int,
    ) -> None:
        self.counts = Counts()
        self.groups: dict[str, str] = {}
        self.healed: dict[str, Any] | None = None
        self.is_finite = True
        self._options, self._state = options, state
        self._introduction = Introduction(options.group_name, identity, options.group_timeout)
        _reach(options)
        self._store = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=new_process_group(device.type, self._introduction, options.group_timeout),
            load_state_dict=self._receive,
            state_dict=self._send,
            min_replica_size=options.min_groups,
            use_async_quorum=False,
            timeout=timedelta(seconds=options.group_timeout),
            quorum_timeout=timedelta(seconds=options.quorum_timeout),
            connect_timeout=timedelta(seconds=options.connect_timeout),
            rank=0,
            world_size=1,
            store_addr=socket.gethostname(),
            store_port=self._store.port,
            lighthouse_addr=f"http://{options.address}",
            replica_id=options.group_name,
        )
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return int(self._manager.current_step())

    @property
    def share(self) -> Share:
        """The share of this group in the current quorum."""
        return Share(
            int(self._manager.participating_rank() or 0), max(int(self._manager.num_participants()), 1)
        )

    def begin(self) -> None:
        """Wait for a quorum, and meet its groups if it changed; `healed` has the state if this group heals.

        Raises:
            RankLostError: There was no quorum within `quorum_timeout`.
            UnsupportedError: This group belongs to another run.
        """
        began = time.monotonic()
        while True:
            self._wait(began)
            self._introduction.refuse_others()
            if (
                self._manager.errored() is None
                and self._manager.num_participants() >= self._options.min_groups
            ):
                break
            self._manager.should_commit()  # ends the quorum
        self.counts.quorum_ms = 1000 * (time.monotonic() - began)
        self._note_changes()

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
        if before:
            joined = [name for start, name in now.items() if start not in before]
            lost = [name for start, name in before.items() if start not in now]
            self.counts.joins += len(joined)
            self.counts.losses += len(lost)
            changes = [*(f"+{name}" for name in joined), *(f"-{name}" for name in lost)]
            log.info("elastic: step %d: %d groups (%s)", self.step, len(now), " ".join(changes))
        else:
            log.info("elastic: step %d: %d groups (%s)", self.step, len(now), ", ".join(now.values()))
        self.counts.groups = len(now)

    def _send(self) -> dict[str, Any]:
        self.counts.heals += 1
        log.info("elastic: step %d: sending the state to a group that joins", self.step)
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
            log.info("elastic: step %d is computed again: %.50s", self.step, cause)
            return False
        first, second = (int(each) for each in checks.tolist())
        if first**2 != groups * second:  # equal only if all digests are
            raise DisagreementError(
                f"the groups differ in step {self.step - 1}; group {self._options.group_name!r} has {facts}.",
                remedy="Decide by values that all groups have alike, as those of validation; a training "
                "metric is of a group's own samples.",
            )
        self._introduction.has_trained = True
        self.is_finite = all(bool(flat.isfinite().all()) for _, flat in sums)
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
        self._manager.shutdown(wait=False)


def _by_dtype(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        buckets.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(buckets.values())


def _flat(bucket: list[nn.Parameter]) -> Tensor:
    """Return the gradients in one tensor, followed by 1 for each parameter that has one, and 0 for others."""
    like = bucket[0]
    used = torch.tensor([float(p.grad is not None) for p in bucket], dtype=like.dtype, device=like.device)
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    return torch.cat([*(piece.detach().reshape(-1) for piece in pieces), used])


def _unflatten(bucket: list[nn.Parameter], flat: Tensor) -> None:
    *pieces, used = torch.split(flat, [*(parameter.numel() for parameter in bucket), len(bucket)])
    for parameter, piece, is_used in zip(bucket, pieces, used.tolist(), strict=True):
        if not is_used:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = piece.view_as(parameter).clone()
        else:
            parameter.grad.copy_(piece.view_as(parameter))


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
