"""`save` and `load` in a loop of one's own, with nothing of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nnx_checkpoint
from nnx_checkpoint.errors import CheckpointError
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
    with pytest.raises(CheckpointError, match="state of 1 optimizers; 2 are to be filled"):
        nnx_checkpoint.load(tmp_path / "a", model=net, optimizer=[optimizer_of(net)] * 2)
    with pytest.raises(CheckpointError, match="weight"):
        nnx_checkpoint.load(tmp_path / "a", model=nn.Sequential(nn.Linear(5, 8)))
    with pytest.raises(TypeError, match="pass `model`, too"):
        nnx_checkpoint.save(tmp_path / "b", optimizer=optimizer_of(net))
    with pytest.raises(TypeError, match="'keep_previos'; for 'keep_previous'"):
        nnx_checkpoint.save(tmp_path / "b", model=net, keep_previos=2)
    assert not (tmp_path / "b").exists()


def test_a_fine_tuned_part_is_loaded_without_strictness(tmp_path: Path) -> None:
    net = model()
    nnx_checkpoint.save(tmp_path / "a", model=net)
    part = nn.Sequential(nn.Linear(5, 7))
    nnx_checkpoint.load(tmp_path / "a", model=part, strict=False)
    weight: Tensor = part[0].weight
    assert torch.equal(weight, net[0].weight)
