"""Detect ranks that diverge: compare checksums of replicated values over the ranks at an interval.

A rank can diverge silently: a random number, a branch on the rank, or a broken GPU changes its values without
an error. `DivergenceCheck` compares checksums of replicated values on the control group. Its error names the
first value that differs, and the rank. `Backend` lists the values of a rank, and `nnx_core.lightning` calls
`DivergenceCheck` after each step. This module changes no tensor.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_gather
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base.box import Box
from nnx_base.dtypes import as_bytes
from nnx_base.ranks import all_gather_object, control_group, is_distributed
from nnx_base.shard import Shard
from nnx_core.backend import Backend
from nnx_core.errors import DisagreementError, UnsupportedError

_FIRST_STEPS = 2
_ROW = 1024
_ODD = 0x9E3779B97F4A7C1
_COMPARED = 1_000_000
"""The number of elements in which the size of a difference is measured."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of normalization layers: each rank computes them from its own data; evaluation uses rank zero's."""
_REMEDIES = {
    "parameter": "Code writes into it on some ranks only, such as a random number or a branch on the rank: "
    "write the same values on all ranks.",
    "written": "Write values that are equal on all ranks, such as the result of `self.all_gather`; keep "
    "values of a single rank in `register_buffer(..., persistent=False)`.",
    "buffer": "Write values that do not depend on the rank's own data, or reduce them over the ranks first; "
    "keep values of a single rank in `register_buffer(..., persistent=False)`.",
    "option": "Set it from values that are equal on all ranks, such as a metric logged with sync_dist=True.",
    "state": "Step the optimizer equally often on all ranks.",
    "gradient": "Use the parameter in the loss on all ranks, multiplied by zero where it must not count.",
    "plan": "Use the same options, model and package versions on all ranks.",
}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number that depends on every bit of a tensor and on its position: 0-d int64, on its device.

    It reads the tensor once and does not wait for the device. Bitwise equal tensors have equal checksums;
    -0.0 differs from 0.0.

    Example:
        >>> bool(checksum(torch.zeros(3)) == checksum(torch.zeros(3)))
        True
    """
    data = tensor.detach()
    if data.layout != torch.strided:
        compressed: Any = data
        data = (data if data.layout == torch.sparse_coo else compressed.to_sparse_coo()).coalesce()
        return checksum(data.indices()) * _ODD + checksum(data.values())
    bits = as_bytes(data)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    count = bits.numel() // 8
    weights = _weights(data.device)
    if count * 8 < bits.numel():
        total = (bits[count * 8 :] * weights[: bits.numel() - count * 8]).sum()
    else:
        total = torch.zeros((), dtype=torch.int64, device=data.device)
    words = bits[: count * 8].view(torch.int64)
    full = count // _ROW * _ROW
    if full:
        total += (words[:full].view(-1, _ROW).sum(0) * weights).sum()
    if full < count:
        total += (words[full:] * weights[: count - full]).sum()
    return total


def refuse_unequal_gradient(gradient: Tensor, name: str) -> None:
    """Refuse an assigned gradient that differs between ranks, for a parameter without one. Collective.

    Such a gradient comes from each rank's own samples, as of `torch.autograd.grad`, and nothing reduces it.

    Args:
        gradient: The unsharded gradient.
        name: The parameter's name.
    """
    if is_distributed() and len(set(all_gather_object(int(checksum(gradient)), control_group()))) > 1:
        raise UnsupportedError(
            f"{name!r} is given a gradient that no backward has computed and that differs between ranks, "
            "such as one of `torch.autograd.grad`, which comes from each rank's own samples.",
            remedy="Compute gradients by `self.manual_backward(loss)`, and change `p.grad` then.",
        )


@cache
def _weights(device: torch.device) -> Tensor:
    """Return the factors of a row: odd, to keep every bit, and irregular, to notice exchanged values."""
    mixed = torch.arange(1, _ROW + 1, device=device) * _ODD
    return (mixed ^ (mixed >> 31)) * _ODD | 1


def digest(value: Any) -> int:
    """Checksum a value other than a tensor: options of an optimizer, counters, text."""
    text = repr(value).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class Writes:
    """Sums up writes of user code into parameters that the engine makes equal on all ranks again.

    The engine's own step hides such a divergence, so the writes themselves are compared. It computes nothing
    in steps after which the ranks are not compared.

    Args:
        are_compared: Returns True if the ranks are compared after this step: `Backend.is_watched`.

    Example:
        >>> layer, writes = torch.nn.Linear(2, 1, bias=False), Writes(lambda: True)
        >>> before = writes.sum_of(layer.weight)
        >>> writes.add(layer.weight, layer.weight, before)
        >>> writes.take(layer)
        {'weight': 0}
    """

    def __init__(self, are_compared: Callable[[], bool]) -> None:
        self.are_compared = are_compared
        self._sums: dict[Tensor, Tensor] = {}

    def sum_of(self, unsharded: Tensor) -> Tensor | None:
        """Return the checksum of a parameter before user code reads it; None if no comparison follows."""
        return checksum(unsharded) if self.are_compared() else None

    def add(self, parameter: Tensor, unsharded: Tensor, before: Tensor | int | None = 0) -> None:
        """Add the change of a parameter since `sum_of`.

        Args:
            parameter: The parameter, as the module has it between steps.
            unsharded: Its unsharded values.
            before: The result of `sum_of`; with 0 every rank has to add equally often.
        """
        if before is not None and self.are_compared():
            self._sums[parameter] = self._sums.get(parameter, 0) + checksum(unsharded) - before

    def take(self, module: nn.Module) -> dict[str, int]:
        """Return the sums since the last call by parameter name, for `Backend.written`."""
        return {name: int(self._sums.pop(parameter, 0)) for name, parameter in module.named_parameters()}


class _Item(NamedTuple):
    """A value that must be equal on every rank that holds it.

    Attributes:
        kind: The key of its remedy.
        name: Its name in the message.
        box: The box of the tensor; None for other values.
    """

    kind: str
    name: str
    box: Box | None = None


def _items(
    backend: Backend[Any], module: nn.Module, optimizers: Sequence[Optimizer], *, with_buffers: bool
) -> Iterator[tuple[_Item, Any]]:
    """Yield all values of this rank that another rank may hold, too: likely causes before their effects."""
    yield _Item("plan", "the engine's decisions"), backend.decisions(module)
    for index, optimizer in enumerate(optimizers):
        yield from _of_optimizer(backend, module, optimizer, f" of optimizer {index}")
    yield from _gradients(backend, module, optimizers)
    for name, written in backend.written(module).items():
        yield _Item("written", f"the writes into the parameter '{name}'"), written
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    skipped = _statistics(module)
    for name, shard in backend.model_state(module).tensors.items():
        kind = "parameter" if name in parameters else "buffer"
        if kind == "parameter" or (with_buffers and name not in skipped):
            for box, view in zip(shard.boxes, shard.data, strict=True):
                yield _Item(kind, f"the {kind} '{name}'", box), view


def _of_optimizer(
    backend: Backend[Any], module: nn.Module, optimizer: Optimizer, of: str
) -> Iterator[tuple[_Item, Any]]:
    """Yield the options and counters of an optimizer, not its tensors."""
    state = backend.optimizer_state(module, optimizer)
    for index, group in enumerate(state["param_groups"]):
        for option, value in group.items():
            if option != "params":
                yield _Item("option", f"'{option}' of param group {index}{of}"), value
    for name, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Shard) and value.shape == () and value.data:
                yield _Item("state", f"'{key}' of '{name}'{of}"), value.data[0]
            elif isinstance(value, (bool, int, float, str)):
                yield _Item("state", f"'{key}' of '{name}'{of}"), value


def _gradients(
    backend: Backend[Any], module: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[_Item, bool]]:
    """Yield whether each parameter has a gradient, for engines that leave one on every rank."""
    if type(backend).publish_gradients is not Backend.publish_gradients:
        return
    handles = [gradient for optimizer in optimizers for gradient in backend.gradients(optimizer)]
    has_owners = any(gradient.replicas < dist.get_world_size() for gradient in handles)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or not has_owners:
            yield _Item("gradient", f"whether there is a gradient of '{name}'"), parameter.grad is not None


def _statistics(module: nn.Module) -> set[str]:
    """Return the names of the running statistics of normalization layers."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, layer in module.named_modules(remove_duplicate=False)
        if hasattr(layer, "track_running_stats")
        for name in _STATISTICS
    }


class DivergenceCheck:
    """Compares the ranks of one run after its first steps, and then at an interval.

    Args:
        backend: The backend that lists the values of this rank.
        every: The interval in steps; None compares after the first steps only, 0 never. Buffers are compared
            only with an interval, because a layer may keep values of its own rank's data in them.
    """

    def __init__(self, backend: Backend[Any], *, every: int | None) -> None:
        self._backend = backend
        self._every = every
        backend.is_watched = every != 0
        self._steps = 0
        self._own: list[_Item] | None = None
        self._shared: list[_Item] = []
        self._holders: dict[_Item, list[int]] = {}

    def after_step(self, module: nn.Module, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        """Count a step, and compare the ranks if they are due. Collective then.

        Args:
            module: The laid-out module.
            optimizers: A function that returns all optimizers of the module.

        Raises:
            DisagreementError: A replicated value differs between ranks; raised on every rank.
        """
        self._steps += 1
        if self._every == 0 or not is_distributed():
            self._backend.is_watched = False
            return
        if self._is_due(self._steps):
            self.compare(module, optimizers())
        self._backend.is_watched = self._is_due(self._steps + 1)

    def _is_due(self, step: int) -> bool:
        """Return True if the ranks are compared after this step."""
        return step <= _FIRST_STEPS or bool(self._every and step % self._every == 0)

    @torch.no_grad()
    def compare(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Compare the ranks now. Collective."""
        mine = dict(_items(self._backend, module, optimizers, with_buffers=bool(self._every)))
        table = self._exchange(mine)
        if table is None:  # some rank holds other values than before, such as new optimizer state
            self._agree_on_items(list(mine))
            table = self._exchange(mine)
            assert table is not None
        differing = [
            item
            for column, item in enumerate(self._shared, start=1)
            if len({row[column] for row in self._rows(table, item)}) > 1
        ]
        if differing:
            self._refuse(differing, table, mine)

    def _rows(self, table: list[list[int]], item: _Item) -> list[list[int]]:
        return [table[rank] for rank in self._holders[item]]

    def _agree_on_items(self, mine: list[_Item]) -> None:
        """Find the values that more than one rank holds. Collective."""
        self._holders = {}
        for rank, items in enumerate(all_gather_object(mine, control_group())):
            for item in items:
                self._holders.setdefault(item, []).append(rank)
        self._shared = [item for item, ranks in self._holders.items() if len(ranks) > 1]
        self._own = mine

    def _exchange(self, mine: dict[_Item, Any]) -> list[list[int]] | None:
        """Return every rank's checksums of the shared values; None if a rank holds others than before."""
        # One row of numbers per rank: names travel only when they change, in `_agree_on_items`.
        known = self._own == list(mine)
        sums = _checksums([mine.get(item) for item in self._shared]) if known else [0] * len(self._shared)
        row = torch.tensor([int(known), *sums], dtype=torch.int64)
        group = control_group()
        assert group is not None
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
        all_gather(rows, row, group=group)
        table = [each.tolist() for each in rows]
        return table if all(each[0] for each in table) else None

    def _refuse(self, differing: list[_Item], table: list[list[int]], mine: dict[_Item, Any]) -> None:
        first = differing[0]
        column = self._shared.index(first) + 1
        ranks = self._holders[first]
        (usual, _), *_ = Counter(table[rank][column] for rank in ranks).most_common(1)
        model = next(rank for rank in ranks if table[rank][column] == usual)
        odd = [rank for rank in ranks if table[rank][column] != usual]
        values = all_gather_object(_portable(mine.get(first)), control_group())
        difference = "" if first.kind == "written" else _difference(values[model], values[odd[0]])
        count = len(differing)
        more = f" {count} values differ; the next is {differing[1].name}." if count > 1 else ""
        raise DisagreementError(
            f"after step {self._steps} of this run the ranks differ in {first.name}: rank "
            f"{', '.join(map(str, odd[:8]))} differs from rank {model}{difference}.{more}",
            remedy=f"{_REMEDIES[first.kind]} check_every=0 turns the comparison off.",
        )


def _checksums(values: Sequence[Any]) -> list[int]:
    """Return the checksums of values, with one copy from each device."""
    sums = [checksum(value) if isinstance(value, Tensor) else None for value in values]
    taken = [each for each in sums if each is not None]
    found = {
        device: iter(torch.stack([each for each in taken if each.device == device]).tolist())
        for device in {each.device for each in taken}
    }
    return [
        digest(value) if each is None else next(found[each.device])
        for value, each in zip(values, sums, strict=True)
    ]


def _portable(value: Any) -> Any:
    return value.flatten()[:_COMPARED].cpu() if isinstance(value, Tensor) else repr(value)


def _difference(usual: Any, odd: Any) -> str:
    """Describe the size of a difference."""
    if not isinstance(usual, Tensor) or not isinstance(odd, Tensor):
        return f" ({odd} for {usual})" if max(len(str(odd)), len(str(usual))) < 100 else ""
    if usual.is_floating_point():
        differing = (usual != odd) & ~(usual.isnan() & odd.isnan())
        largest = (usual.double() - odd.double()).abs().max()
        return f" ({int(differing.sum())} of {usual.numel()} elements differ, by up to {float(largest):.3g})"
    return f" ({int((usual != odd).sum())} of {usual.numel()} elements differ)"
