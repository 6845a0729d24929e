"""Record the run of a Trainer: a callback, and a script whose Trainer is given another strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ProgressBar,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from nnx_conformance.diff.explanations import Explainer
from nnx_conformance.diff.job import Done, Job, Shares, load_state, without_dropout
from nnx_conformance.diff.layouts import BackendLayout, Layout, PlainLayout
from nnx_conformance.diff.recorder import Recorder, rank_and_world
from nnx_core.errors import OptionError

_NOT_NEEDED = (Checkpoint, EarlyStopping, LearningRateMonitor, DeviceStatsMonitor, ProgressBar)


def share_of_strategy(strategy: Any) -> tuple[int, int]:
    """Return the number of this rank's share of the data, and of all shares."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
    return int(kwargs["rank"]), int(kwargs["num_replicas"])


def layout_of(strategy: Any, module: nn.Module) -> Layout:
    """Return where the tensors of a module are under a strategy."""
    backend = getattr(strategy, "backend", None)
    if backend is not None:
        return BackendLayout(backend, module)
    wrapped = strategy.model if isinstance(strategy, FSDPStrategy) and strategy.model is not None else module
    return PlainLayout(wrapped)


def sees_outputs(strategy: Any) -> bool:
    """Return True if hooks on modules change nothing under a strategy: not in a pipeline."""
    from nnx_core.names.registry import StrategyRegistry

    name = getattr(strategy, "name", "")
    if not hasattr(strategy, "backend") or name not in StrategyRegistry:
        return True
    return not StrategyRegistry.get(name).capabilities.pipeline


class Recording(Callback):
    """Records the steps of a fit.

    Args:
        job: The job of this run.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.recorder: Recorder | None = None
        self._explainer: Explainer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the record, from one random state for each share."""
        share = share_of_strategy(trainer.strategy)
        rank = rank_and_world()
        self.recorder = Recorder(
            Path(self.job.directory),
            layout_of(trainer.strategy, pl_module),
            rank=rank,
            share=share,
            outputs=self.job.outputs and sees_outputs(trainer.strategy),
            whole=self.job.wanted,
            facts={
                "strategy": self.job.strategy or type(trainer.strategy).__name__,
                "precision": str(trainer.precision),
                "parameters": [name for name, _ in pl_module.named_parameters()],
                "batch_norm": [n for n, m in pl_module.named_modules() if _normalizes_batches(m)],
            },
        )
        if self.job.explain is not None and rank[0] == 0:
            self._explainer = Explainer(self.job, trainer, pl_module)
        self._watch_clipping(trainer, pl_module)
        with _unseeded_environment():
            seed_everything(self.job.seed + share[0], verbose=False)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch."""
        assert self.recorder is not None
        if self._explainer is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._explainer.before_step(self.recorder)
        self.recorder.begin_batch(batch)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Record the gradients before clipping."""
        assert self.recorder is not None
        self.recorder.record_gradients("gradient", of=self._names(trainer, pl_module, optimizer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and end the step with its last batch."""
        assert self.recorder is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.recorder.end_forward()
        self.recorder.end_batch(None if loss is None else float(loss))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.recorder.end_step(trainer.optimizers)
            if self.recorder.step >= self.job.steps:
                trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the record."""
        assert self.recorder is not None
        self.recorder.close()
        vars(pl_module).pop("configure_gradient_clipping", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what was recorded of the step that failed."""
        if self.recorder is not None:
            self.recorder.abort()

    def _names(self, trainer: Trainer, module: nn.Module, optimizer: Any) -> list[str] | None:
        """Return the names of an optimizer's parameters; None for all, if there is one optimizer."""
        if len(trainer.optimizers) == 1:
            return None
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [name for name, parameter in module.named_parameters() if id(parameter) in own]

    def _watch_clipping(self, trainer: Trainer, module: LightningModule) -> None:
        """Record the gradients after clipping, if there is any."""
        own = type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
        if not module.automatic_optimization or (trainer.gradient_clip_val is None and not own):
            return
        clip = module.configure_gradient_clipping

        def configure_gradient_clipping(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            clip(optimizer, *args, **kwargs)
            assert self.recorder is not None
            self.recorder.record_gradients("clipped", of=self._names(trainer, module, optimizer))

        vars(module)["configure_gradient_clipping"] = configure_gradient_clipping


def _normalizes_batches(module: nn.Module) -> bool:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return isinstance(module, norms)


@contextmanager
def _unseeded_environment() -> Iterator[None]:
    """Keep the environment variables that ``seed_everything`` writes."""
    with mock.patch.dict("os.environ"):
        yield


@contextmanager
def patched_trainer(job: Job) -> Iterator[None]:
    """Give every Trainer the strategy of a job; ``fit`` then records, and ends the script."""
    original = Trainer.__init__

    def init(self: Trainer, **given: Any) -> None:
        original(self, **trainer_settings(job, given))

    def fit(self: Trainer, model: LightningModule, *args: Any, **kwargs: Any) -> None:
        fit_once(job, self, model, *args, **kwargs)
        raise Done

    with mock.patch.object(Trainer, "__init__", init), mock.patch.object(Trainer, "fit", fit):
        yield


_fit = Trainer.fit


def trainer_settings(job: Job, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a script's Trainer for a job."""
    callbacks = given.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    settings = {
        **given,
        "devices": job.devices,
        "num_nodes": 1,
        "max_epochs": -1,
        "max_steps": -1,
        "max_time": None,
        "min_epochs": None,
        "min_steps": None,
        "fast_dev_run": False,
        "overfit_batches": 0.0,
        "limit_train_batches": None,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "check_val_every_n_epoch": 1,
        "num_sanity_val_steps": 0,
        "reload_dataloaders_every_n_epochs": 0,
        "use_distributed_sampler": False,
        "logger": False,
        "profiler": None,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [callback for callback in callbacks if not isinstance(callback, _NOT_NEEDED)],
    }
    if job.strategy:
        settings["strategy"] = strategy_of(job, "lightning.pytorch")
    if job.accelerator:
        settings["accelerator"] = job.accelerator
    if job.precision:
        settings |= _with_precision(given, job.precision)
    return settings


def _with_precision(given: dict[str, Any], precision: str) -> dict[str, Any]:
    plugins = given.get("plugins") or []
    plugins = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    return {"precision": precision, "plugins": [p for p in plugins if not isinstance(p, Precision)] or None}


def strategy_of(job: Job, namespace: str) -> Any:
    """Return the value of ``strategy=`` for a job."""
    if not job.options:
        return job.strategy
    import nnx_core

    return nnx_core.strategy(job.strategy, namespace=namespace, **job.options)


def fit_once(
    job: Job,
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Any = None,
    **kwargs: Any,
) -> None:
    """Record one fit. The arguments after `trainer` are those of ``Trainer.fit``."""
    loaders = train_dataloaders
    if loaders is not None and hasattr(loaders, "train_dataloader"):
        loaders, datamodule = None, loaders
    job.capture_state(model)
    job.capture_batches(
        lambda: _loader(trainer, model, loaders, datamodule), accumulate=int(trainer.accumulate_grad_batches)
    )
    load_state(job, model)
    if job.no_dropout:
        without_dropout(model)
    shares = Shares(job, lambda: share_of_strategy(trainer.strategy))
    if loaders is not None:
        loaders = shares
    else:
        vars(model if datamodule is None else datamodule)["train_dataloader"] = _returning(shares)
    trainer.callbacks.append(Recording(job))  # type: ignore[attr-defined] # set by its constructor
    _fit(trainer, model, loaders, datamodule=datamodule, ckpt_path=ckpt_path, **kwargs)


def _returning(shares: Shares) -> Callable[[], Shares]:
    def train_dataloader() -> Shares:
        return shares

    return train_dataloader


def _loader(trainer: Trainer, model: LightningModule, loaders: Any, datamodule: Any) -> Any:
    """Return the loader of a script without starting its fit."""
    source: Any = model
    if loaders is None:
        model.trainer = trainer
        if datamodule is not None:
            source, datamodule.trainer = datamodule, trainer
            datamodule.prepare_data()
            datamodule.setup("fit")
        else:
            model.prepare_data()
            model.setup("fit")
        loaders = source.train_dataloader()
    if isinstance(loaders, (dict, list, tuple)):
        raise OptionError(
            "the script trains with several loaders at once.",
            remedy="Pass a CombinedLoader, which yields one batch for a step.",
        )
    return loaders
