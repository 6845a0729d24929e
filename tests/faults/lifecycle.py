"""Faults in launching, Fabric, error handling and cleanup.

Faults of whole plugins, which need a distribution, are in ``test_conformance_of_plugins.py``.
"""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from faults import DECLARED, EVERYTHING, Fault, fault
from nnx import Capabilities
from nnx_core.backend import ParallelContext
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.failed_backward import FailedBackward
from nnx_core.options import option
from nnx_tiny.backend import TinyBackend

Step = Callable[..., Any]


class StartsNoProcesses(DDPStrategy):
    """Trains alone if no launcher started the processes."""

    def _configure_launcher(self) -> None:
        pass

    @property
    def num_processes(self) -> int:
        return super().num_processes if "LOCAL_RANK" in os.environ else 1


def _complain() -> None:
    raise RuntimeError("too late")


class ComplainsAtExit(TinyBackend):
    """Cleans up when the interpreter ends, which is too late."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        atexit.register(_complain)


class RefusesOneRank(TinyBackend):
    """Does not start on one device."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        if context.world_size == 1:
            raise UnsupportedError("there is nobody to average with.")


class KnowsOnlyTrainer(TinyBackend):
    """Averages after ``training_step``, which Fabric does not call."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        self._averaging = getattr(step, "__name__", "") == "training_step"
        return super().run_step(module, step, *args, **kwargs)


class StaysSilent(TinyBackend):
    """Never synchronizes again after `no_sync`."""

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        self._averaging = False
        yield


class ReturnsTheNormAfterwards(TinyBackend):
    """Returns the norm from after clipping."""

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float, **kwargs: Any) -> Tensor:
        return super().clip_grad_norm(optimizer, max_norm, **kwargs).clamp(max=max_norm)


class ClipsNoValues(TinyBackend):
    """Clips by norm only."""

    def clip_grad_value(self, optimizer: Optimizer, clip_value: float) -> None:
        pass


class LosesOptimizerState(TinyBackend):
    """Restores weights only."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: Any) -> None:
        pass


class ComputesInHalf(TinyBackend):
    """Casts to another dtype than the precision's."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        is_mixed = self.context.precision == "bf16-mixed"
        with torch.autocast("cpu", dtype=torch.float16, enabled=is_mixed):
            return super().run_step(module, step, *args, **kwargs)


class KnowsOneCopy(TinyBackend):
    """Overlooks modules of the other Lightning package."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        import pytorch_lightning

        self._averaging = not isinstance(module, pytorch_lightning.LightningModule)
        super().backward(module, loss, *args, **kwargs)


class NeedsItsOwnGroup(DDPStrategy):
    """Assumes that it is alone if a process group exists already."""

    def setup_environment(self) -> None:
        self._is_alone = dist.is_initialized()
        super().setup_environment()

    def configure_ddp(self) -> None:
        if not self._is_alone:
            super().configure_ddp()


class HoldsALock(TinyBackend):
    """Has a member that cannot be pickled."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.options,), vars(self)


class AsksOneRank(DDPStrategy):
    """Follows rank 0's decision."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if all:
            return super().reduce_boolean_decision(decision, all=True)
        return self.broadcast(decision)


class _Swallows(TinyBackend):
    """Continues after an error in a step."""

    step = ""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_step(module, step, *args, **kwargs)
        except RuntimeError:
            if not step.__name__.startswith(self.step):  # the last batch's name says so
                raise
            return sum(parameter.sum() * 0.0 for parameter in module.parameters())


class SwallowsTrainingErrors(_Swallows):
    step = "training_step"


class SwallowsValidationErrors(_Swallows):
    step = "validation_step"


class _ForgetsFailures(FailedBackward):
    """Never remembers that a backward failed."""

    def refuse(self) -> None:
        pass


class StepsAfterAFailedBackward(TinyBackend):
    """Steps with leftover gradients of a failed backward."""

    failed_backward = _ForgetsFailures()


class EmptiesTheModule(DDPStrategy):
    """Drops the weights after an error."""

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        with torch.no_grad():
            for parameter in self.model.parameters() if self.model is not None else ():
                parameter.zero_()


class TellsRankZeroOnly(TinyBackend):
    """Hides errors of the other ranks."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_step(module, step, *args, **kwargs)
        except Exception:
            if self.context.rank == 0:
                raise
            raise RuntimeError("training failed, see rank 0") from None


class ResetsWhatIsNotThere(TinyBackend):
    """Resets, after an error, an attribute that only its first step creates."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().run_step(module, step, *args, **kwargs)
        except BaseException:
            self._order.clear()
            raise
        self._order: list[str] = []
        return result


class MeetsAfterErrors(TinyBackend):
    """Waits for the other ranks after an error."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_step(module, step, *args, **kwargs)
        except BaseException:
            if self.context.world_size > 1:
                dist.barrier()
            raise


class HidesInterrupts(TinyBackend):
    """Turns an interrupt into an ordinary error."""

    def run_step(self, module: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_step(module, step, *args, **kwargs)
        except KeyboardInterrupt:
            raise RuntimeError("the step did not succeed") from None


class BuildsHalfAModel(TinyBackend):
    """Continues with the incomplete model of a failed ``configure_model``."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return suppress(RuntimeError)


class TrainsWithoutOptimizer(DDPStrategy):
    """Continues without optimizers after an error in their creation."""

    def setup_optimizers(self, trainer: Any) -> None:
        with suppress(RuntimeError):
            super().setup_optimizers(trainer)


class UndoesWhatIsNotDone(DDPStrategy):
    """Expects at the end that training began."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.began = True

    def teardown(self) -> None:
        super().teardown()
        if self.lightning_module.trainer.state.fn == "fit":
            del self.began


class TearsDownWhatIsNot(DDPStrategy):
    """Expects `setup` before `teardown`."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.is_set_up = True

    def teardown(self) -> None:
        super().teardown()
        del self.is_set_up


class TakesAnyOption(DDPStrategy):
    """Ignores every option."""

    def __init__(self, **options: Any) -> None:
        passed = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io")
        super().__init__(**{name: options[name] for name in passed if name in options})


@dataclass(frozen=True, kw_only=True)
class LaxOptions:
    """Declares choices, and accepts everything."""

    bucket_megabytes: float = option(25.0, help="As in the original.")
    order: str = option("forward", help="Which gradients come first.", choices=("forward", "backward"))


class AllowsAnyValue(TinyBackend):
    """Has options without validation."""

    Options = LaxOptions  # type: ignore[assignment]


class RefusesOnRankZero(TinyBackend):
    """Rank 0 refuses a precision, and the others wait for it."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        if context.precision == "64-true" and context.rank == 0:
            raise UnsupportedError("this engine cannot compute in 64-true.")


class MakesAGroupEachTime(TinyBackend):
    """Leaves a process group with every run."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        dist.new_group()


class LeavesAThread(TinyBackend):
    """Leaves a thread with every run."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        threading.Thread(target=threading.Event().wait, name="prefetching", daemon=True).start()


class LeavesAFile(TinyBackend):
    """Leaves a temporary file with every run."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        os.close(tempfile.mkstemp(prefix="engine-")[0])


class SetsAVariable(TinyBackend):
    """Leaves an environment variable."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        os.environ["ENGINE_RANK"] = str(context.rank)


class ChangesTheDefaultDtype(TinyBackend):
    """Leaves another default dtype; later modules get other weights from their seed."""

    def teardown(self) -> None:
        super().teardown()
        torch.set_default_dtype(torch.float64)


class HandlesASignal(TinyBackend):
    """Leaves a signal handler."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        signal.signal(signal.SIGUSR2, lambda number, frame: None)


class LeavesADescriptor(TinyBackend):
    """Leaves an open file with every run."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        os.open(os.devnull, os.O_RDONLY)


class FormsCircles(TinyBackend):
    """Creates a reference cycle for each gradient."""

    def backward(self, module: nn.Module, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(module, loss, *args, **kwargs)
        for parameter in module.parameters():
            gradient: Any = parameter.grad
            if gradient is not None:
                gradient.seen = [gradient]


_modules: list[nn.Module] = []
_buckets: list[Tensor] = []


class KeepsModules(TinyBackend):
    """Never forgets a module."""

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        _modules.append(module)
        return super().parallelize(module, sample)


class KeepsBuckets(TinyBackend):
    """Allocates a buffer for every run, and frees none."""

    def setup(self, context: ParallelContext) -> None:
        super().setup(context)
        _buckets.append(torch.zeros(3, 5))


IN_FABRIC = (
    "fabric_accumulation",
    "fabric_clipping_by_norm",
    "fabric_clipping_by_value",
    "fabric_checkpoint",
    "fabric_precision",
    "lightning_fabric",
)


DECLARED[ComputesInHalf] = Capabilities(precisions=("32-true", "bf16-mixed"))

FAULTS = [
    fault("no launcher", StartsNoProcesses, "launched_by_lightning"),
    fault("error at exit", ComplainsAtExit, "script_ends_cleanly"),
    fault("one rank refused", RefusesOneRank, "one_device"),
    fault("averages after training_step only", KnowsOnlyTrainer, "fabric_loop", *IN_FABRIC),
    fault("silent after no_sync", StaysSilent, "fabric_accumulation"),
    fault("norm after clipping", ReturnsTheNormAfterwards, "fabric_clipping_by_norm"),
    fault("no clipping by value in Fabric", ClipsNoValues, "fabric_clipping_by_value"),
    fault("optimizer state not loaded in Fabric", LosesOptimizerState, "fabric_checkpoint"),
    fault("autocast to another dtype", ComputesInHalf, "fabric_precision"),
    fault("works with one copy of Lightning", KnowsOneCopy, "pytorch_lightning"),
    Fault(
        name="registered in one copy of Lightning",
        target="one_copy",
        caught_by="lightning_fabric",
        imports=("faults.lifecycle_one_copy",),
    ),
    fault("group of another Trainer", NeedsItsOwnGroup, "two_trainers", "two_strategies_in_one_process"),
    fault("group of another strategy", NeedsItsOwnGroup, "two_strategies_in_one_process", "two_trainers"),
    fault("cannot be pickled", HoldsALock, "strategy_can_be_pickled"),
    fault("rank 0 decides", AsksOneRank, "stop_by_boolean_decision"),
    fault("training errors swallowed", SwallowsTrainingErrors, "error_in_training_step", *EVERYTHING),
    fault(
        "module emptied after an error",
        EmptiesTheModule,
        "module_complete_after_error",
        "keyboard_interrupt",
    ),
    fault("errors of rank 0 only", TellsRankZeroOnly, "error_on_one_rank", "error_in_training_step"),
    fault(
        "reset of what is not there",
        ResetsWhatIsNotThere,
        "error_before_first_forward",
        "error_in_validation",
    ),
    fault("barrier after errors", MeetsAfterErrors, "error_after_lost_connection", "error_on_one_rank"),
    fault("step after a failed backward", StepsAfterAFailedBackward, "backward_error_without_zero_grad"),
    fault("interrupts hidden", HidesInterrupts, "keyboard_interrupt"),
    fault("half a model", BuildsHalfAModel, "error_in_configure_model"),
    fault("training without optimizer", TrainsWithoutOptimizer, "error_in_configure_optimizers"),
    fault("validation errors swallowed", SwallowsValidationErrors, "error_in_validation"),
    fault(
        "undone before it was done",
        UndoesWhatIsNotDone,
        "fit_without_loader",
        *("error_in_configure_model", "fit_without_training_step", "unknown_option"),
    ),
    fault("teardown needs setup", TearsDownWhatIsNot, "fit_without_training_step", "unknown_option"),
    fault("options ignored", TakesAnyOption, "unknown_option"),
    fault("option values not checked", AllowsAnyValue, "invalid_option_values"),
    fault("rank 0 refuses, the others wait", RefusesOnRankZero, "undeclared_precisions"),
    fault(
        "process groups leaked",
        MakesAGroupEachTime,
        "no_leftover_process_groups",
        "no_leftover_file_descriptors",
    ),
    fault("thread leaked", LeavesAThread, "no_leftover_threads"),
    fault("temporary file left", LeavesAFile, "no_leftover_files"),
    fault("environment variable left", SetsAVariable, "environment_variables_restored"),
    fault("default dtype changed", ChangesTheDefaultDtype, "torch_settings_restored"),
    fault("signal handler left", HandlesASignal, "signal_handlers_restored"),
    fault("descriptor leaked", LeavesADescriptor, "no_leftover_file_descriptors"),
    fault("module kept alive", KeepsModules, "module_freed", "no_leftover_tensors"),
    fault("buffers kept", KeepsBuckets, "no_leftover_tensors"),
    fault("gradients in circles", FormsCircles, "step_tensors_freed"),
]
