"""The private names of Lightning that nnx uses, except those of its loops.

`nnx_core.lightning.resume` uses the loops' counters and the data fetcher.

Checked against Lightning 2.6.6. The functions take the root of a module tree, because the two copies of
Lightning have classes of their own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from nnx_checkpoint.reading.naming import Described, LazyStateDict, StoredName, View, stored_objects
from nnx_checkpoint.unpickling.torch_file import map_tree
from nnx_core.agree.stall_watch import name_function
from nnx_core.errors import CheckpointError

# Upstream: functions of ``loops.training_epoch_loop`` and ``trainer.connectors.signal_connector`` that call
# torch.distributed themselves, so a rank may wait in them.
name_function("_broadcast_sigterm_tensor", "is about to begin a training batch")
name_function(
    "_sigterm_notifier_fn",
    "received SIGTERM, and the others did not",
    remedy="Send SIGTERM to every rank, or only to rank 0, from which Lightning forwards it.",
)


def is_last_of_evaluation(trainer: Any, stage: str) -> bool:
    """Return True if the current step is the last one of this rank's evaluation; False if unknown.

    Upstream: ``batch_progress`` of ``trainer._evaluation_loop`` and ``trainer.predict_loop``.
    """
    loop = trainer.predict_loop if stage == "predict_step" else trainer._evaluation_loop
    return bool(loop.batch_progress.is_last_batch)


def make_launcher(root: str, strategy: Any, *, start_method: str, num_processes: int, num_nodes: int) -> Any:
    """Make Lightning's launcher, which starts the other processes of a node.

    Upstream: ``strategies.launchers`` of each tree.
    """
    launchers = importlib.import_module(f"{root}.strategies.launchers")
    if start_method == "popen":
        return launchers._SubprocessScriptLauncher(strategy.cluster_environment, num_processes, num_nodes)
    return launchers._MultiProcessingLauncher(strategy, start_method=start_method)


def set_cluster_environment(root: str, strategy: Any, name: str, trainer: Any = None) -> None:
    """Set one of Lightning's cluster environments on a strategy and its Trainer.

    Upstream: ``trainer._accelerator_connector.cluster_environment``.
    """
    environment = getattr(importlib.import_module(f"{root}.plugins.environments"), name)()
    strategy.cluster_environment = environment
    if trainer is not None:
        trainer._accelerator_connector.cluster_environment = environment


def set_world_ranks(strategy: Any) -> None:
    """Set a strategy's rank and world size from its cluster environment.

    Upstream: ``set_world_ranks`` of Trainer's strategies, and ``_set_world_ranks`` of Fabric's.
    """
    (getattr(strategy, "set_world_ranks", None) or strategy._set_world_ranks)()


def capture_global_state() -> Any:
    """Capture random state and torch's flags; another process restores them with ``restore()``.

    Upstream: ``fabric.strategies.launchers.multiprocessing._GlobalStateSnapshot``.
    """
    fabric = "lightning.fabric" if find_spec("lightning") else "lightning_fabric"
    launchers = importlib.import_module(f"{fabric}.strategies.launchers.multiprocessing")
    return launchers._GlobalStateSnapshot.capture()


def handle_interrupt(root: str, trainer: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a Trainer, and tear down after an error as ``trainer.fit`` does.

    Upstream: ``trainer.call._call_and_handle_interrupt``, of Trainer's trees only.
    """
    if trainer is None:
        return function(*args, **kwargs)
    call = importlib.import_module(f"{root}.trainer.call")
    return call._call_and_handle_interrupt(trainer, function, *args, **kwargs)


def has_no_code(function: Any) -> bool:
    """Return True for ``fabric.launch()`` without a function.

    Upstream: ``fabric.fabric._do_nothing``, the first argument of a partial of ``Fabric._wrap_with_setup``.
    """
    arguments: tuple[Any, ...] = getattr(function, "args", ())
    return bool(arguments) and getattr(arguments[0], "__name__", "") == "_do_nothing"


def make_optimizers(root: str, module: Any) -> tuple[list[Any], list[Any]]:
    """Call ``configure_optimizers`` and its checks; returns optimizers and scheduler configs.

    Upstream: ``core.optimizer._init_optimizers_and_lr_schedulers``.
    """
    core = importlib.import_module(f"{root}.core.optimizer")
    optimizers, schedulers = core._init_optimizers_and_lr_schedulers(module)
    return optimizers, schedulers


def attached_trainer(module: Any) -> Any:
    """Return the Trainer that a module is attached to; None before a run, or if other processes ran it.

    Upstream: ``LightningModule._trainer``; ``LightningModule.trainer`` raises an error without one.
    """
    return getattr(module, "_trainer", None)


def is_wrapping_checkpoint_io(root: str, checkpoint_io: Any) -> bool:
    """Return True if an IO plugin wraps another one, as ``AsyncCheckpointIO`` does.

    Upstream: ``plugins.io.wrapper._WrappingCheckpointIO``, of Trainer's trees only.
    """
    wrapper = importlib.import_module(f"{root}.plugins.io.wrapper")
    return isinstance(checkpoint_io, wrapper._WrappingCheckpointIO)


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return the dict that ``trainer.save_checkpoint`` passes to the strategy.

    Upstream: ``trainer._checkpoint_connector.dump_checkpoint``.
    """
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


@contextmanager
def restore_from(trainer: Any, checkpoint: dict[str, Any]) -> Iterator[None]:
    """Restore a Trainer in ``on_train_start`` from the dict of a checkpoint; the block restores the model.

    Upstream: ``trainer._checkpoint_connector`` and its ``_loaded_checkpoint``.
    """
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    yield
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}


def begin_with_next_batch(trainer: Any, set_counters: Callable[[], None]) -> None:
    """Begin training, after the loops were restored in ``on_train_start``, with the batch after the last one.

    Lightning would otherwise validate after the last batch once more.

    Args:
        trainer: The Trainer.
        set_counters: Function that sets the loops' counters to the position in the data.

    Upstream: ``_data_fetcher`` of ``trainer.fit_loop``; ``_should_check_val_fx`` and
    ``_batches_that_stepped`` of its ``epoch_loop``.
    """
    loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    iter(loop._data_fetcher)
    loop.reset()
    set_counters()
    if epoch.batch_progress.current.ready == 0:
        epoch.restarting = False  # this epoch has no batch to resume after
    elif epoch._should_check_val_fx(loop._data_fetcher):
        epoch._batches_that_stepped -= 1  # it counts the batch before once more


def training_loaders(trainer: Any) -> list[Any]:
    """Return the training loaders of a run, which has begun.

    Upstream: ``trainer.fit_loop._combined_loader``.
    """
    return list(trainer.fit_loop._combined_loader.flattened)


def call_before_transfer(module: Any, batch: Any) -> Any:
    """Call the hooks of a module before a training batch goes to the device.

    Upstream: ``LightningModule._on_before_batch_transfer``.
    """
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def choose_checkpoint(trainer: Any, choose: Callable[[Any], Any]) -> None:
    """Replace the path that a Trainer's next restore opens.

    Args:
        trainer: The Trainer, whose strategy has joined the process group.
        choose: Function from the given path, which may be None, to the path to resume from.

    Upstream: ``trainer._checkpoint_connector.resume_start``, which each run calls once, also without a path.
    """
    connector = trainer._checkpoint_connector
    connector.__dict__.pop("resume_start", None)
    restore = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        connector.__dict__.pop("resume_start", None)
        return restore(choose(checkpoint_path), *args, **kwargs)

    connector.resume_start = resume_start


def reset_seed(root: str) -> None:
    """Reset the random state to the seed of ``seed_everything``, as Lightning's ``ddp`` does.

    Upstream: ``utilities.seed.reset_seed`` of Fabric's trees.
    """
    _seed_utilities(root).reset_seed()


def seed_data_workers(root: str, loader: Any, rank: int) -> None:
    """Seed a loader's workers after ``seed_everything(workers=True)``, by another rank than the global one.

    Upstream: ``utilities.seed.pl_worker_init_function`` of Fabric's trees, which ``_auto_add_worker_init_fn``
    gives to loaders that have no ``worker_init_fn``.
    """
    seeding = _seed_utilities(root).pl_worker_init_function
    present = getattr(loader, "worker_init_fn", seeding)
    is_asked_for = present is None and os.environ.get("PL_SEED_WORKERS", "0") != "0"
    if is_asked_for or (isinstance(present, partial) and present.func is seeding):
        loader.worker_init_fn = partial(seeding, rank=rank)


def _seed_utilities(root: str) -> Any:
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    return importlib.import_module(f"{fabric.get(root, root)}.utilities.seed")


def averaging_callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks that average into a copy of the model.

    Upstream: ``_average_model`` of ``WeightAveraging`` and ``StochasticWeightAveraging``.
    """
    return [callback for callback in trainer.callbacks if hasattr(callback, "_average_model")]


def average_of(callback: Any) -> nn.Module | None:
    """Return the average of an averaging callback; None before there is one."""
    average = callback._average_model
    return average if isinstance(average, nn.Module) else None


def make_callback(mixin: type, root: str, *args: Any) -> Any:
    """Make a callback of a mixin's class for one tree of Lightning.

    Args:
        mixin: A class with hooks of a callback.
        root: The root of the tree, such as ``"lightning.pytorch"``; an attribute of the callback.
        *args: Arguments of the mixin.
    """
    base = importlib.import_module(f"{root}.callbacks").Callback
    return type(f"Nnx{mixin.__name__}", (mixin, base), {"root": root})(*args)


def copies_only(root: str, callback: Any) -> bool:
    """Return True if an averaging callback only copies the model in ``setup``.

    Upstream: ``setup`` of ``callbacks.WeightAveraging`` and ``callbacks.StochasticWeightAveraging``.
    """
    callbacks = importlib.import_module(f"{root}.callbacks")
    known = (callbacks.WeightAveraging.setup, callbacks.StochasticWeightAveraging.setup)
    return type(callback).setup in known


def running_stage_source(trainer: Any) -> Any:
    """Return Trainer's source of the current stage's loader, with `instance` and `dataloader()`.

    Upstream: ``_data_source`` of ``trainer.fit_loop`` and of the evaluation and prediction loops.
    """
    loops = {
        "fit": trainer.fit_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    return loops[trainer.state.fn.value]._data_source


def running_stage_loader(trainer: Any) -> Iterable[Any]:
    """Make another loader of the current stage from Trainer's source."""
    loader = running_stage_source(trainer).dataloader()
    while isinstance(loader, (list, tuple)):
        loader = loader[0] if loader else ()
    return loader if isinstance(loader, Iterable) else ()


def migrate_checkpoint(root: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Migrate the dict of an older Lightning to the current form, in place.

    Upstream: ``utilities.migration.utils._pl_migrate_checkpoint``, of Trainer's trees only.
    """
    if "pytorch-lightning_version" not in checkpoint:
        return checkpoint  # Fabric's and other programs' checkpoints have no version to start from
    migrated: dict[str, Any] = importlib.import_module(
        f"{root}.utilities.migration.utils"
    )._pl_migrate_checkpoint(checkpoint)
    return migrated


def explain_directories(root: str) -> None:
    """Add a remedy to the error of ``MyModel.load_from_checkpoint(directory)``, which reads only files.

    Upstream: ``core.saving.pl_load``, of Trainer's trees only.
    """
    saving = sys.modules.get(f"{root}.core.saving")
    if saving is None or hasattr(saving.pl_load, "__wrapped__"):
        return
    read = saving.pl_load

    @wraps(read)
    def pl_load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, (str, os.PathLike)) and Path(path_or_url).is_dir():
            raise CheckpointError(
                f"{os.fspath(path_or_url)!r} is a directory; Lightning's `load_from_checkpoint` reads files.",
                remedy="Use `nnx.load_from_checkpoint(MyModel, path)`, which reads every format.",
            )
        return read(path_or_url, *args, **kwargs)

    vars(saving)["pl_load"] = pl_load


def instantiate_from_config(root: str, cls: type, config: dict[str, Any]) -> Any:
    """Build a module from the hyper-parameters that LightningCLI saved.

    Upstream: ``cli.instantiate_module``, which is documented only as a value in checkpoints.
    """
    return importlib.import_module(f"{root}.cli").instantiate_module(cls, config)


# Lightning's averaging callbacks save a second set of weights: ``state_dict`` holds the average, and another
# entry of Lightning's dict the trained weights. Both are read on use, so no rank holds an unsharded model.


CURRENT = "current_model_state"
"""The key of the trained weights under `WeightAveraging`; ``state_dict`` then holds the average."""
STATE = "averaging_state"
"""The key of the other state of its average."""
AVERAGE = "average_model_state"
"""The key of the average in the state of `StochasticWeightAveraging`."""


class WeightsOnDisk(View):
    """A checkpoint whose objects hold a `LazyStateDict` in place of further sets of weights."""

    @cached_property
    def objects(self) -> Any:
        """The common objects, with all tensors read except those of further weights."""
        described = Described(self.inner)
        for owner, key in _weights_in(stored_objects(described, "trainer")):
            owner[key] = LazyStateDict.of(self, owner[key])
        return map_tree(described.objects, self._read)

    def _read(self, value: Any) -> Any:
        return self.read(value.key) if isinstance(value, StoredName) else value


def _weights_in(trainer: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dicts that hold weights, and the key of the weights in each."""
    states = trainer.get("callbacks")
    owners = [(trainer, CURRENT)]
    owners += [(state, AVERAGE) for state in (states.values() if isinstance(states, Mapping) else ())]
    for owner, key in owners:
        if isinstance(owner, dict) and isinstance(owner.get(key), Mapping):
            yield owner, key
