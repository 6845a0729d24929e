"""Runs on the engines of the contract's worked examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nnx
from jobs import engines
from nnx_core.errors import DisagreementError
from nnx_test_helpers.training import Net, Outcome, Run, make_trainer, train


def train_with_engines(run: Run) -> Outcome:
    """Train under one of the engines."""
    engines.register()
    return train(run)


def save_afterwards(run: Run, path: str) -> None:
    """Train under one of the engines, evaluate, and save when both runs have ended."""
    engines.register()
    trainer = make_trainer(run)
    module = Net(run)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    trainer.save_checkpoint(path)


def sampled(run: Run) -> tuple[list[Any], bool]:
    """Shapes of the example inputs that an engine was given, and whether parameters came back whole."""
    engines.register()
    module = Net(run)
    shapes = {name: value.shape for name, value in module.state_dict().items()}
    trainer = make_trainer(run)
    trainer.fit(module)
    back = {name: value.shape for name, value in module.state_dict().items()}
    return trainer.strategy.backend.sample_shapes, shapes == back


def reduced_over_shares() -> dict[str, Any]:
    """Return Trainer's reductions over ranks with the same data: logged values, and values of a hook."""
    engines.register()
    run = Run(strategy="column_parallel", steps=1)
    note = _Reduces()
    make_trainer(run, callbacks=[note]).fit(Net(run))
    return note.results


def calls_of_own_backward(run: Run) -> int:
    """Return the number of calls of the user's ``LightningModule.backward``."""
    engines.register()
    module = _OwnBackward(run)
    make_trainer(run).fit(module)
    return module.calls


class _OwnBackward(Net):
    calls = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        super().backward(loss, *args, **kwargs)


def scaled_under_fabric() -> tuple[list[float], list[float]]:
    """Weights after steps of Fabric with and without a loss scale, under an engine with its own backward."""
    engines.register()
    return _fabric_steps(MixedPrecision("16-mixed", "cpu")), _fabric_steps(None)


def _fabric_steps(precision: Any) -> list[float]:
    strategy = nnx.strategy("flat_masters", namespace="lightning.fabric")
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2, plugins=precision)
    fabric.launch()
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(2):
        fabric.backward(model(torch.ones(3, 4)).float().pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [float(value) for value in plain.weight.detach().flatten()]


def of_its_own_batch(run: Run) -> str:
    """Return the error if ranks that compute one batch together divide the data by their rank."""
    engines.register()
    try:
        make_trainer(run).fit(_DividesByProcess(run))
    except DisagreementError as error:
        return str(error)
    return ""


class _DividesByProcess(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        """Another batch for every process."""
        mine = torch.full((2, 6), float(dist.get_rank()))
        return DataLoader(TensorDataset(mine, mine), batch_size=2)


class _Reduces(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        reduce, me = trainer.strategy.reduce, dist.get_rank()
        module.log("sum", 3.0, sync_dist=True, reduce_fx="sum", on_epoch=True)
        module.log("mean", float(me), sync_dist=True, on_epoch=True, batch_size=1)
        self.results = {
            "a sum": reduce(torch.tensor(3.0 + me), reduce_op="sum").item(),
            "a sum by its operation": reduce(torch.tensor(3), reduce_op=dist.ReduceOp.SUM).item(),
            "a product": reduce(torch.tensor(3.0), reduce_op="product").item(),
            "a mean": reduce(torch.tensor(float(me)), reduce_op="mean").item(),
            "a group's sum": reduce(torch.tensor(3.0), group=dist.group.WORLD, reduce_op="sum").item(),
            "all": trainer.strategy.reduce_boolean_decision(True),
            "all but one": trainer.strategy.reduce_boolean_decision(me == 0),
            "any": trainer.strategy.reduce_boolean_decision(me == 0, all=False),
            "gathered": module.all_gather(torch.tensor([3.0])).tolist(),
            "compared": (trainer.world_size, module.global_rank == me),
            "of the data": (trainer.strategy.data_world_size, trainer.strategy.data_rank),
        }

    def on_train_end(self, trainer: Any, module: Any) -> None:
        logged = trainer.callback_metrics
        self.results |= {f"logged {name}": logged[name].item() for name in ("sum", "mean")}
