"""Record loops without a Trainer: ``nnx.record`` in a plain loop, and Fabric's loops as they are."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_conformance.diff.job import Done, Job, Shares, active_job, load_state, without_dropout
from nnx_conformance.diff.layouts import Layout, PlainLayout
from nnx_conformance.diff.recorder import Recorder, rank_and_world


class LoopRecording:
    """Records a loop; every method does nothing outside of ``nnx diff``.

    Args:
        job: The job of this process; None outside of ``nnx diff``.
        share: The number of this rank's share of the data, and of all shares; by default its rank.
    """

    def __init__(self, job: Job | None, *, share: tuple[int, int] | None = None) -> None:
        self.job = job
        self.recorder: Recorder | None = None
        self._share = share
        self._optimizers: list[Optimizer] = []
        self._model: nn.Module | None = None
        self._losses: list[float] = []
        self._in_batch = self._was_clipped = False
        self._hooks: list[Any] = []

    def start(
        self, model: nn.Module, optimizers: Iterable[Optimizer], layout: Layout, *, precision: str = ""
    ) -> None:
        """Begin with the captured state, and record from now on."""
        self._model, self._optimizers = model, list(optimizers)
        if self.job is None:
            return
        self.recorder = Recorder(
            Path(self.job.directory),
            layout,
            rank=rank_and_world(),
            share=self.share,
            outputs=self.job.outputs,
            whole=self.job.wanted,
            facts={
                "strategy": self.job.strategy or "loop",
                "precision": precision or self.job.precision,
                "parameters": list(layout.weights()),
                "batch_norm": [],
            },
        )
        torch.manual_seed(self.job.seed + self.share[0])
        _OPEN.append(self)

    def watch_steps(self) -> None:
        """Record before and after each step of the optimizers."""
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.before_step()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.after_step()))

    @property
    def share(self) -> tuple[int, int]:
        """The number of this rank's share of the data, and of all shares."""
        return self._share or rank_and_world()

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return this rank's share of the captured batches, or the loader itself outside of ``nnx diff``.

        Args:
            loader: The loader of the global batches, as one process would read them.
        """
        if self.job is None:
            return loader
        self.job.capture_batches(lambda: loader, accumulate=self.job.batches)
        return _Recorded(self, Shares(self.job, lambda: self.share))

    def recorded(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and record each."""
        for batch in batches:
            self._end_batch()
            if self.recorder is not None:
                self.recorder.begin_batch(batch)
                self._in_batch = True
            yield batch

    def loss(self, loss: Tensor) -> Tensor:
        """Record the loss of this rank's share of a batch, and return it."""
        if self.recorder is not None:
            self._losses.append(float(loss.detach()))
        return loss

    def before_clipping(self) -> None:
        """Record the gradients before they are clipped."""
        if self.recorder is not None and not self._was_clipped:
            self.recorder.record_gradients("gradient")
            self._was_clipped = True

    def before_step(self) -> None:
        """Record the gradients."""
        if self.recorder is not None:
            self._end_batch()
            self.recorder.record_gradients("clipped" if self._was_clipped else "gradient")

    def after_step(self) -> None:
        """End the step; end the script after the last one."""
        if self.recorder is None or self.job is None:
            return
        self.recorder.end_step(self._optimizers)
        self._was_clipped = False
        if self.recorder.step >= self.job.steps:
            self.finish()
            raise Done

    def finish(self) -> None:
        """End the record after the last step."""
        if self.recorder is not None:
            self.recorder.close()
        self.recorder = None
        for hook in self._hooks:
            hook.remove()
        if self in _OPEN:
            _OPEN.remove(self)

    def _end_batch(self) -> None:
        if self._in_batch and self.recorder is not None:
            self.recorder.end_forward()
            losses: list[float | None] = [*self._losses] or [None]
            for loss in losses:
                self.recorder.end_batch(loss)
            self._losses, self._in_batch = [], False


_OPEN: list[LoopRecording] = []
"""The recordings of this process that have not ended."""


def finish_all(job: Job) -> bool:
    """End the records of a job's script that ended before all steps; return False if no step was recorded."""
    found = [each for each in _OPEN if each.job is not None and each.job.directory == job.directory]
    stepped = [each for each in found if each.recorder is not None and each.recorder.step]
    for recording in stepped:
        recording.finish()
    return bool(stepped)


class _Recorded:
    """Batches that are recorded, in each epoch again."""

    def __init__(self, recording: LoopRecording, batches: Shares) -> None:
        self._recording, self._batches = recording, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self._recording.recorded(self._batches)


def record(
    model: nn.Module, optimizer: Optimizer, *, share: tuple[int, int] | None = None, to: str = ""
) -> LoopRecording:
    """Record a plain PyTorch loop for ``nnx diff``; does nothing otherwise.

    Args:
        model: The model, wrapped by DDP or FSDP or not.
        optimizer: Its optimizer.
        share: The number of this rank's share of the data, and of all shares; by default its rank.
        to: A directory to write the record to without ``nnx diff``, which then compares two directories.

    Returns:
        The recording. Iterate over ``recording.batches(loader)``, and pass the loss to ``recording.loss``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> recording = record(model, optimizer)
        >>> for batch in recording.batches([torch.ones(4, 2)]):
        ...     recording.loss(model(batch).sum()).backward()
        ...     _ = optimizer.step()
    """
    job = active_job()
    if job is None and to:
        return _Directory(to, model, optimizer, share)
    recording = LoopRecording(job, share=share)
    layout = PlainLayout(model)
    if job is not None:
        with layout.unsharded():
            job.capture_state(layout.module)
            _load(job, layout.module)
        if job.no_dropout:
            without_dropout(model)
        if job.precision == "64-true":
            _compute_in_float64(model)
    recording.start(model, [optimizer], layout)
    recording.watch_steps()
    return recording


class _Directory(LoopRecording):
    """Records a loop to a directory, with its own data and without an end."""

    def __init__(
        self, to: str, model: nn.Module, optimizer: Optimizer, share: tuple[int, int] | None
    ) -> None:
        super().__init__(Job(directory=to, capture="", steps=1 << 60), share=share)
        self.start(model, [optimizer], PlainLayout(model))
        self.watch_steps()

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Yield the loader's batches, and end the record with the last one."""
        yield from self.recorded(loader)
        self.finish()


def _load(job: Job, module: nn.Module) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        load_state(job, module)
        return
    with torch.no_grad():
        for name, value in module.state_dict().items():
            given = job.state[name]
            if isinstance(value, DTensor):
                value.copy_(distribute_tensor(given, value.device_mesh, value.placements))
            else:
                value.copy_(given)


def _compute_in_float64(model: nn.Module) -> None:
    """Convert the model, and its inputs at each call."""

    def convert(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(convert, args)), {key: convert(value) for key, value in kwargs.items()}

    model.double()
    model.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def patched_fabric(job: Job) -> Iterator[None]:
    """Give every Fabric the strategy of a job, and record its loop."""
    original, setup, loaders = Fabric.__init__, Fabric.setup, Fabric.setup_dataloaders
    backward, clip = Fabric.backward, Fabric.clip_gradients
    recordings: dict[int, LoopRecording] = {}

    def init(self: Fabric, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        given.pop("self")
        original(self, **_fabric_settings(job, given))
        recordings[id(self)] = LoopRecording(job)

    def set_up(self: Fabric, module: nn.Module, *optimizers: Optimizer, **kwargs: Any) -> Any:
        recording = recordings[id(self)]
        if recording._model is not None:
            return setup(self, module, *optimizers, **kwargs)
        job.capture_state(module)
        load_state(job, module)
        if job.no_dropout:
            without_dropout(module)
        result = setup(self, module, *optimizers, **kwargs)
        _start(self, recording, module, optimizers)
        return result

    def set_up_loaders(self: Fabric, *given: Any, **kwargs: Any) -> Any:
        first, *others = given
        shared = _Moved(self, recordings[id(self)].batches(first))
        return [shared, *(loaders(self, other, **kwargs) for other in others)] if others else shared

    def compute(self: Fabric, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        recordings[id(self)].loss(tensor)
        backward(self, tensor, *args, **kwargs)

    def clip_gradients(self: Fabric, *args: Any, **kwargs: Any) -> Any:
        recordings[id(self)].before_clipping()
        return clip(self, *args, **kwargs)

    with ExitStack() as stack:
        for name, function in (
            ("__init__", init),
            ("setup", set_up),
            ("setup_dataloaders", set_up_loaders),
            ("backward", compute),
            ("clip_gradients", clip_gradients),
        ):
            stack.enter_context(mock.patch.object(Fabric, name, function))
        yield


class _Moved:
    """Batches on Fabric's device."""

    def __init__(self, fabric: Fabric, batches: Any) -> None:
        self._fabric, self._batches = fabric, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return map(self._fabric.to_device, self._batches)


def _start(
    fabric: Fabric, recording: LoopRecording, module: nn.Module, optimizers: Iterable[Optimizer]
) -> None:
    from nnx_conformance.diff.trainer import layout_of, share_of_strategy

    strategy = fabric.strategy
    recording._share = share_of_strategy(strategy)
    precision = str(strategy.precision.precision)
    recording.start(module, optimizers, layout_of(strategy, module), precision=precision)
    step = strategy.optimizer_step

    def optimizer_step(*args: Any, **kwargs: Any) -> Any:
        recording.before_step()
        result = step(*args, **kwargs)
        recording.after_step()
        return result

    vars(strategy)["optimizer_step"] = optimizer_step


def _fabric_settings(job: Job, given: dict[str, Any]) -> dict[str, Any]:
    from nnx_conformance.diff.trainer import strategy_of

    settings = {**given, "devices": job.devices, "num_nodes": 1, "loggers": None}
    if job.strategy:
        settings["strategy"] = strategy_of(job, "lightning.fabric")
    if job.accelerator:
        settings["accelerator"] = job.accelerator
    if job.precision:
        settings["precision"] = job.precision
    return settings
