"""Run a Trainer or Fabric in the processes of a launcher: the pickled work, and its results.

Trainer, strategy, module and loaders are pickled as one object, because they refer to one another, so each
process has one copy of each. The process that called `fit` does not train.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from nnx_core.errors import LaunchError, OptionError, UnsupportedError
from nnx_core.launch.launcher import Job, Launcher, Work
from nnx_core.lightning.compat import (
    capture_global_state,
    handle_interrupt,
    has_no_code,
    set_cluster_environment,
    set_world_ranks,
)
from nnx_core.lightning.memory import close_finished
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.view.modules import allocate_again, leave_on_meta

__all__ = ["use_launcher"]

log = logging.getLogger("nnx.lightning")
_OF_CHECKPOINTS = (
    *("best_model_path", "best_model_score", "last_model_path", "dirpath"),
    *("best_k_models", "kth_best_model_path", "kth_value", "current_score"),
)
"""Attributes of checkpoint callbacks that are set in the processes, and read where `fit` was called."""


def use_launcher(
    strategy: Any,
    launcher: Launcher,
    *,
    root: str,
    shards: bool,
    gathers: bool | None,
    packages: tuple[str, ...],
) -> Any:
    """Start a strategy's processes by a launcher (unless this process was started by one).

    Args:
        strategy: A strategy for Trainer or Fabric.
        launcher: The launcher.
        root: The root of Lightning's tree, such as ``"lightning.pytorch"``.
        shards: True if the strategy shards parameters.
        gathers: True if the user wants the weights gathered at the end; None without a choice.
        packages: The distributions that must have the same version everywhere.

    Returns:
        The strategy.

    Raises:
        OptionError: The strategy has one process, or its weights cannot be returned.
    """
    # Torchrun, `nnx run` and Ray Train set RANK, and take precedence; Lightning's own launcher sets none.
    if {"RANK", "LOCAL_RANK"} <= os.environ.keys():
        return strategy
    if not hasattr(strategy, "num_processes"):
        raise OptionError(
            f"{type(strategy).__name__} is a strategy of one process, which needs no launcher.",
            remedy="Leave `launcher` out, or choose a strategy for several processes, such as 'ddp'.",
        )
    ours = isinstance(strategy, ParallelProcesses)
    wanted = launcher.options.weights
    if wanted == "rank0" and shards and not ours:
        raise OptionError(
            f"weights='rank0' is not possible with {type(strategy).__name__}, which does not gather them.",
            remedy="Save a checkpoint, which has them, or use 'fsdp_auto'.",
        )
    brings = wanted == "rank0" or (wanted == "auto" and (gathers if gathers is not None else not shards))
    if isinstance(strategy, ParallelProcesses) and (gathers is None or wanted != "auto"):
        strategy.common = replace(strategy.common, gather_at_end="rank0" if brings else "none")
        strategy.backend.gather_at_end = strategy.common.gather_at_end
    set_cluster_environment(root, strategy, "LightningEnvironment")
    made = LightningLauncher(strategy, launcher, root=root, brings_weights=brings, packages=packages)
    strategy._configure_launcher = partial(setattr, strategy, "_launcher", made)
    return strategy


class LightningLauncher:
    """Starts processes for Lightning; in the processes themselves the strategy has no launcher.

    Args:
        strategy: The strategy.
        launcher: The launcher that starts the processes.
        root: The root of Lightning's tree.
        brings_weights: True if rank zero's weights are returned.
        packages: The distributions that must have the same version everywhere.
    """

    is_interactive_compatible = True

    def __init__(
        self, strategy: Any, launcher: Launcher, *, root: str, brings_weights: bool, packages: tuple[str, ...]
    ) -> None:
        self.strategy, self.launcher, self.root = strategy, launcher, root
        self.brings_weights, self.packages = brings_weights, packages

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call a function in every process.

        Args:
            function: Trainer's implementation of `fit` and the like, or the function that Fabric launches.
            *args: Its arguments.
            trainer: The Trainer that takes over rank zero's results.
            **kwargs: Further arguments of the function.
        """
        strategy = self.strategy
        if trainer is None and has_no_code(function):
            raise LaunchError(
                "`fabric.launch()` has no function to run in the processes of the launcher.",
                remedy="Pass the code as a function, `fabric.launch(train)`, or start the script with "
                "`nnx run --on ray -- train.py`.",
            )
        bound = signature(function).bind(*args, **kwargs)
        if (
            trainer is not None
            and _is_left(trainer.lightning_module)
            and not bound.arguments.get("ckpt_path")
        ):
            raise UnsupportedError(
                "a run begins with the weights of the module, and those of its last run stayed in the "
                "processes of the launcher.",
                remedy="Pass `ckpt_path`, or return the weights of each run: weights='rank0'.",
            )
        run = LightningRun(self.root, strategy, function, dict(bound.arguments), trainer, self.brings_weights)
        job = Job(
            work=run,
            nodes=strategy.num_nodes,
            devices=strategy.num_processes,
            device_type=strategy.root_device.type,
            packages=self.packages,
        )
        outcome: Outcome = self.launcher.run(job)
        if trainer is not None:
            _take_over(outcome, trainer)
        return outcome.result

    def kill(self, signum: int) -> None:
        """Do nothing: `Launcher.run` always ends its processes."""


@dataclass
class Outcome:
    """The results of rank zero.

    Attributes:
        result: The return value of the function.
        state: The Trainer's state.
        metrics: The metrics of callbacks.
        progress: The counters of the fit loop.
        checkpoints: The attributes of checkpoint callbacks, in the order of the callbacks.
        weights: The unsharded weights; None if they are not returned.
    """

    result: Any
    state: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Any] | None = None


class LightningRun(Work):
    """Calls one of Lightning's functions in a process, with the rank from environment variables.

    Args:
        root: The root of Lightning's tree.
        strategy: The strategy.
        function: The function.
        arguments: Its arguments by name.
        trainer: The Trainer of the function; None for Fabric.
        brings_weights: True if rank zero's weights are returned.
    """

    def __init__(
        self,
        root: str,
        strategy: Any,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        trainer: Any,
        brings_weights: bool,
    ) -> None:
        self.root, self.strategy, self.function, self.arguments = root, strategy, function, arguments
        self.trainer, self.brings_weights = trainer, brings_weights
        self.global_state = capture_global_state()
        self.left = trainer is not None and _is_left(trainer.lightning_module)

    def __call__(self, report: Callable[[str, str], None], resume_from: str | None = None) -> Outcome | None:
        """Call the function."""
        strategy, trainer = self.strategy, self.trainer
        self.global_state.restore()
        set_cluster_environment(self.root, strategy, "TorchElasticEnvironment", trainer)
        strategy._launcher = None
        set_world_ranks(strategy)
        rank = int(os.environ["RANK"])
        if self.left:  # pickling drops the mark; the checkpoint has the values
            leave_on_meta(trainer.lightning_module)
            if not isinstance(strategy, ParallelProcesses):
                allocate_again(trainer.lightning_module)
        if resume_from is not None and self._fits:
            self.arguments["ckpt_path"] = resume_from
        if rank == 0 and self._fits:
            strategy.save_checkpoint = _reporting_saves(strategy.save_checkpoint, report)
        function = _reporting_errors(self.function, report)
        bound = signature(self.function).bind_partial()
        bound.arguments.update(self.arguments)
        result = handle_interrupt(self.root, trainer, function, *bound.args, **bound.kwargs)
        close_finished()  # a launcher may kill this process next
        return self._outcome(result) if rank == 0 else None

    def parts(self) -> Iterable[tuple[str, Any]]:
        """Yield names and values that may fail to pickle: arguments, callbacks, loggers, and the run."""
        for name, value in self.arguments.items():
            if isinstance(value, nn.Module):
                yield from _attributes(value)
            yield f"the argument {name!r}", value
        if self.trainer is not None:
            yield from ((f"the callback {type(each).__name__}", each) for each in self.trainer.callbacks)
            yield from ((f"the logger {type(each).__name__}", each) for each in self.trainer.loggers)
        yield "the run", self

    @property
    def _fits(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == "fit"

    def _outcome(self, result: Any) -> Outcome:
        trainer = self.trainer
        if trainer is None:
            return Outcome(result)
        weights = None
        if self._fits and self.brings_weights:
            weights = {name: _on_host(value) for name, value in trainer.lightning_module.state_dict().items()}
        return Outcome(
            result,
            state=trainer.state,
            metrics={name: _on_host(value) for name, value in trainer.callback_metrics.items()},
            progress=_progress(trainer),
            checkpoints=[_of_callback(callback) for callback in trainer.checkpoint_callbacks],
            weights=weights,
        )


def _take_over(outcome: Outcome, trainer: Any) -> None:
    """Copy the results into the Trainer of the calling process, as if it had trained."""
    fitted = trainer.state.fn == "fit"
    trainer.state = outcome.state
    trainer.callback_metrics.update(outcome.metrics)
    for callback, known in zip(trainer.checkpoint_callbacks, outcome.checkpoints, strict=True):
        vars(callback).update(known)
    if not fitted:
        return
    trainer.fit_loop.load_state_dict(outcome.progress)
    module = trainer.lightning_module
    if outcome.weights is None:
        _leave(module)
        return
    vars(module).pop("_nnx_left", None)
    allocate_again(module)
    if set(outcome.weights) != set(module.state_dict()):
        module.configure_model()
    try:
        module.load_state_dict(outcome.weights)
    except RuntimeError as error:
        _leave(module)
        raise LaunchError(
            f"the run has succeeded, but its weights do not fit the module here: {error}.",
            remedy="Read them from a checkpoint, and pass weights='none'.",
        ) from error


def _leave(module: nn.Module) -> None:
    """Mark the module's weights as untrained, because the trained ones are in other processes."""
    leave_on_meta(module)
    vars(module)["_nnx_left"] = True  # `configure_model` may have built no parameters here


def _is_left(module: nn.Module) -> bool:
    return "_nnx_left" in vars(module)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, submodule in module.named_modules():
        owner = f"the module's {name!r}, its" if name else "the module's"
        for key, value in vars(submodule).items():
            if key not in ("_modules", "_trainer"):
                yield f"{owner} attribute {key!r}", value


def _reporting_saves(save: Callable[..., Any], report: Callable[[str, str], None]) -> Callable[..., Any]:
    """Wrap a save so that it reports each resumable checkpoint to the launcher."""

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if "optimizer_states" in checkpoint:  # a weights-only checkpoint cannot be resumed
            path = os.fspath(filepath)
            report("save", path if "://" in path else os.path.abspath(path))  # noqa: PTH100 - may be no path
        return save(checkpoint, filepath, *args, **kwargs)

    return save_checkpoint


def _reporting_errors(function: Callable[..., Any], report: Callable[[str, str], None]) -> Callable[..., Any]:
    """Wrap a function so that it reports an error before the teardown, which may wait for other ranks."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException:
            report("failed", traceback.format_exc())
            raise

    return call


def _progress(trainer: Any) -> dict[str, Any]:
    """Return the counters of the fit loop, without the states of loaders and users."""
    state = trainer.fit_loop.state_dict()
    return {
        name: value for name, value in state.items() if not name.endswith(("state_dict", "combined_loader"))
    }


def _of_callback(callback: Any) -> dict[str, Any]:
    return {name: _on_host(getattr(callback, name)) for name in _OF_CHECKPOINTS if hasattr(callback, name)}


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
