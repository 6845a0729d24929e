"""Compare the predicted memory of a run with the measured one, for the option `check_plan`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from nnx_base.ranks import control_group, together
from nnx_core.lightning.compat import make_callback
from nnx_core.lightning.processes import ParallelProcesses
from nnx_core.lightning.sample import TrainerSample
from nnx_core.options import values_of
from nnx_core.planning.estimate import Estimate, World
from nnx_core.planning.measured import Measured, Meter, meter_of
from nnx_core.planning.model import Model
from nnx_core.planning.table import size_text

__all__ = ["PlanCheck", "attach_check"]

log = logging.getLogger("nnx.plan")

_STEP = 2
"""The step that is measured: optimizers make their state in the first one."""


def attach_check(strategy: ParallelProcesses, trainer: Any, module: nn.Module, sample: TrainerSample) -> None:
    """Log the predicted memory of a fit, and let a callback measure it on rank zero. Collective.

    Args:
        strategy: The strategy.
        trainer: The Trainer.
        module: The module, which is not laid out yet.
        sample: The source of the first batch.

    Raises:
        IteratorAdvancedError: The first batch of the loader cannot be taken twice.
    """
    trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, PlanCheck)]
    with together(control_group(), doing="predicting the memory"):
        if not strategy.is_global_zero:
            return
        device = strategy.root_device
        world = World(size=strategy.world_size, nodes=trainer.num_nodes, accelerator=device.type)
        model = Model(
            module,
            sample.first_batch(),
            precision=str(trainer.precision_plugin.precision),
            accelerator=device.type,
            options=values_of(strategy.backend.options),
        )
        estimate = _predict(strategy.name, model, world)
    if estimate is not None:
        meter = meter_of(device, [*module.parameters(), *module.buffers()])
        report = partial(_log_truth, estimate)
        trainer.callbacks.append(make_callback(PlanCheck, strategy.root, meter, report))


def _predict(name: str, model: Model, world: World) -> Estimate | None:
    """Return and log the estimate of a strategy (log why there is none)."""
    try:
        found = model.estimate(name, world)
    except Exception as error:  # of the user's code, which has no Trainer here, or of a planner
        log.warning("plan: no prediction: %s: %s", type(error).__name__, error)
        return None
    if found is None:
        log.warning("plan: no prediction: the plugin of %s has no estimator", name)
        return None
    worst = found.worst
    log.info(
        "plan: predicted peak %s a rank, in the %s (%s)", size_text(found.peak), worst.name, worst.largest
    )
    for note in (*model.trace().notes, *found.notes):
        log.info("plan: %s", note)
    return found


class PlanCheck:
    """Mixin of a callback that measures the phases of the third step.

    Args:
        meter: The meter, which measures already.
        report: Function that gets the truth of each phase.
    """

    def __init__(self, meter: Meter, report: Callable[[Mapping[str, Measured]], object]) -> None:
        self._meter: Meter | None = meter
        self._report = report

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the backward of the strategy, as a hook after it makes engines publish gradients."""
        run = trainer.strategy.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            self._begin(trainer, "backward")
            result = run(*args, **kwargs)
            self._begin(trainer, "step")
            return result

        trainer.strategy.backward = backward

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Begin the forward."""
        self._begin(trainer, "forward")

    def _begin(self, trainer: Any, phase: str) -> None:
        if self._meter is not None and trainer.global_step == _STEP:
            self._meter.begin(phase)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Report the third step."""
        if self._meter is not None and trainer.global_step > _STEP:
            truth = self._meter.finish()
            self._close(trainer)
            self._report(truth)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop measuring (a run of fewer steps)."""
        if self._meter is not None:
            log.warning("plan: nothing measured, because training ended before its third step")
            self._close(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop measuring."""
        if self._meter is not None:
            self._close(trainer)

    def _close(self, trainer: Any) -> None:
        vars(trainer.strategy).pop("backward", None)
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()


def _log_truth(estimate: Estimate, truth: Mapping[str, Measured]) -> None:
    for phase in estimate.phases:
        if phase.name in truth:
            real = truth[phase.name]
            error = 100 * (phase.peak / real.tensors - 1)
            workspace = (
                f", {size_text(real.allocated)} with workspaces" if real.allocated > real.tensors else ""
            )
            log.info(
                "plan: %-8s predicted %10s, measured %10s (%+.1f %%)%s",
                *(phase.name, size_text(phase.peak), size_text(real.tensors), error, workspace),
            )
