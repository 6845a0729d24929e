"""Write the record of a run: one line of statistics for each step and rank, and chosen tensors whole."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nnx_base.ranks import is_distributed
from nnx_base.shard import Shard
from nnx_conformance.diff.layouts import Layout, rows
from nnx_conformance.diff.statistics import measure
from nnx_core.errors import NnxError
from nnx_core.random_state import capture

Wanted = tuple[int, str, str]
"""A tensor to record whole: step, kind, name."""

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "nesterov", "alpha", "maximize")
"""The options of an optimizer's group that change its updates."""


class Recorder:
    """Records the steps of a run on this rank.

    Args:
        directory: The directory of the record; each rank writes a file of its own.
        layout: The placement of the model's tensors.
        rank: This rank, and the number of ranks.
        share: The number of this rank's share of the data, and of all shares.
        outputs: True to record the outputs of modules by hooks.
        whole: The tensors to record whole.
        facts: Further facts for the header.
    """

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        *,
        rank: tuple[int, int],
        share: tuple[int, int],
        outputs: bool = True,
        whole: Iterable[Wanted] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.layout, self.share, self.step = layout, share, 0
        self._rank, self._directory = rank[0], directory
        self._wanted, self._whole = set(whole), {}  # type: set[Wanted], dict[Wanted, Any]
        self._hooks: list[RemovableHandle] = []
        self._line: dict[str, Any] = {}
        self._batches, self._batch_size, self._in_batch = 0, 0, False
        self._has_ended = False
        self._calls: dict[str, int] = {}
        self._random: dict[str, Any] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rank{self._rank}.jsonl"
        self._write({"share": list(share), "size": rank[1], **(facts or {})}, mode="w")
        if outputs:
            self._hooks = [
                module.register_forward_hook(self._hook(name)) for name, module in layout.modules() if name
            ]

    def begin_batch(self, batch: Any) -> None:
        """Record a batch, and the weights if it begins a step. Collective for some layouts."""
        self._write_step()
        if not self._line:
            self._line = {"step": self.step, "rows": [], "types": "", "losses": [], "draws": False}
            self._line |= {"rates": [], "tensors": {}}
            with self.layout.unsharded():
                self._record("weight", self.layout.weights())
        self._line["types"], digests, self._batch_size = digest_rows(batch)
        self._line["rows"] += digests
        self._calls, self._in_batch = {}, True
        self._random = capture()

    def end_forward(self) -> None:
        """Record whether random numbers were drawn since the batch began."""
        if self._random and not self._line.get("draws"):
            self._line["draws"] = capture() != self._random

    def end_batch(self, loss: float | None) -> None:
        """Record the loss of a batch."""
        self._in_batch, self._batches = False, self._batches + 1
        if loss is not None:
            self._line["losses"].append(loss)

    def record_gradients(self, kind: str, *, of: Sequence[str] | None = None) -> None:
        """Record the gradients of all parameters, or of those with the given names. Collective."""
        self.end_forward()
        with self.layout.unsharded():
            found = self.layout.gradients()
            self._record(kind, found if of is None else {name: found[name] for name in of if name in found})

    def end_step(self, optimizers: Iterable[Optimizer]) -> None:
        """Record the options of the optimizers."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._line["rates"] = [{key: _plain(g[key]) for key in _OPTIONS if key in g} for g in groups]
        self._batches, self._has_ended, self.step = 0, True, self.step + 1

    def _write_step(self) -> None:
        """Write a step that has ended, with the buffers as the hooks after it left them. Collective."""
        if not self._has_ended:
            return
        with self.layout.unsharded():
            self._record("buffer", self.layout.buffers())
        self._write(self._line)
        self._line, self._has_ended = {}, False

    def close(self) -> None:
        """Record the weights after the last step, and write the whole tensors. Collective."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.begin_batch(None)
        self._write({**self._line, "final": True})
        self._in_batch = False
        if self._whole:
            torch.save(self._whole, self._directory / f"whole{self._rank}.pt")

    def abort(self) -> None:
        """Write as much of the step as there is, and the weights, after an error."""
        for hook in self._hooks:
            hook.remove()
        if not self._line:
            return
        self._in_batch = False
        if not self._has_ended:
            self._write({**self._line, "partial": True})
            self._line, self.step = {}, self.step + 1
        with suppress(Exception):  # the engine may have failed, too
            self.close()

    def add_whole(self, wanted: Wanted, tensor: Tensor) -> None:
        """Record a further tensor whole."""
        data = tensor.detach().cpu().clone()
        self._whole[wanted] = list(data.shape), [([0] * data.dim(), list(data.shape), data)]

    def _hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if not self._in_batch or self._batch_size == 0:
                return
            for place, tensor in tensors_in(output):
                key = name + place
                call = self._calls[key] = self._calls.get(key, -1) + 1
                if call or self._batches:
                    key = f"{key} (call {call + 1} of batch {self._batches + 1})"
                self._record("output", {key: rows(tensor, batch=self._batch_size, share=self.share)})

        return record

    def _record(self, kind: str, named: Mapping[str, Shard | None]) -> None:
        lines = self._line["tensors"].setdefault(kind, {})
        for name, shard in named.items():
            if shard is None:
                lines[name] = None
                continue
            pieces = list(zip(shard.boxes, shard.data, strict=True))
            lines[name] = (
                list(shard.shape),
                str(shard.dtype).removeprefix("torch."),
                [(b.offset, b.size, measure(view, b, shard.shape).as_list()) for b, view in pieces],
            )
            wanted = self._line["step"], kind, name
            if wanted in self._wanted:
                kept = [(list(b.offset), list(b.size), view.detach().cpu().clone()) for b, view in pieces]
                self._whole[wanted] = list(shard.shape), kept

    def _write(self, line: Mapping[str, Any], mode: str = "a") -> None:
        with self._path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def write_error(directory: Path, rank: int, error: BaseException) -> None:
    """Add the error that ended a run to a rank's record."""
    directory.mkdir(parents=True, exist_ok=True)
    message, remedy = (error.message, error.remedy) if isinstance(error, NnxError) else (str(error), "")
    text = shorten(f"{type(error).__name__}: {message}", 600, placeholder=" [...]")
    line = {"error": text, "remedy": remedy, "time": time.time()}
    with suppress(OSError), (directory / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def tensors_in(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors in a value with their places, such as ``[0]``."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{place}[{key}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{place}[{index}]")


def all_tensors(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors in a batch, also those that objects hold."""
    if depth == 0:  # an object may refer to itself
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from all_tensors(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from all_tensors(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from all_tensors(vars(value), depth - 1)


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the extent of its first tensor; 0 without one.

    Example:
        >>> size_of({"x": torch.zeros(4, 2), "y": torch.zeros(4)})
        4
    """
    return next((int(t.shape[0]) for t in all_tensors(batch) if t.dim()), 0)


def digest_rows(batch: Any) -> tuple[str, list[str], int]:
    """Return the element types of a batch, a digest of each sample, and the number of samples."""
    size = size_of(batch)
    tensors = [t.detach() for t in all_tensors(batch) if t.dim() and t.shape[0] == size]
    # A precision plugin may cast the batch: to float64 without loss, to 16 bits with some.
    tensors = [t.float() if t.dtype == torch.float64 else t for t in tensors]
    digests = []
    columns = [t.cpu().contiguous().view(size, -1).view(torch.uint8).numpy() for t in tensors if t.numel()]
    for index in range(size):
        digest = hashlib.blake2b(digest_size=8)
        for column in columns:
            digest.update(column[index].tobytes())
        digests.append(digest.hexdigest())
    return ",".join(str(t.dtype).removeprefix("torch.") for t in tensors), digests, size


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
