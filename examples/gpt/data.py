"""Text that every Python has: the sources of its own standard library, byte by byte.

Owns which bytes make up each global batch. Global batch k depends on the seed and on k alone, never on
how many processes share it, so runs at different world sizes see the same data in the same order.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["GlobalBatches", "ResumableLoader", "StandardLibrary", "Windows", "read_standard_library"]


def read_standard_library(limit: int) -> Tensor:
    """The first `limit` bytes of the standard library's top-level modules, in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every stretch of `context` bytes, with the same stretch one byte later as its target.

    Example:
        >>> inputs, targets = Windows(torch.arange(10), context=3)[2]
        >>> inputs.tolist(), targets.tolist()
        ([2, 3, 4], [3, 4, 5])
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class GlobalBatches(Sampler[list[int]]):
    """Successive random global batches, of which this rank reads its share.

    Args:
        windows: The number of windows to draw from.
        batches: The number of global batches.
        global_batch: The number of windows in a global batch; divisible by `num_replicas`.
        seed: Global batch k depends on the seed and k only.
        num_replicas: The number of ranks that share each global batch.
        rank: The index of this rank's share.

    Example:
        >>> whole = GlobalBatches(100, batches=1, global_batch=4, seed=0)
        >>> left = GlobalBatches(100, batches=1, global_batch=4, seed=0, num_replicas=2, rank=0)
        >>> right = GlobalBatches(100, batches=1, global_batch=4, seed=0, num_replicas=2, rank=1)
        >>> next(iter(whole)) == next(iter(left)) + next(iter(right))
        True
    """

    def __init__(
        self,
        windows: int,
        *,
        batches: int,
        global_batch: int,
        seed: int,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if global_batch % num_replicas:
            raise ValueError(
                f"a global batch of {global_batch} windows cannot be shared equally by {num_replicas} "
                f"processes. Choose a multiple of {num_replicas}."
            )
        self.windows = windows
        self.batches = batches
        self.global_batch = global_batch
        self.seed = seed
        self.share = global_batch // num_replicas
        self.rank = rank
        self.served = 0
        self._resume_at = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        first, self._resume_at = self._resume_at, 0
        for index in range(first, self.batches):
            self.served = index + 1
            yield self._draw(index)[self.rank * self.share : (self.rank + 1) * self.share]

    def skip(self, served: int) -> None:
        """Start the next iteration, and only that one, after this number of global batches."""
        self.served = self._resume_at = served

    def _draw(self, index: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        drawn: list[int] = torch.randint(self.windows, (self.global_batch,), generator=generator).tolist()
        return drawn


class ResumableLoader(DataLoader[tuple[Tensor, Tensor]]):
    """A loader whose position Lightning saves and restores, so that a resumed run repeats no data.

    The position counts global batches, hence means the same at any world size.
    """

    def __init__(self, dataset: Windows, batches: GlobalBatches) -> None:
        super().__init__(dataset, batch_sampler=batches)
        self.batches = batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning puts into the checkpoint."""
        return {"served": self.batches.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of the saved run."""
        self.batches.skip(state["served"])


class StandardLibrary(LightningDataModule):
    """The training and the validation text, split into global batches.

    Args:
        steps: The number of global batches of the training run.
        global_batch: The number of windows in a global batch, for any number of processes.
        context: The number of bytes in a window.
        limit: The number of bytes of text to read in all.
        held_out: The fraction at the end of the text that is kept for validation.
        seed: The seed of the order of windows.
    """

    def __init__(
        self,
        *,
        steps: int,
        global_batch: int,
        context: int,
        limit: int = 1_000_000,
        held_out: float = 0.1,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.steps = steps
        self.global_batch = global_batch
        self.seed = seed
        text = read_standard_library(limit)
        cut = int(len(text) * (1 - held_out))
        self.training = Windows(text[:cut], context)
        self.validation = Windows(text[cut:], context)

    def train_dataloader(self) -> ResumableLoader:
        """Served in an order that is the same at any world size."""
        return self._loader(self.training, batches=self.steps, seed=self.seed)

    def val_dataloader(self) -> ResumableLoader:
        """The same few batches each time."""
        return self._loader(self.validation, batches=4, seed=self.seed + 1)

    def _loader(self, windows: Windows, *, batches: int, seed: int) -> ResumableLoader:
        if self.trainer is None:
            raise RuntimeError("the loaders need to know their rank. Pass this data module to Trainer.fit.")
        # None where a single process trains without a distributed strategy.
        replicas = self.trainer.distributed_sampler_kwargs or {}
        sampler = GlobalBatches(
            len(windows), batches=batches, global_batch=self.global_batch, seed=seed, **replicas
        )
        return ResumableLoader(windows, sampler)
