"""User code calls torch.distributed directly, instead of the strategy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional

from nnx_base.ranks import is_distributed
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import GLOBAL_BATCH, Plain, Task
from nnx_conformance.training import make_trainer

CALLS = ("all_reduce", "all_reduce", "all_gather_object")
"""The function of torch.distributed behind each count of `CountsByItself`."""


@dataclass(frozen=True)
class Counted:
    """The counts and warnings of a rank.

    Attributes:
        counts: The samples of a global batch, as each call counts them.
        warned: The function of each warning about torch.distributed.
        is_put_back: True if torch.distributed has its own functions after the run.

    """

    counts: tuple[float, ...]
    warned: list[str]
    is_put_back: bool


class CountsByItself(Plain):
    """Counts the samples of the global batch in each step, by torch.distributed on the default group."""

    counts: tuple[float, ...] = ()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Count in three ways; the maximum and the log do not depend on the number of ranks."""
        own = float(len(batch[0]))
        summed, lengths = torch.tensor(own), [own]
        through_torch = torch.tensor(own)
        if is_distributed():
            dist.all_reduce(summed)
            through_torch = functional.all_reduce(through_torch)  # type: ignore[no-untyped-call]
            lengths = [0.0] * dist.get_world_size()
            dist.all_gather_object(lengths, own)
            dist.all_reduce(torch.tensor(own), op=dist.ReduceOp.MAX)
        self.counts = float(summed), float(through_torch), sum(lengths)
        self.log("count", own, sync_dist=True, reduce_fx="sum")
        return super().training_step(batch, index)


def count(subject: Subject) -> Counted:
    """Train, and return the counts and warnings."""
    own: Any = dist.all_reduce
    module = CountsByItself(Task())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(subject, module.task).fit(module)
    messages = (str(warning.message).partition(" on the default group") for warning in caught)
    warned = [head.removeprefix("torch.distributed.") for head, found, _ in messages if found]
    return Counted(module.counts, warned, dist.all_reduce is own)


@check()
def torch_distributed_calls(bench: Bench) -> None:
    """``torch.distributed`` calls in a step count every sample once, or a warning names the function."""
    outcomes = bench.run(count)
    expect(all(outcome.is_put_back for outcome in outcomes), "functions of torch.distributed stay replaced.")
    wrong = {
        call
        for call, *counts in zip(CALLS, *(outcome.counts for outcome in outcomes), strict=True)
        if any(number != GLOBAL_BATCH for number in counts)
    }
    warned = outcomes[0].warned
    expect(sorted(warned) == sorted(wrong), f"warned of {warned}, and {sorted(wrong)} count samples twice.")
