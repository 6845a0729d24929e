"""Divide the data between groups of ranks that compute one batch together.

The ranks that an engine splits a model over read the same share of the data. This module finds these ranks,
and compares their batches, which must be equal.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_gather
from torch.distributed.tensor import DTensor

from nnx_base._torch_compat import default_group
from nnx_base.ranks import all_gather_object, control_group, is_distributed
from nnx_core.agree.divergence import checksum
from nnx_core.errors import DisagreementError, UnsupportedError

_FIRST = 3
_EVERY = 100
_DEEPEST = 4
"""The depth to which a batch is searched: its objects may refer to anything."""
_groups: dict[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]] = {}


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of the data in a world with fewer shares than ranks.

    Attributes:
        rank: The share that this rank reads.
        size: The number of shares.
        is_first: True if no lower rank reads the same share.
        across: The group of one rank of every share, in order, with the device's backend; None for one share.
        within: The gloo group of the ranks that read this share.
    """

    rank: int
    size: int
    is_first: bool
    across: dist.ProcessGroup | None
    within: dist.ProcessGroup


def make_shares(rank: int, size: int) -> Shares | None:
    """Describe the shares of the data in this world; None if every rank reads its own share. Collective.

    Args:
        rank: The share that this rank reads.
        size: The number of shares, the same on all ranks.

    Raises:
        UnsupportedError: Shards have different numbers of ranks.
    """
    if not is_distributed() or size == dist.get_world_size():
        return None
    shares = all_gather_object(rank, control_group())
    members = [[other for other, share in enumerate(shares) if share == index] for index in range(size)]
    if len({len(ranks) for ranks in members}) > 1:
        raise UnsupportedError(
            f"the shares of the data are read by {', '.join(str(len(ranks)) for ranks in members)} ranks.",
            remedy="Return equally many ranks for every share from the engine's "
            "`data_parallel_rank_and_size`.",
        )
    lines = [list(line) for line in zip(*members, strict=True)]
    across = _group_among(lines, backend=None) if size > 1 else None
    within = _group_among(members, backend="gloo")
    return Shares(rank, size, members[rank][0] == dist.get_rank(), across, within)


def _group_among(lists: list[list[int]], *, backend: str | None) -> dist.ProcessGroup:
    """Return the group of this rank in a partition of the ranks; cached per world. Collective."""
    world = default_group()
    if world not in _groups:
        _groups.clear()  # drop groups of destroyed worlds
    made = _groups.setdefault(world, {})
    key = (backend, *map(tuple, lists))
    if key not in made:
        made[key], _ = dist.new_subgroups_by_enumeration(lists, backend=backend)  # type: ignore[no-untyped-call]
    return made[key]


class SharedBatches:
    """Compares the batches of ranks that read the same share: the first ones, and then at an interval.

    Args:
        shares: The shares of this run; None if every rank reads its own.
        every: The interval in batches; None for 100, 0 for never.
    """

    def __init__(self, shares: Shares | None, *, every: int | None) -> None:
        self._shares = shares
        self._every = _EVERY if every is None else every
        self._counts: Counter[str] = Counter()

    def compare(self, batch: Any, *, where: str, begins: bool = False, in_step: bool = False) -> None:
        """Count a batch, and compare it if it is due. Collective then.

        Args:
            batch: The batch of this rank.
            where: The name of the step and the loader; each name has its own count.
            begins: True for the first batch of a pass over the data.
            in_step: True if all ranks of the world call this equally often, so that all raise the error.

        Raises:
            DisagreementError: Ranks that compute one batch together have different batches.
        """
        if self._shares is None or self._every == 0 or isinstance(batch, Iterator):
            return
        count = self._counts[where]
        self._counts[where] += 1
        if count >= _FIRST and count % self._every and not begins:
            return
        mine = torch.tensor([self._shares.rank, dist.get_rank(), _digest(batch)])
        group = control_group() if in_step else self._shares.within
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        all_gather(rows, mine, group=group)
        first: dict[int, tuple[int, int]] = {}
        for share, rank, digest in (row.tolist() for row in rows):
            model, expected = first.setdefault(share, (rank, digest))
            if digest != expected:
                raise _different(where, model, rank, self._shares)


def _different(where: str, model: int, rank: int, shares: Shares) -> DisagreementError:
    return DisagreementError(
        f"rank {rank} has another batch than rank {model} in {where}, and they compute one batch together: "
        f"{dist.get_world_size()} ranks read {shares.size} "
        f"{'share' if shares.size == 1 else 'shares'} of the data.",
        remedy="If the script generates its data, call seed_everything(0) before, so that it is equal on all "
        "ranks. Otherwise divide the data by `trainer.distributed_sampler_kwargs` (`num_replicas` and "
        "`rank`), not by torch.distributed, and shuffle with the same seed on all ranks. check_every=0 "
        "turns the comparison off.",
    )


def _digest(batch: Any) -> int:
    """Return a number that depends on all tensors, numbers and texts of a batch, and on their order."""
    texts: list[str] = []
    sums: dict[torch.device, list[Tensor]] = {}
    for leaf in _leaves(batch, _DEEPEST):
        texts.append(f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf))
        if isinstance(leaf, Tensor) and not leaf.is_nested and not isinstance(leaf, DTensor):
            sums.setdefault(leaf.device, []).append(checksum(leaf))
    found = [torch.stack(of_device).tolist() for of_device in sums.values()]
    text = repr((texts, found))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (Tensor, str, bytes, bool, int, float, complex)):
        yield value
    elif depth == 0 or isinstance(value, (nn.Module, type)):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key, 1)
            yield from _leaves(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, depth - 1)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _leaves(vars(value), depth - 1)
