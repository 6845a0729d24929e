"""Gradients of all ranks made one, while backward still runs.

Every parameter has a hook that autograd calls when its gradient is complete. A bucket whose gradients have
all come starts its collective at once, and the rest of backward hides it. When backward ends, what has not
come counts as zero, and every parameter that some rank used gets the mean. Plain ``loss.backward()`` does it
all; nothing has to be called.

One pass always reduces whatever gradient a parameter has by then, so several losses, accumulation under
`synchronize` = False, parameters that only some ranks use, and freezing in between come out right.
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
"""Limit of the first bucket, so that the first collective starts early; as in torch DDP."""
BUCKET_BYTES = 25 << 20


class _Arrangement:
    """The buckets for one choice of trainable parameters.

    Attributes:
        buckets: The buckets in the order in which their collectives start, on every rank.
        of: The bucket of each parameter, by number.
        is_final: True if the order is that in which gradients came; first it is the reverse of the model's.
    """

    def __init__(self, buckets: list[Bucket], *, is_final: bool) -> None:
        self.buckets = buckets
        self.of = {index: bucket for bucket in buckets for index in bucket.members}
        self.is_final = is_final


class Reducer:
    """Averages gradients over the outer axis; those of synchronized parameters it also sums over the unit.

    Args:
        parameters: The parameters to be reduced, in the model's order, trainable or not.
        axes: This rank's groups.
        synchronized: The parameters among them whose gradients are partial on every rank of a unit.
        rows: Buckets of parameters that ZeRO stores in rows; their gradients come through `mark`. Their
            members are numbers from ``len(parameters)`` on.
        sparse: True if gradients may be sparse, so that ranks must tell each other.
        elsewhere: The parameters that another stage of a pipeline stores.
        places: The place in the model of each parameter, and then of each in rows, where the stages of a
            pipeline store others; by default they are in the model's order.
        bucket_bytes: Limit of all buckets but the first.

    Attributes:
        synchronize: True if backward reduces; without it gradients only add up on this rank.
        on_end: Called when a pass is over.
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
        self._complete: set[int] = set()  # of the synchronized, whose gradients are sums over the unit by now
        self._hooks: list[RemovableHandle] = []
        self._count = len(self._parameters) + sum(len(bucket.members) for bucket in self._rows)
        self._elsewhere = {self._number_of[id(parameter)] for parameter in elsewhere}
        self._places = range(self._count) if places is None else places
        self._open: list[Bucket] | None = None  # the buckets of the running pass, in order
        self._next = 0  # which of them starts its collective next
        self._used: list[int] = []
        self._came: list[int] = []  # numbers of the parameters, in the order their gradients came
        self._held = 0  # nested `backward_pass`
        self._error: Exception | None = None  # raised when the pass ends: hooks must not

    def attach(self) -> None:
        """Listen to the parameters' gradients, if there is anyone to share them with."""
        with local_mode():
            for index, parameter in enumerate(self._parameters):
                can_train = parameter.is_floating_point() or parameter.is_complex()
                shared = self._group_of(parameter) is not None or self._axes.pipe is not None
                if can_train and shared and index not in self._elsewhere:
                    self._hooks.append(_listen(parameter, partial(self._hear, index)))
                    if id(parameter) in self._synchronized:
                        self._hooks.append(_listen(parameter, partial(self._foresee, index), before=True))

    def detach(self) -> None:
        """Leave the parameters alone again."""
        self.recover()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """One pass around everything inside, ended when the block does. Optional, collective.

        Only with it a rank takes part that uses no parameter at all, and parts that are recomputed with
        ``torch.utils.checkpoint(..., use_reentrant=True)`` share one pass.
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
                if self._open is None:
                    self._begin()
                self._finish()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def _leave(self) -> None:
        self._held -= 1

    def recover(self) -> None:
        """End and forget started reductions, after an error in backward. Cheap if there was none."""
        if self._open is not None:
            with local_mode(), torch.no_grad():
                self._launch(all_of_them=True)
                self._agree_on_use()
                for bucket in self._open:
                    bucket.wait()
                self._close()

    def _foresee(self, index: int, _: Tensor) -> None:
        """Prepare for another addition to a gradient, so that nothing is summed over the unit twice."""
        if index in self._complete:
            with local_mode():
                self._share_out(index)

    def _share_out(self, index: int) -> None:
        """Let the ranks of the unit hold equal summands of a gradient that was complete on all of them."""
        self._complete.discard(index)
        gradient = self._parameters[index].grad
        if gradient is not None:
            with torch.no_grad():
                gradient.div_(self._axes.unit_size)

    def _hear(self, index: int, _: nn.Parameter) -> None:
        """Autograd has completed a gradient."""
        if self.synchronize:
            with local_mode():
                if self._open is None or self._arrangement.of[index].launched:
                    self.expect(index)
                self.mark(index)

    def expect(self, index: int) -> None:
        """Make sure that a pass is open in which the bucket of a parameter has not left."""
        if self._open is not None and not self._arrangement.of[index].launched:
            return
        with local_mode(), torch.no_grad():
            if self._open is not None:
                self._finish_before(index)
            self._begin()
            self._call_at_end()

    def _finish_before(self, index: int) -> None:
        """A gradient comes a second time in one pass, as reentrant checkpoints bring about: begin another."""
        self._error = self._error or self._arrangement.of[index].fault_of_late(index)
        if index >= len(self._parameters):
            self._finish()
            return
        parameter = self._parameters[index]
        sum_of_both = parameter.grad
        self._finish()
        parameter.grad = sum_of_both

    def mark(self, index: int) -> None:
        """Take the gradient of a parameter, and start complete buckets."""
        bucket = self._arrangement.of[index]
        bucket.mark(index)
        bucket.missing.discard(index)
        self._came.append(index)
        if not bucket.missing:
            with local_mode(), torch.no_grad():
                self._launch()

    def _call_at_end(self) -> None:
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
        self._next, self._used, self._came = 0, [UNUSED] * self._count, []

    def _launch(self, *, all_of_them: bool = False) -> None:
        """Start the collectives whose turn it is: all ranks start them in the same order."""
        buckets = self._open or []
        while self._next < len(buckets) and (all_of_them or not buckets[self._next].missing):
            bucket = buckets[self._next]
            for index in self._complete.intersection(bucket.members):
                self._share_out(index)
            bucket.fill(self._used)
            bucket.launch()
            bucket.launched = True
            self._next += 1

    def _finish(self) -> None:
        """Fill missing gradients, wait for all reductions and distribute the gradients."""
        buckets = self._open or []
        self._launch(all_of_them=True)
        answer = self._agree_on_use()
        for bucket in buckets:
            bucket.wait()
        used = answer()
        for bucket in buckets:
            unused = [index for index in bucket.members if used[index] == UNUSED]
            elsewhere = bucket.used_elsewhere(unused) if unused else set()
            for index in bucket.members:
                kind = DENSE if index in elsewhere else used[index]
                if kind != UNUSED:
                    bucket.hand_out(index, kind)
                    self._note_complete(index)
        came = self._came
        self._close()
        if not self._arrangement.is_final and self.synchronize:
            self._arrange_as_they_came(came)
        if self.on_end is not None:
            self.on_end()

    def is_complete(self, parameter: nn.Parameter) -> bool:
        """Return True if the gradient of a synchronized parameter is the sum over the unit by now."""
        return self._number_of[id(parameter)] in self._complete

    def note_complete(self, parameter: nn.Parameter) -> None:
        """A synchronized parameter was given a gradient that is the same on all ranks of the unit."""
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
        """Ask what the ranks together know of each gradient. Collective if it has to be, over host memory.

        Returns:
            A function that gives the answer, and waits for it only if this rank lacks a gradient.
        """
        used = self._used
        is_open = self._sparse or self._rows
        if self._axes.pipe is None and (self._axes.world is None or not is_open):
            return lambda: used
        kinds_in_model = [UNUSED] * self._count
        for place, kind in zip(self._places, used, strict=True):
            kinds_in_model[place] = kind
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
        """The buckets for the parameters that are trained now."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        found = self._arrangements.get(trained)
        if found is None:
            numbers = [index for index, is_trained in enumerate(trained) if is_trained]
            # As in DDP: one bucket until it is known in which order gradients come.
            buckets = self._buckets(numbers, limits=[1 << 62])[::-1]
            buckets += [*self._rows[::-1], *self._unshared(numbers)]
            found = self._arrangements[trained] = _Arrangement(buckets, is_final=False)
        return found

    def _unshared(self, numbers: Sequence[int]) -> list[Bucket]:
        """With a pipeline, what is reduced with nobody; last, since some of it never comes."""
        own = [index for index in numbers if self._group_of(self._parameters[index]) is None]
        if self._axes.pipe is None:
            return []
        return [UseBucket(own, [self._parameters[index] for index in own], self._elsewhere)]

    def _buckets(self, numbers: Sequence[int], *, limits: Sequence[int]) -> list[Bucket]:
        """Buckets of parameters in this order; one kind of reduction each."""
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

    def _arrange_as_they_came(self, came: Sequence[int]) -> None:
        """From now on, buckets in the order in which the first rank's gradients came. Collective."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        own = list(dict.fromkeys(came))
        rest = [i for i in sorted(self._arrangement.of, reverse=True) if i not in set(own)]
        order = torch.tensor([*own, *rest], dtype=torch.int64, device=self._device)
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


def _listen(
    parameter: nn.Parameter, heard: Callable[[Any], None], *, before: bool = False
) -> RemovableHandle:
    """Call a function when a gradient is complete, or before something is added to it.

    Torch refuses it for a parameter that is frozen for now.
    """
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    register = parameter.register_hook if before else parameter.register_post_accumulate_grad_hook
    try:
        return cast("RemovableHandle", register(heard))  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(trained)
