"""Jobs that save and resume through Trainer: hooks, callbacks, plugins, other models and other files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn

import nnx
import nnx_checkpoint as storage
from jobs.trainer_edge_jobs import EMA
from nnx_test_helpers.lightning_jobs import trainer_for
from nnx_test_helpers.resume_jobs import Seen, run_cell
from nnx_test_helpers.training import MODELS, Block, Net, Run, make_trainer

PLUGINS: dict[str, Any] = {
    "nnx": nnx.CheckpointIO,
    "torch": TorchCheckpointIO,
    "async": AsyncCheckpointIO,
    "async nnx": lambda: AsyncCheckpointIO(nnx.CheckpointIO()),
}


class PlainSGD(Net):
    """An optimizer without any state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Counter(nn.Module):
    """Keeps something in the checkpoint that is not a tensor, and a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.table = torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"count": self.count, "table": self.table}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.table = state["count"], state["table"]


class Extra(Net):
    """Has extra state, which must be restored before training resumes."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.save_hyperparameters({"width": 10, "name": "extra"})
        self.counter = Counter()
        self.counts: list[tuple[int, list[float]]] = []

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        self.counts.append((self.counter.count, self.counter.table.tolist()))
        self.counter.count += 1
        self.counter.table = self.counter.table + 0.5
        return super().training_step(batch, index)


class Wider(Net):
    """Another model: other shapes, missing and further names."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.embed = nn.Linear(6, 11)
        self.blocks = nn.ModuleList(Block(11) for _ in range(2))
        self.top = nn.Linear(2, 2)


class Longer(Net):
    """The same with one more layer, in which it may differ from the checkpoint."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.strict_loading = False
        self.more = nn.Linear(3, 3)


class Renamed(Net):
    """The same layers under a new name; its hook translates older checkpoints."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.stem = self.embed
        del self.embed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(self.frozen(x))
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) + 0.1 * self.back(hidden.tanh())) * self.scale

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        bias = weights["embed.bias"]
        self.hook_saw = {"type": type(bias).__name__, "bias": bias.sum().item()}
        for name in [name for name in weights if name.startswith("embed.")]:
            weights[_renamed(name)] = weights.pop(name)
        for state in checkpoint["optimizer_states"]:
            state["state"] = {_renamed(name): values for name, values in state["state"].items()}
            for group in state["param_groups"]:
                group["params"] = [_renamed(name) for name in group["params"]]


def _renamed(name: str) -> str:
    return name.replace("embed.", "stem.")


class Selective(Net):
    """Leaves the frozen layer out of its checkpoints, and puts its own initialization in on load."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("frozen.")]:
            del checkpoint["state_dict"][name]
        checkpoint["note"] = {"left out": "frozen", "values": (1, 2.5)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hook_saw = checkpoint["note"]
        fresh = Net(self.run).frozen
        checkpoint["state_dict"] |= {"frozen.weight": fresh.weight.data, "frozen.bias": fresh.bias.data}


class Opaque:
    """No JSON can hold it."""


class OpaqueHparams(Net):
    """Saves an object that has no safe form."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.save_hyperparameters({"thing": {"inner": [Opaque()]}})


MODELS |= {
    "plain_sgd": PlainSGD,
    "extra": Extra,
    "wider": Wider,
    "longer": Longer,
    "renamed": Renamed,
    "selective": Selective,
    "opaque": OpaqueHparams,
}


def cell(run: Run, step: int) -> Seen:
    """Save at a step or resume from one, with one of the models above."""
    return run_cell(run, step)


def counts(run: Run) -> tuple[list[Any], dict[str, Any]]:
    """Return the extra state at each step, and the hyperparameters in the checkpoint."""
    module = Extra(run)
    trainer = make_trainer(run)
    trainer.fit(module, ckpt_path=run.resume)
    if run.save:
        trainer.save_checkpoint(run.save)
    return module.counts, dict(module.hparams)


def fit_with(run: Run, plugin: str | None) -> list[float]:
    """Train with a CheckpointIO plugin; resume from and save to the paths of `run`."""
    module = MODELS[run.model](run)
    plugins = [PLUGINS[plugin]()] if plugin else None
    trainer = make_trainer(run, plugins=plugins)
    trainer.fit(module, ckpt_path=run.resume)
    if run.save:
        trainer.save_checkpoint(run.save)
        trainer.strategy.teardown()  # waits for what is still being written
    return module.losses


def error_of(run: Run, storage_options: Any = None) -> str:
    """Return the error of resuming or saving on this rank."""
    module = MODELS[run.model](run)
    trainer = make_trainer(run)
    try:
        trainer.fit(module, ckpt_path=run.resume)
        if run.save:
            trainer.save_checkpoint(run.save, storage_options=storage_options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@dataclass
class Read:
    """The reads of a resume."""

    whole: list[str]
    losses: list[float]
    hook_saw: Any


def resume_and_watch(run: Run) -> Read:
    """Resume, and return the tensors that were read unsharded."""
    whole: list[str] = []
    original = storage.Checkpoint.read

    def read(self: storage.Checkpoint, name: str, box: Any = None) -> Tensor:
        if box is None:
            whole.append(name)
        return original(self, name) if box is None else original(self, name, box)

    module = MODELS[run.model](run)
    storage.Checkpoint.read = read
    try:
        make_trainer(run).fit(module, ckpt_path=run.resume)
    finally:
        storage.Checkpoint.read = original
    return Read(whole, module.losses, getattr(module, "hook_saw", None))


def load_partly(run: Run, path: str) -> dict[str, Any]:
    """Evaluate a checkpoint with a model that has one layer more."""
    module = Longer(run)
    before = module.more.weight.detach().clone()
    loss = make_trainer(run).validate(module, ckpt_path=path, verbose=False)[0]["val_loss"]
    return {"loss": loss, "untouched": torch.equal(before, module.more.weight)}


def load_untied(run: Run, path: str) -> dict[str, Tensor]:
    """Load a checkpoint with tied weights into a model that does not tie them; the weights afterwards."""
    module = Net(run)
    module.back.weight = nn.Parameter(torch.zeros_like(module.back.weight))
    make_trainer(run).test(module, ckpt_path=path, verbose=False)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# --- callbacks ----------------------------------------------------------------------------------------


def keep_best(strategy: str, devices: int, folder: str, save_last: Any) -> dict[str, Any]:
    """ModelCheckpoint as users have it; then "best" and "last"."""
    run = Run(devices=devices, validate_every=2)
    module = Net(run)
    trainer = _with_model_checkpoint(strategy, devices, folder, save_last, steps=8)
    trainer.fit(module)
    saver: Any = trainer.checkpoint_callback
    report: dict[str, Any] = {
        "names": sorted(entry.name for entry in Path(folder).iterdir()),
        "link": (Path(folder) / "last.ckpt").is_symlink(),
        "scores": sorted(float(score) for score in saver.best_k_models.values()),
        "best": Path(saver.best_model_path).name,
        "test best": trainer.test(module, ckpt_path="best", verbose=False)[0]["test_loss"],
    }
    again = Net(run)
    second = _with_model_checkpoint(strategy, devices, folder, save_last, steps=12)
    second.fit(again, ckpt_path="last")
    report |= {"losses": module.losses, "resumed": again.losses, "step": second.global_step}
    report["restored best"] = Path(second.checkpoint_callback.best_model_path).name
    return report


def _with_model_checkpoint(strategy: str, devices: int, folder: str, save_last: Any, steps: int) -> Trainer:
    saver = ModelCheckpoint(
        dirpath=folder, monitor="val_loss", save_top_k=2, save_last=save_last, filename="{step}"
    )
    return trainer_for(
        devices,
        strategy,
        callbacks=[saver],
        enable_checkpointing=True,
        max_steps=steps,
        val_check_interval=2,
        limit_val_batches=2,
        use_distributed_sampler=False,
    )


def save_weights_only(run: Run, path: str) -> dict[str, Any]:
    """Save without optimizers, resume from that, and return the messages."""
    module = Net(run)
    trainer = make_trainer(run)
    trainer.fit(module)
    trainer.save_checkpoint(path, weights_only=True)
    error = error_of(replace(run, resume=path, steps=run.steps + 1))
    tested = Net(run)
    loss = make_trainer(run).test(tested, ckpt_path=path, verbose=False)[0]["test_loss"]
    return {
        "loss": loss,
        "expected": trainer.test(module, verbose=False)[0]["test_loss"],
        "error": error,
    }


def average(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train with an averaging callback; return its final weights and its weights at the start."""
    ema = EMA()
    module = Net(run)
    trainer = make_trainer(run, callbacks=[ema])
    trainer.fit(module, ckpt_path=run.resume)
    if run.save:
        trainer.save_checkpoint(run.save)
    return ema.state_dict()["average"], ema.restored, module.losses


def save_at_once(run: Run) -> list[float]:
    """Save before the first step and after each."""
    module = Net(run)

    class Save(ModelCheckpoint):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(run.save)

    trainer_for(
        run.devices,
        max_steps=run.steps,
        callbacks=[Save(save_top_k=0)],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    ).fit(module)
    return module.losses
