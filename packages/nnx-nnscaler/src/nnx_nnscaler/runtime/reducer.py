"""Average gradients over the ranks while backward still runs.

Autograd calls a hook of each parameter when its gradient is complete. A bucket starts its collective as soon
as all its gradients are complete, so that the rest of backward hides it. At the end of backward a missing
gradient counts as zero, and every parameter that some rank used gets the mean. Plain ``loss.backward()`` does
all of this.

A pass always reduces the complete content of ``grad``. So it is right for several losses, accumulation with
`synchronize` = False, parameters that only some ranks use, and parameters frozen in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_base._torch_compat import local_mode
from nnx_base.clean_up import clean_up_after_error
from nnx_core._torch_compat import when_backward_ends
from nnx_core.agree.parameter_usage import asked_anywhere
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.runtime.buckets import (
    DENSE,
    SPARSE,
    UNUSED,
    Bucket,
    GradientBucket,
    UseBucket,
    assign_buckets,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = [
    "BUCKET_BYTES",
    "Reducer",
]


FIRST_BYTES = 1 << 20
"""The limit of the first bucket. It is small, as in torch DDP, so that the first collective starts early."""
BUCKET_BYTES = 25 << 20


class _Arrangement:
    """The buckets for one choice of trainable parameters.

    Attributes:
        buckets: The buckets in the order in which every rank starts their collectives.
        of: The bucket of each parameter, by number.
        is_final: True if the order is that of a backward's gradients; the first is the reversed model order.
    """

    def __init__(self, buckets: list[Bucket], *, is_final: bool) -> None:
        self.buckets = buckets
        self.of = {index: bucket for bucket in buckets for index in bucket.members}
        self.is_final = is_final


class Reducer:
    """Averages gradients over the outer axis, and sums those of synchronized parameters over the unit too.

    Args:
        parameters: The parameters to be reduced, in the model's order, trainable or not.
        axes: The process groups of this rank.
        synchronized: The parameters whose gradients are partial on every rank of a unit.
        rows: Buckets of parameters that ZeRO stores in rows; `mark` reports their gradients. The numbers of
            their members start at ``len(parameters)``.
        sparse: True if gradients may be sparse, so that ranks must exchange their kinds.
        elsewhere: The parameters that another stage of a pipeline stores.
        places: The index in the model of each parameter, then of each one in rows, if the stages of a
            pipeline store different ones; by default the model's order.
        bucket_bytes: The limit of all buckets but the first.

    Attributes:
        synchronize: True if backward reduces; False accumulates gradients on this rank only.
        on_end: A function to call at the end of a pass.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        axes: Axes,
        *,
        synchronized: Sequence[nn.Parameter] = (),
        rows: Sequence[Bucket] = (),
        sparse: bool = False,
        elsewhere: Sequence[nn.Parameter] = (),
        places: Sequence[int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.synchronize = True
        self.on_end: Callable[[], None] | None = None
        self._parameters = list(parameters)
        self._axes = axes
        self._number_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._synchronized = {id(parameter) for parameter in synchronized}
        self._rows = list(rows)
        self._sparse = sparse
        self._bucket_bytes = bucket_bytes
        self._arrangements: dict[tuple[bool, ...], _Arrangement] = {}
        self._arrangement = _Arrangement([], is_final=True)
        # Synchronized parameters whose gradient is already the sum over the unit.
        self._complete: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._count = len(self._parameters) + sum(len(bucket.members) for bucket in self._rows)
        self._elsewhere = {self._number_of[id(parameter)] for parameter in elsewhere}
        self._places = range(self._count) if places is None else places
        # The buckets of the running pass in order, and the index of the next one to start.
        self._open: list[Bucket] | None = None
        self._next = 0
        self._used: list[int] = []
        # The parameters of the running pass in the order of their gradients.
        self._order: list[int] = []
        # The depth of nested `backward_pass`.
        self._held = 0
        # Raised at the end of the pass: a hook that raises would leave other ranks alone in a collective.
        self._error: Exception | None = None

    def attach(self) -> None:
        """Hook the parameters whose gradients are shared with other ranks."""
        with local_mode():
            for index, parameter in enumerate(self._parameters):
                can_train = parameter.is_floating_point() or parameter.is_complex()
                shared = self._group_of(parameter) is not None or self._axes.pipe is not None
                if can_train and shared and index not in self._elsewhere:
                    self._hooks.append(_hook(parameter, partial(self._after_gradient, index)))
                    if id(parameter) in self._synchronized:
                        self._hooks.append(
                            _hook(parameter, partial(self._before_gradient, index), before=True)
                        )

    def detach(self) -> None:
        """Remove all hooks."""
        self.recover()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Context manager of one pass, which ends with the block. Optional, collective.

        A rank that uses no parameter takes part only with it. Backwards of reentrant activation checkpoints
        share one pass only with it.
        """
        if self._axes.world is None and self._axes.pipe is None:
            yield
            return
        self._held += 1
        with clean_up_after_error("reducing the gradients that were there", self._leave, self.recover):
            yield
        self._leave()
        if self._held == 0 and (self.synchronize or self._rows or self._axes.pipe is not None):
            with local_mode(), torch.no_grad():
                # No gradient came on this rank, but the others wait for it in their collectives.
                if self._open is None:
                    self._begin()
                self._finish()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _leave(self) -> None:
        self._held -= 1

    def recover(self) -> None:
        """Complete and drop the running pass after an error in backward; do nothing without one."""
        if self._open is not None:
            with local_mode(), torch.no_grad():
                # Ranks without the error wait in the same collectives, so all of them are started.
                self._launch(all_of_them=True)
                self._agree_on_use()
                for bucket in self._open:
                    bucket.wait()
                self._close()

    def _before_gradient(self, index: int, _: Tensor) -> None:
        """Undo the sum over the unit before autograd adds a new partial gradient."""
        if index in self._complete:
            with local_mode():
                self._split_sum(index)

    def _split_sum(self, index: int) -> None:
        """Divide a gradient that is the sum over the unit into equal summands of its ranks."""
        # The next reduction sums over the unit once more, which must give the same again.
        self._complete.discard(index)
        gradient = self._parameters[index].grad
        if gradient is not None:
            with torch.no_grad():
                gradient.div_(self._axes.unit_size)

    def _after_gradient(self, index: int, _: nn.Parameter) -> None:
        """Record a gradient that autograd has completed."""
        if self.synchronize:
            with local_mode():
                if self._open is None or self._arrangement.of[index].launched:
                    self.expect(index)
                self.mark(index)

    def expect(self, index: int) -> None:
        """Open a pass, unless one is open that has not launched the bucket of a parameter."""
        if self._open is not None and not self._arrangement.of[index].launched:
            return
        with local_mode(), torch.no_grad():
            if self._open is not None:
                self._finish_before(index)
            self._begin()
            self._call_at_end()

    def _finish_before(self, index: int) -> None:
        """End a pass early, because a reentrant checkpoint completes a gradient for the second time."""
        self._error = self._error or self._arrangement.of[index].fault_of_late(index)
        if index >= len(self._parameters):
            self._finish()
            return
        parameter = self._parameters[index]
        # `_finish` replaces ``grad`` by the mean of the first gradient. The next pass reduces both from here.
        sum_of_both = parameter.grad
        self._finish()
        parameter.grad = sum_of_both

    def mark(self, index: int) -> None:
        """Record the complete gradient of a parameter, and start complete buckets."""
        bucket = self._arrangement.of[index]
        bucket.mark(index)
        bucket.missing.discard(index)
        self._order.append(index)
        if not bucket.missing:
            with local_mode(), torch.no_grad():
                self._launch()

    def _call_at_end(self) -> None:
        # In `backward_pass` the end of the block ends the pass, after all backwards inside.
        if self._held == 0:
            when_backward_ends(self._end)

    def _end(self) -> None:
        if self._open is not None:
            with local_mode(), torch.no_grad():
                self._finish()

    def _begin(self) -> None:
        self._arrangement = self._arranged()
        self._open = [bucket for bucket in self._arrangement.buckets if self.synchronize or bucket.always]
        for bucket in self._open:
            bucket.missing, bucket.launched = set(bucket.members), False
            bucket.start()
        self._next, self._used, self._order = 0, [UNUSED] * self._count, []

    def _launch(self, *, all_of_them: bool = False) -> None:
        """Start the collectives of complete buckets, up to the first bucket that is incomplete."""
        buckets = self._open or []
        # A complete bucket waits for those before it: collectives match by their order on each rank.
        while self._next < len(buckets) and (all_of_them or not buckets[self._next].missing):
            bucket = buckets[self._next]
            # Gradients that this backward has not added to are still sums over the unit.
            for index in self._complete.intersection(bucket.members):
                self._split_sum(index)
            bucket.fill(self._used)
            bucket.launch()
            bucket.launched = True
            self._next += 1

    def _finish(self) -> None:
        """Fill missing gradients, wait for all reductions and set the gradients."""
        buckets = self._open or []
        self._launch(all_of_them=True)
        # Begun before the waits, so that its messages overlap with the reductions.
        answer = self._agree_on_use()
        for bucket in buckets:
            bucket.wait()
        used = answer()
        for bucket in buckets:
            unused = [index for index in bucket.members if used[index] == UNUSED]
            elsewhere = bucket.used_elsewhere(unused) if unused else set()
            for index in bucket.members:
                kind = DENSE if index in elsewhere else used[index]
                # Without a gradient on any rank ``grad`` stays None: optimizers skip the parameter.
                if kind != UNUSED:
                    bucket.hand_out(index, kind)
                    self._note_complete(index)
        order = self._order
        self._close()
        if not self._arrangement.is_final and self.synchronize:
            self._reorder(order)
        if self.on_end is not None:
            self.on_end()

    def is_complete(self, parameter: nn.Parameter) -> bool:
        """Return True if the gradient of a synchronized parameter is already the sum over the unit."""
        return self._number_of[id(parameter)] in self._complete

    def note_complete(self, parameter: nn.Parameter) -> None:
        """Record that the user set a gradient that is the same on all ranks of the unit."""
        self._complete.add(self._number_of[id(parameter)])

    def _note_complete(self, index: int) -> None:
        if index < len(self._parameters) and id(self._parameters[index]) in self._synchronized:
            self._complete.add(index)

    def _close(self) -> None:
        for bucket in self._open or ():
            bucket.end()
            bucket.launched = False
        self._open = None

    def _agree_on_use(self) -> Callable[[], list[int]]:
        """Find the kind of each gradient over all ranks. Collective over host memory, if it is needed.

        Returns:
            A function that returns the kinds, and waits only if this rank lacks a gradient.
        """
        used = self._used
        # Dense buckets tell by themselves, with the sign of a zero; see `GradientBucket.used_elsewhere`.
        is_open = self._sparse or self._rows
        if self._axes.pipe is None and (self._axes.world is None or not is_open):
            return lambda: used
        # Ranks of different stages number their parameters differently.
        kinds_in_model = [UNUSED] * self._count
        for place, kind in zip(self._places, used, strict=True):
            kinds_in_model[place] = kind
        # Two flags for each gradient; their sum over "any rank" is the greatest kind.
        answer = asked_anywhere([kind >= least for least in (DENSE, SPARSE) for kind in kinds_in_model])

        def kinds() -> list[int]:
            if UNUSED not in used:
                return used
            flags = answer()
            return [flags[place] + flags[self._count + place] for place in self._places]

        return kinds

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device if self._parameters else self._rows[0].device  # type: ignore[attr-defined]

    def _group_of(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        if self._number_of[id(parameter)] in self._elsewhere:
            return None
        return self._axes.world if id(parameter) in self._synchronized else self._axes.outer

    def _arranged(self) -> _Arrangement:
        """Return the buckets of the parameters that are trained now."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        found = self._arrangements.get(trained)
        if found is None:
            numbers = [index for index, is_trained in enumerate(trained) if is_trained]
            # One bucket for each kind, as in DDP, until a backward has shown the order of the gradients.
            buckets = self._buckets(numbers, limits=[1 << 62])[::-1]
            buckets += [*self._rows[::-1], *self._unshared(numbers)]
            found = self._arrangements[trained] = _Arrangement(buckets, is_final=False)
        return found

    def _unshared(self, numbers: Sequence[int]) -> list[Bucket]:
        """Return the bucket of a pipeline's parameters that this rank reduces with no other."""
        # Callers put it last: the gradients of other stages never come, and would block buckets behind it.
        own = [index for index in numbers if self._group_of(self._parameters[index]) is None]
        if self._axes.pipe is None:
            return []
        return [UseBucket(own, [self._parameters[index] for index in own], self._elsewhere)]

    def _buckets(self, numbers: Sequence[int], *, limits: Sequence[int]) -> list[Bucket]:
        """Make buckets of parameters in this order; each has one process group."""
        buckets: list[tuple[int, Bucket]] = []
        place_of = {index: place for place, index in enumerate(numbers)}
        for group in dict.fromkeys(self._group_of(self._parameters[i]) for i in numbers):
            own = [index for index in numbers if self._group_of(self._parameters[index]) is group]
            if group is None:
                continue
            for places in assign_buckets([self._parameters[index] for index in own], limits):
                members = [own[place] for place in places]
                tensors = [self._parameters[index] for index in members]
                bucket = GradientBucket(members, tensors, group=group, scale=1 / self._axes.outer_size)
                buckets.append((max(place_of[index] for index in members), bucket))
        return [bucket for _, bucket in sorted(buckets, key=lambda pair: pair[0])]

    def _reorder(self, order_here: Sequence[int]) -> None:
        """Make the final buckets, in the order of the first rank's gradients. Collective."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        own = list(dict.fromkeys(order_here))
        rest = [i for i in sorted(self._arrangement.of, reverse=True) if i not in set(own)]
        order = torch.tensor([*own, *rest], dtype=torch.int64, device=self._device)
        # Ranks may have used different parameters, but must launch the same buckets.
        if self._axes.world is not None:
            dist.broadcast(order, group_src=0, group=self._axes.world)
        numbers: list[int] = order.tolist()
        plain = [index for index in numbers if index < len(self._parameters)]
        buckets = [
            *self._buckets(plain, limits=[min(FIRST_BYTES, self._bucket_bytes), self._bucket_bytes]),
            *self._rows,
        ]
        place = {index: place for place, index in enumerate(numbers)}
        buckets.sort(key=lambda bucket: max(place[index] for index in bucket.members))
        buckets += self._unshared(plain)
        self._arrangements[trained] = _Arrangement(buckets, is_final=True)


def _hook(
    parameter: nn.Parameter, function: Callable[[Any], None], *, before: bool = False
) -> RemovableHandle:
    """Call a function after autograd has accumulated a gradient, or before."""
    trained = parameter.requires_grad
    # torch refuses hooks on frozen parameters, which may be trained later.
    parameter.requires_grad_(True)
    register = parameter.register_hook if before else parameter.register_post_accumulate_grad_hook
    try:
        return cast("RemovableHandle", register(function))  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(trained)
