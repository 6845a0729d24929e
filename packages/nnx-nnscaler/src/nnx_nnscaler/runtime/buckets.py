"""Reduce the gradients of several parameters together, in one flat buffer.

The grouping of parameters and the order inside a bucket are those of torch DDP. So gloo and NCCL add the
ranks' numbers in the same order, and the sums are bitwise equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce
from typing_extensions import override

from nnx_core._torch_compat import foreach_copy_, foreach_mul_, users_of_storage
from nnx_core.agree.announced_waits import wait_for_collective
from nnx_core.errors import UnsupportedError
from nnx_nnscaler._torch_compat import unflatten_dense_tensors

UNUSED, DENSE, SPARSE = 0, 1, 2
"""The kind of a gradient in a pass; the greatest over the ranks counts."""


LARGE = 1 << 15
"""Minimum elements of a gradient that is copied at once; smaller ones are copied together, in fewer calls."""


def assign_buckets(tensors: Sequence[Tensor], limits: Sequence[int]) -> list[list[int]]:
    """Group tensors, in order, into buckets of one dtype and device.

    A bucket is complete as soon as it has at least as many bytes as its limit. Of each dtype, the first
    bucket takes the first limit, the next the second, and so on; the last limit holds for all others.

    Example:
        >>> assign_buckets([torch.zeros(2), torch.zeros(3), torch.zeros(1)], [4, 16])
        [[0], [1, 2]]
    """
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, int]] = {}
    complete: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        key = tensor.dtype, tensor.device
        members, size, number = filling.get(key, ([], 0, 0))
        members.append(index)
        size += tensor.numel() * tensor.element_size()
        if size >= limits[min(number, len(limits) - 1)]:
            complete.append(members)
            members, size, number = [], 0, number + 1
        filling[key] = members, size, number
    return sorted(complete + [members for members, _, _ in filling.values() if members], key=min)


class Bucket(ABC):
    """Gradients that are reduced together.

    Attributes:
        members: The numbers of its parameters in the reducer.
        always: True if it is reduced even while gradients only accumulate.
        missing: The members without a gradient in the running pass.
        launched: True if its collective has started.
    """

    members: list[int]
    always: bool = False

    def __init__(self, members: Sequence[int]) -> None:
        self.members = list(members)
        self.missing: set[int] = set()
        self.launched = False

    @abstractmethod
    def start(self) -> None:
        """Prepare for the gradients of a pass."""

    def mark(self, index: int) -> None:  # noqa: B027 # most buckets read gradients only in `fill`
        """Note that the gradient of a member is complete."""

    def fault_of_late(self, index: int) -> Exception | None:
        """Return the error for a gradient that arrives after the bucket was sent; None if it does no harm."""
        return None

    @abstractmethod
    def fill(self, used: list[int]) -> None:
        """Prepare the launch: scale every member's gradient, and fill zeros for the missing ones.

        Args:
            used: The kinds of the members' gradients by number, to be completed.
        """

    def used_elsewhere(self, unused: Sequence[int]) -> set[int]:
        """Return the members that have gradients on other ranks; call it after `wait`.

        Args:
            unused: The members without a gradient on this rank, at least one.
        """
        return set()

    @abstractmethod
    def launch(self) -> None:
        """Start the collective."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the results on this rank; it may need further collectives."""

    @abstractmethod
    def hand_out(self, index: int, kind: int) -> None:
        """Set the reduced gradient of a parameter."""

    def end(self) -> None:  # noqa: B027 # most buckets have nothing to free
        """Free the memory that only a pass needs."""


class GradientBucket(Bucket):
    """Gradients that all ranks of a group hold completely: scaled and summed.

    After a pass the gradients are views of the buffer, which saves copying them back. The next pass reuses
    the buffer only if nothing else refers to it.

    A rank without a gradient sends -0.0 as its first element, and a rank with a gradient never does. A sum of
    zeros is -0.0 only if all of them are. So ranks learn the used parameters without another collective.

    Args:
        members: The numbers of the parameters.
        parameters: The parameters, in the order of their numbers.
        group: The ranks of the sum.
        scale: The factor of each rank's gradient, applied before the sum, as DDP does.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[nn.Parameter],
        *,
        group: dist.ProcessGroup,
        scale: float,
    ) -> None:
        super().__init__(members)
        self._parameters = dict(zip(members, parameters, strict=True))
        self._group = group
        self._scale = scale
        self._buffer: Tensor | None = None
        self._slots: dict[int, Tensor] = {}
        self._numel = sum(parameter.numel() for parameter in parameters)
        self._large = {i for i, parameter in self._parameters.items() if parameter.numel() >= LARGE}
        self._filled: set[int] = set()
        sizes = [parameter.numel() for parameter in parameters]
        firsts = [start for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False) if size]
        self._firsts = torch.tensor(firsts, dtype=torch.int64, device=parameters[0].device)
        self._zeros = torch.zeros(len(firsts), dtype=parameters[0].dtype, device=parameters[0].device)
        self._work: dist.Work | None = None

    @override
    def start(self) -> None:
        if self._buffer is None or not self._is_own(self._buffer):
            first = next(iter(self._parameters.values()))
            self._buffer = torch.empty(self._numel, dtype=first.dtype, device=first.device)
        self._slots = views_like(self._buffer, self._parameters)

    def _is_own(self, buffer: Tensor) -> bool:
        """Return True if nothing but the parameters' own gradients refers to the buffer."""
        storage = buffer.untyped_storage()
        lookers = users_of_storage(storage) - 2  # the buffer, and `storage`
        if lookers > 0:
            start, stop = buffer.data_ptr(), buffer.data_ptr() + storage.nbytes()
            gradients = [parameter.grad for parameter in self._parameters.values()]
            lookers -= sum(
                start <= g.data_ptr() < stop for g in gradients if g is not None and not g.is_sparse
            )
        return lookers <= 0

    @override
    def mark(self, index: int) -> None:
        if index in self._large:
            gradient = self._parameters[index].grad
            if gradient is not None and not gradient.is_sparse and not self._is_slot(index, gradient):
                torch.mul(gradient.detach(), self._scale, out=self._slots[index])  # while the cache holds it
                self._filled.add(index)

    @override
    def fault_of_late(self, index: int) -> Exception | None:
        gradient = self._parameters[index].grad
        if gradient is None or not self._is_slot(index, gradient):
            return None  # autograd added it to the buffer during the reduction
        return UnsupportedError(
            f"the gradient of a parameter of shape {tuple(gradient.shape)} was completed twice in one "
            "backward, while it was accumulated.",
            remedy="Use `torch.utils.checkpoint` with `use_reentrant=False`, or zero gradients with "
            "`set_to_none=True`.",
        )

    def _is_slot(self, index: int, gradient: Tensor) -> bool:
        return not gradient.is_sparse and gradient.data_ptr() == self._slots[index].data_ptr()

    @override
    def fill(self, used: list[int]) -> None:
        slots, gradients, unused = [], [], []
        for index, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                unused.append(self._slots[index])
                continue
            used[index] = SPARSE if gradient.is_sparse else DENSE
            if index not in self._filled:
                slots.append(self._slots[index])
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient.detach())
        assert self._buffer is not None, "`start` comes first"
        if slots:
            foreach_copy_(slots, gradients)
            if self._filled:
                foreach_mul_(slots, self._scale)
            else:
                self._buffer.mul_(self._scale)
        self._buffer.index_add_(0, self._firsts, self._zeros)  # turns -0.0 into +0.0
        for slot in unused:
            slot.fill_(-0.0)

    @override
    def used_elsewhere(self, unused: Sequence[int]) -> set[int]:
        assert self._buffer is not None, "`start` comes first"
        firsts = self._buffer.index_select(0, self._firsts).cpu()  # one copy, because the host waits for it
        firsts = firsts.real if firsts.is_complex() else firsts
        is_unused = ((firsts == 0) & firsts.signbit()).tolist()
        filled = [index for index, parameter in self._parameters.items() if parameter.numel()]
        used = {index for index, nowhere in zip(filled, is_unused, strict=True) if not nowhere}
        return used.intersection(unused)

    @override
    def launch(self) -> None:
        self._work = all_reduce(self._buffer, group=self._group, async_op=True)

    @override
    def wait(self) -> None:
        if self._work is not None:
            wait_for_collective(self._work, "a reduction of gradients")

    @override
    def hand_out(self, index: int, kind: int) -> None:
        parameter, slot = self._parameters[index], self._slots[index]
        gradient = parameter.grad
        if kind == SPARSE:
            dims = gradient.sparse_dim() if gradient is not None and gradient.is_sparse else 1
            parameter.grad = slot.to_sparse(dims)
        elif gradient is None or not self._is_slot(index, gradient):
            parameter.grad = slot

    @override
    def end(self) -> None:
        self._slots, self._work = {}, None
        self._filled.clear()


def views_like(buffer: Tensor, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return a view of the buffer for every tensor, with the tensor's strides if these leave no gaps."""
    if all(tensor.is_contiguous() for tensor in tensors.values()):
        views = unflatten_dense_tensors(buffer, list(tensors.values()))
        return dict(zip(tensors, views, strict=True))
    slots, offset = {}, 0
    pieces = torch.split(buffer, [tensor.numel() for tensor in tensors.values()])
    for (index, tensor), piece in zip(tensors.items(), pieces, strict=True):
        if tensor.is_contiguous():
            slots[index] = piece.view(tensor.shape)
        elif _fills_its_storage(tensor):
            slots[index] = buffer.as_strided(tensor.shape, tensor.stride(), offset)
        else:
            slots[index] = piece.view(tensor.shape)
        offset += piece.numel()
    return slots


def _fills_its_storage(tensor: Tensor) -> bool:
    """Return True if the elements fill the memory without gap or overlap, in any order of the dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class UseBucket(Bucket):
    """Parameters that no other rank reduces; the stages only learn which of them were used.

    A parameter of another stage gets an empty gradient if it was used. So each parameter has a gradient, and
    optimizer state, on all ranks or on none.

    Args:
        members: The numbers of the parameters.
        parameters: The parameters, in the order of their numbers.
        elsewhere: The numbers of the parameters that another stage stores.
    """

    always = True

    def __init__(
        self, members: Sequence[int], parameters: Sequence[nn.Parameter], elsewhere: Collection[int]
    ) -> None:
        super().__init__(members)
        self._parameters = dict(zip(members, parameters, strict=True))
        self._elsewhere = elsewhere

    @override
    def start(self) -> None:
        pass

    @override
    def fill(self, used: list[int]) -> None:
        for index, parameter in self._parameters.items():
            if parameter.grad is not None and index not in self._elsewhere:
                used[index] = DENSE

    @override
    def launch(self) -> None:
        pass

    @override
    def wait(self) -> None:
        pass

    @override
    def hand_out(self, index: int, kind: int) -> None:
        parameter = self._parameters[index]
        if parameter.grad is None and index in self._elsewhere:
            parameter.grad = torch.zeros_like(parameter)
