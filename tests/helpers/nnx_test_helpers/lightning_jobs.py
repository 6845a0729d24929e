"""Jobs that test the guarantees of the Trainer adapter."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nnx
from nnx_test_helpers.training import GLOBAL_BATCH, Net, Run, dataset, digest_of, make_trainer

SAMPLES = 23
OPTIONS = {"min_num_params": 100}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def trainer_for(devices: int, strategy: Any = "fsdp_auto", options: Any = None, **settings: Any) -> Trainer:
    """A quiet Trainer on the CPU."""
    if strategy == "fsdp_auto":
        strategy = nnx.strategy("fsdp_auto", **(OPTIONS if options is None else options))
    return Trainer(strategy=strategy, devices=devices, **{**QUIET, **settings})


def full(value: Tensor) -> Tensor:
    """The complete tensor, on every rank."""
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def rank() -> int:
    """This worker's rank."""
    return int(os.environ["RANK"])


def gathered_sum(value: float) -> float:
    """The sum over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


# --- one module through many Trainers -----------------------------------------------------------------


def every_order(run: Run) -> dict[str, Any]:
    """One module evaluated and trained by several Trainers in an unusual order."""
    module = Net(run)
    before = dict(module.named_parameters())
    report: dict[str, Any] = {"predict 0": _predicted(run, module)}
    report["test 0"] = make_trainer(run).test(module, verbose=False)[0]["test_loss"]
    first = make_trainer(run)
    first.fit(module)
    report["predict 1"] = _predicted(run, module)
    report["validate 1"] = first.validate(module, verbose=False)[0]["val_loss"]
    make_trainer(run).fit(module)
    report["losses"] = list(module.losses)
    report["test 2"] = make_trainer(run).test(module, verbose=False)[0]["test_loss"]
    first.fit_loop.epoch_loop.max_steps += 2
    first.fit(module)
    report["same trainer"] = list(module.losses)
    report["left"] = _what_is_left(module, before)
    report["digest"] = digest_of(dict(module.state_dict()))
    return report


def _predicted(run: Run, module: Net) -> float:
    outputs = torch.cat(make_trainer(run).predict(module))
    return gathered_sum(outputs.double().square().sum().item())


def _what_is_left(module: Net, before: dict[str, nn.Parameter]) -> dict[str, bool]:
    """Return True for each aspect of the module that the strategy has restored."""
    copied = copy.deepcopy(module)
    fresh = Net(module.run)
    return {
        "classes": [type(m) for m in module.modules()] == [type(m) for m in fresh.modules()],
        "types": all(type(p) is nn.Parameter for p in module.parameters()),
        "same objects": all(before[name] is p for name, p in module.named_parameters()),
        "names": list(module.state_dict()) == list(fresh.state_dict()),
        "tied": module.back.weight is module.head.weight and copied.back.weight is copied.head.weight,
        "frozen": not module.frozen.weight.requires_grad and module.embed.weight.requires_grad,
        "copy": digest_of(dict(copied.state_dict())) == digest_of(dict(module.state_dict())),
        "no methods on instances": all("forward" not in m.__dict__ for m in module.modules()),
        "hooks": not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()),
        "grad": all(p.grad is None or p.grad.shape == p.shape for p in module.parameters()),
    }


def save_when_fit_is_over(run: Run, path: str) -> list[float]:
    """Fit, then save from outside of fit."""
    module = Net(run)
    trainer = make_trainer(run)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    return module.losses


# --- evaluation ---------------------------------------------------------------------------------------


class Noisy(LightningModule):
    """Dropout and batch norm, whose outputs differ between training and evaluation."""

    def __init__(self, sync_dist: bool = True) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 6)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.sync_dist = sync_dist
        self.flags: dict[str, tuple[bool, bool, bool]] = {}
        self.weights: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def _note(self, step: str) -> None:
        self.flags[step] = (self.training, torch.is_grad_enabled(), self.layers[3].training)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self._note("train")
        self.seen += len(batch[0]) + rank()  # differs between ranks on purpose
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self._note("validate")
        error = (self(batch[0]) - batch[1]).square().sum()
        self.log("error", error, reduce_fx="sum", sync_dist=self.sync_dist, on_epoch=True)

    def test_step(self, batch: Any, index: int) -> None:
        self._note("test")
        error = (self(batch[0]) - batch[1]).square().sum()
        self.log("error", error, reduce_fx="sum", sync_dist=self.sync_dist)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        self._note("predict")
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class BuffersAtEnd(Callback):
    """Notes this rank's buffers while evaluation and training run."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, list[float]]] = {}

    def _note(self, when: str, module: nn.Module) -> None:
        buffers = {name: full(b).double().flatten().tolist() for name, b in module.named_buffers()}
        self.seen[when] = buffers

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._note("train", module)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._note("test", module)


def uneven(rank: int, size: int) -> DataLoader[Any]:
    """Twenty-three samples: the ranks' last batches have different sizes."""
    inputs, targets = dataset().tensors
    inputs, targets = inputs[:SAMPLES], targets[:SAMPLES]
    share = TensorDataset(inputs[rank::size], targets[rank::size])
    return DataLoader(share, batch_size=4)


def evaluate_noisily(devices: int, path: str) -> dict[str, Any]:
    """Train on differing data, then evaluate: alike on all ranks, without noise, on every sample."""
    module = Noisy()
    note = BuffersAtEnd()
    strategy: Any = "auto" if devices == 1 else "fsdp_auto"
    settings = {"callbacks": [note], "use_distributed_sampler": False, "max_epochs": 1}
    me = rank()
    if devices == 1:
        trainer = trainer_for(1, strategy, **settings)
        module.load_state_dict(torch.load(path))
    else:
        trainer = trainer_for(devices, strategy, **settings)
        trainer.fit(module, uneven(me, devices), uneven(me, devices))
    report: dict[str, Any] = {"error": trainer.test(module, uneven(me, devices), verbose=False)[0]["error"]}
    report["again"] = trainer.validate(module, uneven(me, devices), verbose=False)[0]["error"]
    outputs = torch.cat(trainer.predict(module, uneven(me, devices)))
    report["samples"] = gathered_sum(float(len(outputs)))
    report["predicted"] = gathered_sum(outputs.double().square().sum().item())
    report["flags"] = module.flags
    report["buffers"] = note.seen
    report["digest"] = digest_of(dict(module.state_dict()))
    if devices > 1 and me == 0:
        torch.save(module.state_dict(), path)
    return report


# --- logging, gathering, samplers ---------------------------------------------------------------------


class Logging(LightningModule):
    """Logs numbers that are known in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.indices: list[int] = []
        self.gathered: dict[str, Any] = {}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.indices += batch.flatten().int().tolist()
        if index == 0:
            mine = torch.full((2,), 1.0 + self.global_rank, requires_grad=True)
            whole = self.all_gather(mine, sync_grads=True)
            (whole * (1.0 + self.global_rank)).sum().backward()
            self.gathered["sync_grads"] = (whole.tolist(), mine.grad.tolist())
            self.gathered["tree"] = self.all_gather({"a": torch.tensor(self.global_rank), "b": 3.0})
        value = float(self.global_rank * 10 + index)
        self.log("mean", value, sync_dist=True, on_step=False, on_epoch=True)
        self.log("sum", value, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("max", value, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("min", value, sync_dist=True, reduce_fx="min", on_step=False, on_epoch=True)
        self.log("alone", value, reduce_fx="max", on_step=False, on_epoch=True)
        return self.layer(batch.view(-1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Numbers(Dataset[Tensor]):
    """The numbers 0 to 11, as floats."""

    def __len__(self) -> int:
        return GLOBAL_BATCH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def log_and_gather(devices: int) -> dict[str, Any]:
    """One epoch with Lightning's own sampler."""
    module = Logging()
    trainer = trainer_for(devices, max_epochs=1)
    trainer.fit(module, DataLoader(Numbers(), batch_size=2, shuffle=True))
    sampler: Any = trainer.train_dataloader.sampler
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "sampler": (type(sampler).__name__, sampler.num_replicas, sampler.rank, sampler.shuffle),
        "indices": module.indices,
        "gathered": module.gathered,
    }


# --- collectives of the strategy ----------------------------------------------------------------------


class CallCollectives(Callback):
    """Calls the strategy's collectives in the middle of a fit."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.results = collectives(trainer.strategy, trainer.strategy.reduce)


def collectives(strategy: Any, reduce: Any) -> dict[str, Any]:
    """Return the results of the collectives on this rank, for values that depend on the rank."""
    me = dist.get_rank()
    pair = dist.new_group([0, 1])
    original = torch.tensor([1.0 + me, 10.0])
    results = {
        "mean": reduce(original, reduce_op="mean").tolist(),
        "sum": reduce(original, reduce_op="sum").tolist(),
        "SUM": reduce(original, reduce_op=dist.ReduceOp.SUM).tolist(),
        "AVG": reduce(original, reduce_op=dist.ReduceOp.AVG).tolist(),
        "max": reduce(torch.tensor(me), reduce_op="max").item(),
        "min": reduce(torch.tensor(me), reduce_op="min").item(),
        "int sum": reduce(torch.tensor(me + 1), reduce_op="sum").item(),
        "int mean": reduce(torch.tensor(me), reduce_op="mean").item(),
        "not a tensor": reduce(f"rank {me}", reduce_op="sum"),
        "broadcast": strategy.broadcast({"from": me}),
        "broadcast 1": strategy.broadcast({"from": me}, src=1),
        "gather": strategy.all_gather(torch.tensor([float(me)])).tolist(),
        "all": strategy.reduce_boolean_decision(me == 0, all=True),
        "any": strategy.reduce_boolean_decision(me == 0, all=False),
        "untouched": original.tolist(),
    }
    if me < 2:
        results["pair"] = reduce(torch.tensor(1.0 + me), group=pair, reduce_op="mean").item()
    strategy.barrier("test")
    return results


def call_collectives() -> dict[str, Any]:
    """Among three ranks."""
    note = CallCollectives()
    run = Run(devices=3, steps=1, options=OPTIONS)
    make_trainer(run, callbacks=[note]).fit(Net(run))
    return note.results
