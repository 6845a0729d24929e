"""Every method and property of the old class: its results and effects."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from nnx_conformance.pool import WorkerPool
from nnx_core.errors import UnsupportedError
from nnx_lite import Lite
from nnx_lite.wrappers import LiteModule, LiteOptimizer


class Do(Lite):
    """Runs a function of the test's in `run`."""

    def run(self, action: Any, *arguments: Any) -> Any:
        return action(self, *arguments)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, **options)


# --- one process ---------------------------------------------------------------------------------------


def test_run_launches_itself_takes_arguments_and_returns_its_value() -> None:
    class Add(Lite):
        def run(self, one: int, *, other: int) -> int:
            assert self._launched
            return one + other

    assert Add().run(1, other=2) == 3
    assert Add(callbacks=[], loggers=[]).run(2, other=2) == 4


def test_run_that_is_not_overridden_says_so() -> None:
    with pytest.raises(UnsupportedError, match=r"^Lite\.run has no body\. Inherit from Lite"):
        Lite().run()


def test_setup_returns_the_model_or_a_list_of_it_and_its_optimizers() -> None:
    def check(lite: Any) -> None:
        one, two, three = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        alone = lite.setup(one)
        assert isinstance(alone, LiteModule) and alone.module is one
        made = lite.setup(two, sgd(two))
        assert type(made) is list and isinstance(made[0], LiteModule) and isinstance(made[1], LiteOptimizer)
        assert isinstance(made[1], torch.optim.SGD) and made[1].param_groups[0]["lr"] == 0.1
        optimizers = [sgd(three), torch.optim.Adam(three.parameters())]
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizers[0])
        model, first, second, scheduler = lite.setup(three, *optimizers, scheduler=schedule)
        assert (first.optimizer, second.optimizer, scheduler) == (*optimizers, schedule)
        assert model.device == lite.device and model.weight is three.weight
        with pytest.raises(ValueError, match="only once"):
            lite.setup(model)

    Do().run(check)


def test_setup_apart_and_of_several_optimizers() -> None:
    def check(lite: Any) -> None:
        model = lite.setup_module(nn.Linear(2, 2))
        one = lite.setup_optimizers(sgd(model))
        assert isinstance(model, LiteModule) and isinstance(one, LiteOptimizer)
        assert [type(each).__mro__[1] for each in lite.setup_optimizers(sgd(model), sgd(model))] == [
            LiteOptimizer
        ] * 2

    Do().run(check)


def test_setup_leaves_a_model_where_it_is_if_told_so() -> None:
    def check(lite: Any) -> None:
        model = nn.Linear(2, 2, device="meta")
        assert lite.setup(model, move_to_device=False).weight.device.type == "meta"

    Do().run(check)


def test_a_lightning_module_gets_the_optimizers_of_its_setup() -> None:
    def check(lite: Any) -> None:
        module = LightningModule()
        module.layer = nn.Linear(2, 1)
        module.forward = lambda x: module.layer(x)
        model, optimizer = lite.setup(module, sgd(module))
        assert module.optimizers() is optimizer
        module.manual_backward(model(torch.ones(1, 2)).sum())
        assert module.layer.weight.grad is not None

    Do().run(check)


def test_setup_dataloaders_returns_one_or_a_list_and_moves_data_unless_told_not_to() -> None:
    def check(lite: Any) -> None:
        one = lite.setup_dataloaders(loader())
        several = lite.setup_dataloaders(loader(), loader(), move_to_device=False)
        assert type(several) is list and [each.device for each in several] == [None, None]
        assert one.device == lite.device and isinstance(one.sampler, SequentialSampler)
        assert [batch[0].tolist() for batch in one] == [[0, 1], [2, 3], [4, 5], [6, 7]]

    Do().run(check)


def test_backward_autocast_to_device_and_print_do_what_they_did(capsys: pytest.CaptureFixture[str]) -> None:
    def check(lite: Any) -> None:
        weight = nn.Parameter(torch.ones(2, 2))
        with lite.autocast():
            product = weight @ torch.ones(2, 2)
        assert product.dtype is torch.bfloat16
        lite.backward(product.sum(), retain_graph=True)
        assert weight.grad is not None
        model = nn.Linear(1, 1)
        assert lite.to_device(model) is model
        assert lite.to_device({"x": [torch.ones(1)]})["x"][0].device == lite.device
        lite.print("once", 1, sep="-")

    Do(precision="bf16").run(check)
    assert "once-1" in capsys.readouterr().out


def test_seed_everything_seeds_all_generators_and_data_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    assert Lite.seed_everything(7) == 7
    first = draw()
    assert __import__("os").environ["PL_SEED_WORKERS"] == "1"
    assert Lite.seed_everything(7, workers=False) == 7 and draw() == first
    assert __import__("os").environ["PL_SEED_WORKERS"] == "0"


def test_collectives_and_properties_of_one_process() -> None:
    def check(lite: Any) -> None:
        assert (lite.world_size, lite.global_rank, lite.local_rank, lite.node_rank) == (1, 0, 0, 0)
        assert lite.is_global_zero and lite.device == torch.device("cpu")
        lite.barrier("named")
        assert lite.broadcast("x", src=0) == "x" and lite.all_gather(torch.ones(2)).tolist() == [1, 1]
        assert lite.reduce(torch.ones(1)).item() == 1 and lite.reduce_decision(True) is True

    Do().run(check)


def test_sixty_four_bits_convert_model_and_inputs() -> None:
    def check(lite: Any) -> None:
        model = lite.setup(nn.Linear(2, 1))
        assert model.weight.dtype is torch.float64 and model(torch.ones(1, 2)).dtype is torch.float32

    Do(precision=64).run(check)


def test_names_of_fabric_go_on_working() -> None:
    lite = Do()
    assert isinstance(lite, Fabric) and lite.strategy.root_device == torch.device("cpu")
    assert lite.run(lambda fabric: fabric.all_reduce(torch.ones(1))).item() == 1


# --- two processes --------------------------------------------------------------------------------------


def talk(strategy: str) -> dict[str, Any]:
    return Do(strategy=strategy, devices=2).run(collect)


def collect(lite: Any) -> dict[str, Any]:
    rank = torch.tensor([float(lite.global_rank)])
    gathered = lite.all_gather({"a": rank, "b": [rank + 1]})
    reduced = {op: float(lite.reduce(rank, reduce_op=op)) for op in ("mean", "sum")}
    lite.barrier()
    shuffled = lite.setup_dataloaders(loader(shuffle=True))
    kept = lite.setup_dataloaders(loader(shuffle=True), replace_sampler=False)
    share = [x for (batch,) in lite.setup_dataloaders(loader()) for x in batch.tolist()]
    return {
        "ranks": (lite.global_rank, lite.local_rank, lite.node_rank, lite.world_size, lite.is_global_zero),
        "gathered": (gathered["a"].tolist(), gathered["b"][0].tolist()),
        "reduced": reduced,
        "unchanged": rank.item(),
        "broadcast": lite.broadcast({"from": lite.global_rank}, src=1),
        "decisions": [lite.reduce_decision(vote) for vote in (True, lite.is_global_zero, False)],
        "samplers": (type(shuffled.sampler), type(kept.sampler)),
        "share": share,
    }


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_auto"])
def test_collectives_and_samplers_of_two_processes(pool: WorkerPool, strategy: str) -> None:
    for rank, seen in enumerate(pool.run(talk, strategy, world_size=2)):
        assert seen["ranks"] == (rank, rank, 0, 2, rank == 0)
        assert seen["gathered"] == ([[0.0], [1.0]], [[1.0], [2.0]])
        assert seen["reduced"] == {"mean": 0.5, "sum": 1.0} and seen["unchanged"] == rank
        assert seen["broadcast"] == {"from": 1} and seen["decisions"] == [True, False, False]
        assert seen["samplers"] == (DistributedSampler, RandomSampler)
        assert seen["share"] == [rank, rank + 2, rank + 4, rank + 6]


def accumulate(strategy: str) -> list[float]:
    return Do(strategy=strategy, devices=2).run(train)


def train(lite: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model, optimizer = lite.setup(model, sgd(model))
    losses = []
    for step in range(3):
        x: Tensor = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        lite.backward(loss)
        lite.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_clipping_works_on_what_setup_returned(pool: WorkerPool) -> None:
    expected = Do().run(train)
    for losses in pool.run(accumulate, "fsdp_auto", world_size=2):
        assert losses == pytest.approx(expected, abs=1e-6)
