"""Log the first lines of a run: ranks, devices, the layout of the model, the global batch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from nnx_core.backend import ParallelContext

__all__ = ["another_batch", "batch_facts", "first_lines", "size_of_batch", "size_of_loader"]

_WIDTH = 100


def first_lines(
    name: str, context: ParallelContext, *, over: str, layout: str, batch: tuple[str, ...]
) -> list[str]:
    """Return the first lines of a run, one for each fact, of at most 100 characters.

    Args:
        name: The name of the strategy.
        context: The context of this rank.
        over: The name of the process group's backend.
        layout: The engine's summary of the module, clauses separated by semicolons.
        batch: See `batch_facts`.

    Example:
        >>> import torch
        >>> context = ParallelContext(device=torch.device("cpu"), world_size=4, num_nodes=2)
        >>> first_lines("ddp", context, over="gloo", layout="1 unit", batch=("global batch 32",))
        ['ddp: 4 ranks on 2 nodes, cpu over gloo; global batch 32', 'ddp: 1 unit']
    """
    ranks, nodes = _counted(context.world_size, "rank"), _counted(context.num_nodes, "node")
    where = f"{ranks} on {nodes}, {context.device.type}"
    where = where if context.world_size == 1 else f"{where} over {over}"
    facts = [f"{where}; {batch[0]}", *batch[1:]]
    if len(f"{name}: {facts[0]}") > _WIDTH:
        facts = [where, *batch]
    lines: list[str] = []
    for fact in [*facts, *_clauses(layout)]:
        lines += textwrap.wrap(
            f"{name}: {fact}",
            _WIDTH,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _clauses(summary: str) -> Iterator[str]:
    """Split a text at semicolons outside of brackets."""
    depth = start = 0
    for index, letter in enumerate(summary):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == ";" and depth == 0:
            yield summary[start:index].strip()
            start = index + 1
    if rest := summary[start:].strip():
        yield rest


def batch_facts(
    size: int | None, *, ranks: int, shares: int, accumulate: int = 1, own_batch: str = ""
) -> tuple[str, ...]:
    """Describe the global batch, the samples of an optimizer step, and its factors.

    Args:
        size: The samples of one rank's batch; None if unknown.
        ranks: The number of ranks.
        shares: The number of different batches that the ranks read at a time.
        accumulate: The batches of a step.
        own_batch: The option that gives every rank a batch of its own.

    Example:
        >>> batch_facts(8, ranks=2, shares=2, accumulate=3)
        ('global batch 48 (2 ranks x 8 x 3 accumulated)',)
        >>> batch_facts(8, ranks=2, shares=1, own_batch="plan_ngpus=1")
        ('global batch 8', '2 ranks share each batch of 8, ddp has 16; plan_ngpus=1 gives each rank its own')
    """
    of_one = "the size of a loader's batch" if size is None else str(size)
    factors = [f"{shares} {'ranks' if shares == ranks else 'plan units'}"] if shares > 1 else []
    factors += [of_one, *([f"{accumulate} accumulated"] if accumulate > 1 else [])]
    fact = f"global batch {of_one}"
    if len(factors) > 1:
        total = "" if size is None else f"{size * shares * accumulate} "
        fact = f"global batch {total}({' x '.join(factors)})"
    if shares == ranks:
        return (fact,)
    together = f"{ranks // shares} ranks share each batch" + ("" if size is None else f" of {size}")
    others = f"{ranks} x that" if size is None else str(size * ranks * accumulate)
    remedy = f"; {own_batch} gives each rank its own" if own_batch else ""
    return fact, f"{together}, ddp has {others}{remedy}"


def another_batch(before: int, size: int, *, ranks: int, shares: int, accumulate: int, own_batch: str) -> str:
    """Describe a changed global batch of a resumed run, and the options that keep the old one.

    Args:
        before: The global batch of the saved run, in samples.
        size: The samples of one rank's batch.
        ranks: The number of ranks.
        shares: The number of different batches that the ranks read at a time.
        accumulate: The batches of a step.
        own_batch: The option that gives every rank a batch of its own.

    Returns:
        A sentence; empty if the two are equal.

    Example:
        >>> another_batch(12, 8, ranks=2, shares=2, accumulate=2, own_batch="")
        'the checkpoint was trained with a global batch of 12, this run has 32; batch_size=3 keeps 12.'
    """
    now = size * shares * accumulate
    if now == before:
        return ""
    ways = []
    if own_batch and shares < ranks and size * ranks * accumulate == before:
        ways.append(own_batch)
    if before % (shares * accumulate) == 0:
        ways.append(f"batch_size={before // (shares * accumulate)}")
    if before % (size * shares) == 0:  # fewer than one batch cannot be accumulated
        ways.append(f"accumulate_grad_batches={before // (size * shares)}")
    keeps = f"; {' or '.join(ways[:2])} keeps {before}" if ways else ""
    return f"the checkpoint was trained with a global batch of {before}, this run has {now}{keeps}."


def size_of_loader(loader: Any, batch: Any) -> int | None:
    """Return the batch size of a loader, whose last batch may be smaller; else the size of the batch.

    The result is None for a batch sampler without a batch size, whose batches may have several sizes.
    """
    sampler = getattr(loader, "batch_sampler", None)
    for owner in (loader, sampler):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return size_of_batch(batch) if sampler is None else None


def size_of_batch(batch: Any) -> int | None:
    """Return the number of samples: the length of the first tensor with dims; None without one.

    Example:
        >>> import torch
        >>> size_of_batch({"ids": torch.zeros(8, 16), "weight": torch.tensor(1.0)})
        8
    """
    return next((len(tensor) for tensor in _tensors(batch) if tensor.dim()), None)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
