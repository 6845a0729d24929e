"""`save` and `load` in a plain training loop, without Lightning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nnx_checkpoint
from nnx_base.errors import CheckpointError
from nnx_conformance.pool import WorkerPool


def model() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 7))
    net[4].weight = net[0].weight  # tied
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))
    return losses


def test_training_goes_on_exactly_where_it_was_saved(tmp_path: Path) -> None:
    net = model()
    optimizer = optimizer_of(net)
    train(net, optimizer, range(3))
    nnx_checkpoint.save(tmp_path / "a", model=net, optimizer=optimizer, step=3, objects={"name": "net"})
    expected = train(net, optimizer, range(3, 6))

    other = model()
    resumed = optimizer_of(other)
    assert nnx_checkpoint.load(tmp_path / "a", model=other, optimizer=resumed) == {"step": 3, "name": "net"}
    assert other[4].weight is other[0].weight
    assert train(other, resumed, range(3, 6)) == expected
    assert nnx_checkpoint.verify(tmp_path / "a") == []


def test_plain_tensors_are_saved_and_filled_by_name(tmp_path: Path) -> None:
    nnx_checkpoint.save(tmp_path / "a", {"w": torch.arange(6.0).view(2, 3)}, epoch=2)
    filled = torch.zeros(2, 3)
    assert nnx_checkpoint.load(tmp_path / "a", {"w": filled}) == {"epoch": 2}
    assert torch.equal(filled, torch.arange(6.0).view(2, 3))


def sharded(path: str, *, saves: bool) -> list[float]:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (number + 1))
    if dist.is_initialized():
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(net)
    if saves:
        train(net, optimizer, range(2))
        nnx_checkpoint.save(path, model=net, optimizer=optimizer, step=2)
    else:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert nnx_checkpoint.load(path, model=net, optimizer=optimizer) == {"step": 2}
    return train(net, optimizer, range(2, 5))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 3)])
def test_what_some_processes_saved_others_load(
    pool: WorkerPool, tmp_path: Path, saving: int, loading: int
) -> None:
    path = str(tmp_path / "a")

    def run(ranks: int, *, saves: bool) -> Any:
        return pool.run(run_sharded, path, saves, world_size=ranks, init="gloo" if ranks > 1 else None)

    expected, found = run(saving, saves=True), run(loading, saves=False)
    assert expected[0] == pytest.approx(found[0], rel=1e-6)


def run_sharded(path: str, saves: bool) -> list[float]:
    return sharded(path, saves=saves)


def test_what_does_not_fit_is_an_error_that_names_it(tmp_path: Path) -> None:
    net = model()
    nnx_checkpoint.save(tmp_path / "a", model=net, optimizer=optimizer_of(net))
    with pytest.raises(CheckpointError, match=r"state of 1 optimizers, and load\(\) got 2"):
        nnx_checkpoint.load(tmp_path / "a", model=net, optimizer=[optimizer_of(net)] * 2)
    with pytest.raises(CheckpointError, match="weight"):
        nnx_checkpoint.load(tmp_path / "a", model=nn.Sequential(nn.Linear(5, 8)))
    with pytest.raises(TypeError, match="pass `model` as well"):
        nnx_checkpoint.save(tmp_path / "b", optimizer=optimizer_of(net))
    with pytest.raises(TypeError, match=r"'keep_previos'; a value's name .* from 'keep_previous'"):
        nnx_checkpoint.save(tmp_path / "b", model=net, keep_previos=2)
    assert not (tmp_path / "b").exists()


def stateful_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of, steps = torch.optim.lr_scheduler, range(0, 40, 2)
    return {
        "scheduler": of.MultiStepLR(optimizer, [2, 2, 5]),
        "warm_up": of.SequentialLR(optimizer, [of.StepLR(optimizer, 2), of.StepLR(optimizer, 3)], [4]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**9),
        "loader": StatefulLoader(steps),
    }


class StatefulLoader:
    """Keeps its place as torchdata's StatefulDataLoader does."""

    def __init__(self, items: Any) -> None:
        self.items, self.place = list(items), 0

    def __next__(self) -> int:
        self.place += 1
        return int(self.items[self.place - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "random": torch.arange(3) * self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["random"], torch.arange(3) * state["place"])
        self.place = state["place"]


def test_whatever_has_a_state_dict_is_saved_and_filled_under_its_name(tmp_path: Path) -> None:
    net = model()
    optimizer = optimizer_of(net)
    saved = stateful_of(optimizer)
    average = torch.optim.swa_utils.AveragedModel(net)
    train(net, optimizer, range(3))
    for _ in range(3):
        saved["scheduler"].step()
        next(saved["loader"])
    saved["scaler"].load_state_dict({**saved["scaler"].state_dict(), "scale": 64.0})
    average.update_parameters(net)
    nnx_checkpoint.save(
        tmp_path / "a", model=net, objects={"average": average, "several": [saved["loader"]]}, step=3, **saved
    )
    other = model()
    filled = stateful_of(optimizer_of(other))
    averaged = torch.optim.swa_utils.AveragedModel(model())
    objects = {"average": averaged, "several": [StatefulLoader(range(9))]}
    assert nnx_checkpoint.load(tmp_path / "a", model=other, objects=objects, **filled) == {"step": 3}
    assert filled["scheduler"].milestones == saved["scheduler"].milestones
    for name in saved:
        assert str(filled[name].state_dict()) == str(saved[name].state_dict())
    assert next(filled["loader"]) == next(saved["loader"]) == 6
    for one, two in zip(average.parameters(), averaged.parameters(), strict=True):
        assert torch.equal(one, two)


def test_what_cannot_be_filled_is_named_with_what_the_checkpoint_has(tmp_path: Path) -> None:
    net = model()
    schedulers = stateful_of(optimizer_of(net))
    nnx_checkpoint.save(tmp_path / "a", scheduler=schedulers["scheduler"], step=3)
    with pytest.raises(
        CheckpointError, match=r"no 'schedular'; it has 'scheduler', 'step'\. Did you mean 'sch"
    ):
        nnx_checkpoint.load(tmp_path / "a", schedular=schedulers["scheduler"])
    nnx_checkpoint.load(tmp_path / "a", scaler=schedulers["scaler"], strict=False)
    with pytest.raises(TypeError, match="cannot fill 'step', a int: it has no `load_state_dict`"):
        nnx_checkpoint.load(tmp_path / "a", step=3)
    with pytest.raises(
        TypeError, match=r"load\(\) has no argument 'modell'; a value's name must differ more from 'model'"
    ):
        nnx_checkpoint.load(tmp_path / "a", modell=net)
    with pytest.raises(CheckpointError, match="has 2 objects to fill, and the checkpoint has"):
        nnx_checkpoint.load(tmp_path / "a", scheduler=[schedulers["scheduler"]] * 2)


def own_states(path: str, saves: bool) -> Any:
    """A loader that stands elsewhere on every rank, and a sharded module among the objects."""
    rank = dist.get_rank()
    loader = StatefulLoader(range(9))
    for _ in range(rank + 1):
        next(loader)
    if not saves:
        loaded = StatefulLoader(range(9))
        try:
            nnx_checkpoint.load(path, rank_objects={"loader": loaded})
        except CheckpointError as error:
            return str(error)
        return loaded.place
    messages = []
    net = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for values in ({"loader": loader}, {"ema": net}):
        try:
            nnx_checkpoint.save(path, objects=values)
        except CheckpointError as error:
            messages.append(str(error))
    nnx_checkpoint.save(path, rank_objects={"loader": loader}, step=1)
    return messages


def test_what_differs_between_ranks_is_saved_for_each_or_refused(pool: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    for messages in pool.run(own_states, path, True, world_size=2, init="gloo"):
        assert "state of 'loader' on rank" in messages[0]
        assert "Pass it as rank_objects={'loader': ...}" in messages[0]
        assert re.search("state of 'ema', a (FSDP)?Linear, holds DTensors", messages[1])
    assert pool.run(own_states, path, False, world_size=2, init="gloo") == [1, 2]
    for message in pool.run(own_states, path, False, world_size=3, init="gloo"):
        assert "has rank_objects of 2 processes, and 3 load it" in message


class Holder(nn.Module):
    """A module that has the model as an attribute, as a LightningModule has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()
        self.head = nn.Linear(2, 2)


def test_a_prefix_loads_the_part_of_a_larger_module_and_the_other_way_round(tmp_path: Path) -> None:
    whole = Holder()
    optimizer = optimizer_of(whole.model)
    train(whole.model, optimizer, range(2))
    nnx_checkpoint.save(tmp_path / "a", model=whole, optimizer=optimizer)
    expected = train(whole.model, optimizer, range(2, 4))
    net = model()
    resumed = optimizer_of(net)
    with pytest.raises(
        CheckpointError, match=r"begin with 'model\.', the names of the model do not\. Pass prefix='model\.'"
    ):
        nnx_checkpoint.load(tmp_path / "a", model=net)
    with pytest.raises(CheckpointError, match=r"begin with 'model\.', and prefix is 'net\.'"):
        nnx_checkpoint.load(tmp_path / "a", model=net, prefix="net.")
    nnx_checkpoint.load(tmp_path / "a", model=net, optimizer=resumed, prefix="model.")
    assert train(net, resumed, range(2, 4)) == expected

    nnx_checkpoint.save(tmp_path / "b", model=net, optimizer=resumed, prefix="model.")
    larger = Holder()
    of_larger = optimizer_of(larger.model)
    nnx_checkpoint.load(tmp_path / "b", model=larger, optimizer=of_larger, strict=False)
    expected = train(net, resumed, range(4, 6))
    assert train(larger.model, of_larger, range(4, 6)) == expected
    with pytest.raises(CheckpointError, match=r"Pass prefix='model\.'"):
        nnx_checkpoint.load(tmp_path / "b", model=net)
    nnx_checkpoint.save(tmp_path / "c", model=net)
    with pytest.raises(CheckpointError, match="Leave prefix out"):
        nnx_checkpoint.load(tmp_path / "c", model=net, prefix="model.")


def test_a_fine_tuned_part_is_loaded_without_strictness(tmp_path: Path) -> None:
    net = model()
    nnx_checkpoint.save(tmp_path / "a", model=net)
    part = nn.Sequential(nn.Linear(5, 7))
    nnx_checkpoint.load(tmp_path / "a", model=part, strict=False)
    weight: Tensor = part[0].weight
    assert torch.equal(weight, net[0].weight)
