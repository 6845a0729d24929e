"""What nnx tells the user while training: shown like Lightning's own messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from nnx_core.backend import ParallelContext


def show_messages() -> None:
    """Print the ``nnx`` loggers' INFO messages to stderr, unless the application configured logging."""
    logger = logging.getLogger("nnx")
    if logger.handlers or logging.getLogger().handlers:
        return
    logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.propagate = False


# --- how a run begins -----------------------------------------------------------------------------


def first_line(name: str, context: ParallelContext, *, over: str, layout: str, batch: str) -> str:
    """The line that says who trains, on what, how the model is laid out, and how large a step's batch is.

    Args:
        name: The strategy's.
        context: This rank's place.
        over: The name of the process group's backend.
        layout: The engine's summary of the module.
        batch: See `global_batch`.

    Example:
        >>> import torch
        >>> context = ParallelContext(device=torch.device("cpu"), world_size=4, num_nodes=2)
        >>> first_line("ddp", context, over="gloo", layout="", batch="global batch 32")
        'ddp: 4 ranks on 2 nodes, cpu over gloo; global batch 32'
    """
    ranks, nodes = _counted(context.world_size, "rank"), _counted(context.num_nodes, "node")
    where = f"{name}: {ranks} on {nodes}, {context.device.type}"
    parts = (where if context.world_size == 1 else f"{where} over {over}", batch, layout)
    return "; ".join(filter(None, parts))


def global_batch(
    size: int | None, *, ranks: int, shares: int, accumulate: int = 1, own_batch: str = ""
) -> str:
    """How many samples a step of the optimizer takes, and how that comes about.

    Args:
        size: Samples of one rank's batch; None if that is not known.
        ranks: All ranks.
        shares: The number of different batches that the ranks read at a time.
        accumulate: Batches of a step.
        own_batch: The option that gives every rank a batch of its own.

    Example:
        >>> global_batch(8, ranks=2, shares=2, accumulate=3)
        'global batch 48 (2 ranks x 8 x 3 accumulated)'
        >>> global_batch(8, ranks=2, shares=1, own_batch="plan_ngpus=1")
        'global batch 8 (2 ranks share each batch of 8; ddp would have 16; plan_ngpus=1 gives each its own)'
    """
    of_one = "the size of a loader's batch" if size is None else str(size)
    factors = [f"{shares} {'ranks' if shares == ranks else 'plan units'}"] if shares > 1 else []
    factors += [of_one, *([f"{accumulate} accumulated"] if accumulate > 1 else [])]
    said = " x ".join(factors)
    if shares < ranks:
        together = f"{ranks // shares} ranks share each batch" + ("" if size is None else f" of {size}")
        others = f"{ranks} x that" if size is None else str(size * ranks * accumulate)
        remedy = f"; {own_batch} gives each its own" if own_batch else ""
        said = f"{f'{said}; ' if len(factors) > 1 else ''}{together}; ddp would have {others}{remedy}"
    elif len(factors) == 1:
        return f"global batch {of_one}"
    return f"global batch {f'{size * shares * accumulate} ' if size is not None else ''}({said})"


def size_of_batch(batch: Any) -> int | None:
    """The number of samples: the length of the first tensor in a batch that has any; None if none has.

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
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
