"""`TorchftStrategy`: Trainer in each group of an elastic run.

Lightning trains as in one group alone. This module chooses the batch of each step, weights its loss, sums the
gradients over the groups before the optimizer steps, and computes a step again if a group was lost in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from nnx_base.ranks import all_gather_object, control_group
from nnx_checkpoint.reading.naming import RANKS
from nnx_checkpoint.reading.state import as_state_dict
from nnx_core import random_state
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.beginning import batch_facts, first_lines
from nnx_core.lightning.compat import attached_trainer, averaging_callbacks, training_loaders
from nnx_core.lightning.namespaces import StrategyOfTrainer
from nnx_core.lightning.resume.transfer import give_state, prepare_batch, progress_of, take_state
from nnx_core.lightning.routing import unwrap_optimizer
from nnx_core.lightning.trainer import TrainerAdapter
from nnx_core.optimizers.gradients import refuse_sparse_gradient
from nnx_torchft.backends import ElasticBackend, ShardedBackend, WholeBackend
from nnx_torchft.data import ElasticLoader, Share, refuse_loader
from nnx_torchft.finished import Mark
from nnx_torchft.members import Identity, model_digest, weights_digest
from nnx_torchft.options import ElasticOptions
from nnx_torchft.quorum import Counts, LeftBehindError, Quorum

__all__ = ["ShardedTorchftStrategy", "TorchftStrategy"]

log = logging.getLogger("nnx.torchft")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class TorchftStrategy(StrategyOfTrainer, TrainerAdapter):
    """Trains one group of an elastic run; the arguments are those of `ElasticOptions` and common ones.

    Attributes:
        quorum: The quorum that the group trains in; None outside of training.
    """

    engine: ClassVar[type[ElasticBackend[Any]]] = WholeBackend
    registered: ClassVar[str] = "torchft_ddp"
    backend: ElasticBackend[Any]

    def __init__(
        self,
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        precision_plugin: Any = None,
        checkpoint_io: Any = None,
        **options: Any,
    ) -> None:
        self.quorum: Quorum | None = None
        self._loader: ElasticLoader | None = None
        self._open_step = _Step()
        self._holds_quorum = self._hands_over = False
        self._again: tuple[Any, int] | None = None
        self._logged: Counts | None = None
        self._build(
            self.engine,
            self.registered,
            options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            checkpoint_io=checkpoint_io,
        )

    @property
    def _options(self) -> ElasticOptions:
        options: ElasticOptions = self.backend.options
        return options

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def _mark(self) -> Mark:
        return Mark(self._trainer.default_root_dir, self._options.run_name)

    @property
    def is_global_zero(self) -> bool:
        """True in the first group of the quorum, which writes checkpoints and logs."""
        return self._rank == 0 if self.quorum is None else self.quorum.share.index == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of the data that a sampler yields: all of it where `ElasticLoader` divides batches."""
        trainer = attached_trainer(self.lightning_module)
        if trainer is not None and trainer.training and self._options.data == "exact":
            return {"num_replicas": 1, "rank": 0}
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs
        return kwargs

    # Before the first batch

    def setup(self, trainer: Any) -> None:
        """Set the module up as in one process.

        Raises:
            UnsupportedError: Optimization is manual.
            OptionError: There is no lighthouse.
            SystemExit: The run has ended.
        """
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._options.address  # noqa: B018 # raises
            self._end_if_finished()
            if not self.lightning_module.automatic_optimization:
                raise UnsupportedError(
                    "elastic training may compute a step again, and steps inside a training_step with manual "
                    "optimization could not be undone.",
                    remedy="Use automatic optimization, or another strategy.",
                )
            averaging = averaging_callbacks(trainer)
            if averaging and self.world_size > 1:
                raise UnsupportedError(
                    f"{type(averaging[0]).__name__} averages weights, and groups of several processes do not "
                    "hand averages over.",
                    remedy="Use groups of one process, or leave the callback out.",
                )
        super().setup(trainer)
        if fitting:
            _warn_of_batch_norm(self.lightning_module)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide the batches of a training loader between the groups."""
        trainer = self._trainer
        if not trainer.training or self._options.data == "drop":
            return super().process_dataloader(dataloader)
        refuse_loader(dataloader)
        if self._loader is not None:
            self._loader.close()
        self._loader = ElasticLoader(
            super().process_dataloader(dataloader),
            seed=_seed(),
            epoch=lambda: int(trainer.fit_loop.epoch_progress.current.processed),
            before=self._before_batch,
        )
        return self._loader

    def on_train_start(self) -> None:
        """Join the quorum, and take over the state of the other groups."""
        super().on_train_start()
        trainer, loader = self._trainer, self._loader
        if len(training_loaders(trainer)) > 1:
            raise UnsupportedError(
                "elastic training divides the batches of one training loader, and there are several.",
                remedy="Join their datasets in one loader.",
            )
        if trainer.global_step:
            log.info("elastic: resuming from disk at step %d", trainer.global_step)
        with self.backend.local():
            weights = weights_digest(self.lightning_module)
        self.quorum = Quorum(
            self._options,
            self._identity(),
            self._hand_over,
            context=self.backend.context,
            step=trainer.global_step,
            weights=weights,
        )
        self.quorum.begin()
        self._end_if_finished()  # the others may have ended it since
        healed, self.quorum.healed = self.quorum.healed, None
        if healed is not None:
            take_state(self, trainer, healed, loaders=[] if loader is None else [loader.loader])
            log.info("elastic: healed at step %d", trainer.global_step)
        self._holds_quorum = True
        rank_zero_only.rank = self.quorum.share.index  # type: ignore[attr-defined]

    def _end_if_finished(self) -> None:
        """End the process, without an error, if the run has ended: nothing is left to train. Collective."""
        mark = self._mark
        step = all_gather_object(mark.read(), control_group())[0]  # all ranks of a group decide alike
        if step is not None:
            if self._rank == 0:
                log.warning("elastic: this run is finished at step %d (%s)", step, mark.path)
            raise SystemExit(0)

    def _hand_over(self) -> dict[str, Any]:
        """Return the state of this rank, for the rank of the same place in a group that joins."""
        trainer = self._trainer
        self._hands_over = True
        try:
            return give_state(self, trainer, self._open_step.progress or progress_of(self, trainer))
        finally:
            self._hands_over = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return handles on this rank's shards; without communication for a group that joins."""
        if not self._hands_over:
            return super().lightning_module_state_dict()
        return as_state_dict(self.backend.model_state(self.lightning_module))

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """Return handles on this rank's state of an optimizer; without communication as above."""
        if not self._hands_over:
            return super().optimizer_state(optimizer)
        return self.backend.own_optimizer_state(self.lightning_module, unwrap_optimizer(optimizer))

    def _identity(self) -> Identity:
        trainer, loader = self._trainer, self._loader
        return Identity(
            run=self._options.run_name,
            ranks=self.world_size,
            model=model_digest(self.lightning_module),
            dataset=0 if loader is None else len(loader.dataset),
            batch=0 if loader is None else loader.batch_size_of_epoch,
            accumulate=int(trainer.accumulate_grad_batches),
            order="" if loader is None else type(loader.sampler).__name__,
            seed=_seed(),
            precision=self._precision_name(),
        )

    def _log_beginning(self, module: nn.Module, batch: int | None = None, *, accumulate: int = 1) -> None:
        """Log the first lines of the run, with the size of the global batch."""
        if self._loader is None:
            super()._log_beginning(module, batch, accumulate=accumulate)
        elif self._rank == 0:
            facts = batch_facts(self._loader.batch_size_of_epoch, ranks=1, shares=1, accumulate=accumulate)
            over, layout = self.process_group_backend, self.backend.summary(module)
            for line in first_lines(self.name, self.backend.context, over=over, layout=layout, batch=facts):
                log.info(line)

    # A step

    def _in_quorum(self) -> Quorum:
        """Return the quorum; only training calls this."""
        assert self.quorum is not None
        return self.quorum

    def _before_batch(self, position: int) -> Share:
        """Join the quorum of a step before its first batch; return the share of this group."""
        if not self._open_step.batches:
            self._begin_step()
        self._open_step.batches.append(position)
        return self._in_quorum().share

    def _begin_step(self) -> None:
        quorum = self._in_quorum()
        if not self._open_step.progress:
            self._open_step.progress = progress_of(self, self._trainer)
        if not self._holds_quorum:
            quorum.begin()
        self._holds_quorum = False
        if quorum.healed is not None:
            raise LeftBehindError(
                f"the other groups are at step {quorum.step}, and group {self._options.group_name!r} is at "
                f"step {self._trainer.global_step}.",
                remedy="Start it again: it heals from them. `nnx run --elastic` does so.",
            )
        rank_zero_only.rank = quorum.share.index  # type: ignore[attr-defined]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` on this group's share, and log the state of the groups."""
        quorum = self._in_quorum()
        if self._again is not None:
            batch, number = self._again
            args = (batch, *(number if isinstance(each, int) else each for each in args[1:]))
        elif self._loader is None:
            self._before_batch(args[1] if len(args) > 1 else 0)
            self._open_step.loaded.append(args[0])
        position = self._open_step.batches[-1] if self._again is None else self._again[1]
        share, loader = quorum.share, self._loader
        part = 1 / share.of if loader is None else share.weight(loader.size(position))
        self.backend.weight = part * self.backend.context.world_size  # the engine averages over the ranks
        result = super().training_step(*args, **kwargs)
        if result is None:
            raise UnsupportedError(
                "training_step returned None, and the other groups wait for the gradients of its samples.",
                remedy="Return a loss of zero that depends on the model, such as `0 * self(x).sum()`.",
            )
        self._log_counts(quorum.counts)
        return result

    def _log_counts(self, counts: Counts) -> None:
        """Log the events of the groups after a change, and as often as the Trainer logs."""
        trainer, events = self._trainer, replace(counts, quorum_ms=0.0)
        every = trainer.log_every_n_steps
        if events != self._logged or (every and trainer.global_step % every == 0):
            self._logged = events
            metrics = {f"elastic/{name}": float(value) for name, value in asdict(counts).items()}
            self.lightning_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step on gradients of the global batch; compute the step again while groups are lost in it."""
        evaluated = False

        def of_all_groups() -> Any:
            nonlocal evaluated
            if evaluated:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} evaluates its closure more than once in a step.",
                    remedy="Use another optimizer, or another strategy.",
                )
            evaluated = True
            return self._reduced(closure)

        return super().optimizer_step(optimizer, of_all_groups, model, **kwargs)

    def _reduced(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step until the groups have summed its gradients."""
        quorum, module = self._in_quorum(), self.lightning_module
        result = closure()
        while not self._commit():
            result = self._compute_again(closure)
        self._open_step = _Step()
        if not quorum.is_finite and getattr(self.precision_plugin, "scaler", None) is None:
            log.warning("elastic: step %d: gradients are not finite; no group steps", quorum.step - 1)
            module.zero_grad(set_to_none=True)
        return result

    def _commit(self) -> bool:
        with self.backend.local():
            parameters = dict(self.lightning_module.named_parameters())
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    refuse_sparse_gradient(parameter.grad, name)
            return self._in_quorum().commit(parameters.values(), self._facts())

    def _compute_again(self, closure: Callable[[], Any]) -> Any:
        """Compute the gradients of a step again, with the share of a new quorum."""
        module, result = self.lightning_module, None
        began = self._open_step.progress[RANKS][0]["rng"]
        module.zero_grad()
        self._begin_step()
        random_state.restore(began)
        for index, position in enumerate(self._open_step.batches):
            self._again = self._load_again(index, position), position
            try:
                result = closure()
            finally:
                self._again = None
        return result

    def _load_again(self, index: int, position: int) -> Any:
        if self._loader is None:
            return self._open_step.loaded[index]
        return prepare_batch(self, self._loader.fetch(position, self._in_quorum().share))

    def _facts(self) -> str:
        """Return what each group decides by itself, and all must decide alike."""
        trainer = self._trainer
        options = [
            {name: value for name, value in group.items() if isinstance(value, (bool, int, float))}
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]
        return f"epoch {trainer.current_epoch}, should_stop={trainer.should_stop}, optimizer {options}"

    # Writing and ending

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, in the first group of the quorum."""
        if self.quorum is None or self.quorum.is_first:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_train_end(self) -> None:
        """Mark the run as finished."""
        super().on_train_end()
        self._mark.write(self._trainer.global_step)

    def teardown(self) -> None:
        """Leave the quorum, and end the run as in one process."""
        quorum, self.quorum = self.quorum, None
        if quorum is not None:
            quorum.close()
        if self._loader is not None:
            self._loader.close()
            self._loader = None
        self._open_step, self._holds_quorum, self._logged = _Step(), False, None
        super().teardown()


class ShardedTorchftStrategy(TorchftStrategy):
    """Trains one group of an elastic run, sharded over its processes."""

    engine: ClassVar[type[ElasticBackend[Any]]] = ShardedBackend
    registered: ClassVar[str] = "torchft_hsdp"


@dataclass(slots=True)
class _Step:
    """A step that is not committed yet.

    Attributes:
        batches: The positions of its global batches in the epoch; several while gradients accumulate.
        loaded: The batches themselves, where the groups do not share a loader.
        progress: Loops, random state and data position at its beginning.
    """

    batches: list[int] = field(default_factory=list)
    loaded: list[Any] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)


def _seed() -> int:
    """Return the seed of Lightning's `seed_everything`, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _warn_of_batch_norm(module: nn.Module) -> None:
    names = [name for name, layer in module.named_modules() if isinstance(layer, _BATCH_NORMS)]
    if names:
        log.warning(
            "elastic: %s normalise by a group's share of the batch: their numbers depend on the groups",
            ", ".join(names[:3]) + (" and others" if len(names) > 3 else ""),
        )
