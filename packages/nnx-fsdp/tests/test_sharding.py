"""`Sharding` trains as plain PyTorch does, without a backend or Lightning."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_conformance.pool import WorkerPool
from nnx_core.errors import UnsupportedError
from nnx_fsdp import ShardedUnit, Sharding
from nnx_fsdp.meshes import mesh_of

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.outer(self.inner(batch).relu()).square().mean()


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(STEPS, 8, 4)


def train_plain() -> list[Tensor]:
    net, data = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in data:
        net.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def sharding_of_world() -> Sharding:
    mesh = mesh_of("cpu", (dist.get_world_size(),), names=("shard",))
    return Sharding(mesh, torch.device("cpu"))


def train_sharded() -> tuple[bool, list[Tensor], list[Tensor]]:
    """Return True if the root stays gathered, the weights as user code reads them, and the unsharded ones."""
    net, data = made()
    sharding = sharding_of_world()
    replaced = sharding.shard(net, [ShardedUnit("inner", net.inner, reshard=False)])
    assert set(replaced.values()) == set(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sharding.take_optimizers(net, [optimizer])
    for batch in data:
        own = batch[dist.get_rank() :: dist.get_world_size()]
        loss = sharding.run_step(net, net.training_step, own)
        with sharding.backward_pass():
            loss.backward()
        with sharding.local():
            optimizer.step()
            optimizer.zero_grad()
    read = [parameter.detach().clone() for parameter in net.parameters()]
    sharding.unshard(net, lambda gather, *, shape, dtype: gather().cpu())
    return sharding.holds(net), read, [parameter.detach() for parameter in net.parameters()]


def test_it_trains_as_one_process_does_and_reads_unsharded(pool: WorkerPool) -> None:
    expected = train_plain()
    for holds, read, trained in pool.run(train_sharded, world_size=2, init="gloo"):
        assert not holds
        for one, other, plain in zip(read, trained, expected, strict=True):
            torch.testing.assert_close(one, plain)
            torch.testing.assert_close(other, plain)


def share_a_weight() -> str:
    net, _ = made()
    net.tied = nn.Linear(8, 4)
    net.tied.weight = net.outer.weight
    try:
        sharding_of_world().shard(net, [ShardedUnit("outer", net.outer)])
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_unit_that_shares_weights_with_others_is_refused(pool: WorkerPool) -> None:
    for message in pool.run(share_a_weight, world_size=2, init="gloo"):
        assert "a unit shares parameters with modules outside of it: tied.weight" in message
