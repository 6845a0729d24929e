"""Loaders that begin at a position."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from nnx_core.lightning.resume.positions import TrackedSampler


def tracked(loader: Any) -> TrackedSampler | None:
    """The tracked sampler in a loader, if `track` put one there."""
    for attribute in ("batch_sampler", "sampler"):
        found = getattr(loader, attribute, None)
        if isinstance(found, TrackedSampler):
            return found
    return None


def track(loader: DataLoader[Any]) -> TrackedSampler:
    """Make a loader take its indices through a `TrackedSampler`, until `untrack`. Idempotent."""
    found = tracked(loader)
    if found is None:
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        found = TrackedSampler(getattr(loader, attribute), _generators(loader))
        # A loader refuses another sampler once it exists, as most could not be exchanged soundly.
        object.__setattr__(loader, attribute, found)
    return found


def untrack(loader: DataLoader[Any]) -> None:
    """Give a loader its own sampler back."""
    found = tracked(loader)
    if found is not None:
        attribute = "sampler" if loader.sampler is found else "batch_sampler"
        object.__setattr__(loader, attribute, found.inner)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that a loader and its samplers hold, each once, in a fixed order."""
    found: dict[int, torch.Generator] = {}
    pending: list[Any] = [loader]
    while pending:
        holder = pending.pop()
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
        pending += [part for part in _parts(holder) if part is not None]
    return list(found.values())


def _parts(holder: Any) -> list[Any]:
    if isinstance(holder, DistributedSampler):  # Lightning shares another sampler out as its dataset
        return [getattr(holder.dataset, "_sampler", None)]
    return [getattr(holder, name, None) for name in ("batch_sampler", "sampler")]
