"""Collecting all ranks' descriptions on the coordinator without sending the same thing twice.

Every rank sends digests of the parts of its description; the coordinator asks one rank for each part that
it has not seen. So what arrives grows with the number of distinct parts, and a message from every rank is a
few dozen bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from nnx.checkpoint.describing import Description, Head, pack, unpack
from nnx.checkpoint.rounds import deliver, exchange

__all__ = ["gather_descriptions", "requests"]


def gather_descriptions(
    group: dist.ProcessGroup | None, describe: Callable[[], Description], *, doing: str
) -> Callable[[], list[Description]]:
    """Describe on every rank, and collect the descriptions.

    Args:
        group: The ranks that take part; None for this process alone.
        describe: Describes what this rank holds. It must not communicate.
        doing: What this is for, for messages.

    Returns:
        What gives all descriptions, in rank order, to the coordinator; others must not call it.

    Raises:
        CheckpointError: Some rank could not describe what it holds; on every rank alike.
    """
    if group is None:
        alone = exchange(None, describe, lambda found: found, doing=doing)
        return lambda: [alone]
    parts: dict[bytes, bytes] = {}
    heads: list[Head] = []
    asked: list[list[bytes]] = []

    def say() -> Head:
        head, raws = pack(describe())
        parts.update(raws)
        return head

    def ask(found: list[Head]) -> list[list[bytes]]:
        heads.extend(found)
        asked.extend(requests(found))
        return asked

    wanted = exchange(group, say, ask, doing=doing)
    here = dist.get_rank(group) == 0
    senders = [rank for rank, digests in enumerate(asked) if rank for _ in digests]
    received = deliver(group, [] if here else [parts[key] for key in wanted], senders, doing=doing)
    keys = [key for rank, digests in enumerate(asked) if rank for key in digests]
    return lambda: unpack(heads, parts | dict(zip(keys, received, strict=True)))


def requests(heads: Sequence[Head]) -> list[list[bytes]]:
    """Which parts each rank must send: one that came with a head, or that a lower rank has, nobody."""
    known = {key for head in heads for key in head.inline}
    wanted = []
    for head in heads:
        wanted.append([key for key in dict.fromkeys(head.parts) if key not in known])
        known.update(wanted[-1])
    return wanted
