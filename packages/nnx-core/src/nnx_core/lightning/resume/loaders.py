"""Install and remove the tracked sampler of a loader."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from nnx_core.lightning.resume.positions import TrackedSampler


def tracked(loader: Any) -> TrackedSampler | None:
    """Return the tracked sampler of a loader; None without `track`."""
    for attribute in ("batch_sampler", "sampler"):
        found = getattr(loader, attribute, None)
        if isinstance(found, TrackedSampler):
            return found
    return None


def track(loader: DataLoader[Any]) -> TrackedSampler:
    """Wrap the sampler of a loader in a `TrackedSampler`, until `untrack`. Idempotent."""
    found = tracked(loader)
    if found is None:
        attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        found = TrackedSampler(getattr(loader, attribute), _generators(loader))
        # A loader forbids another sampler after construction, because most exchanges would be unsound. This
        # one yields the same indices.
        object.__setattr__(loader, attribute, found)
    return found


def untrack(loader: DataLoader[Any]) -> None:
    """Restore the loader's own sampler."""
    found = tracked(loader)
    if found is not None:
        attribute = "sampler" if loader.sampler is found else "batch_sampler"
        object.__setattr__(loader, attribute, found.inner)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, each once, in a fixed order."""
    found: dict[int, torch.Generator] = {}
    pending: list[Any] = [loader]
    while pending:
        holder = pending.pop()
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
        pending += [sampler for sampler in _samplers(holder) if sampler is not None]
    return list(found.values())


def _samplers(holder: Any) -> list[Any]:
    if isinstance(holder, DistributedSampler):  # Lightning wraps a custom sampler as the dataset of this one
        return [getattr(holder.dataset, "_sampler", None)]
    return [getattr(holder, name, None) for name in ("batch_sampler", "sampler")]
