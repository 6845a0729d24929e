"""Parameters in rows, and units of two ranks beside them, in real processes: equal to one process."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nnx_nnscaler.axes import make_axes
from nnx_nnscaler.placement import S
from nnx_nnscaler.runtime.parameter import local_mode
from nnx_nnscaler.runtime.storage import Parameters

DEADLINE = 60


@pytest.fixture
def run(pool):
    def run(job, *args, world_size=2):
        return pool.run(job, *args, world_size=world_size, init="gloo", timeout=DEADLINE)

    return run


class Net(nn.Module):
    """Uneven rows, a matrix of one row, a parameter of one number, one that is frozen, one that is unused."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.first = nn.Linear(6, 5)
        self.conv = nn.Conv1d(1, 4, 3)
        self.second = nn.Linear(4, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, ids):
        x = self.first(self.embedding(ids)).tanh()
        x = self.conv(x.flatten(0, 1).unsqueeze(1)).mean(-1) * self.frozen.sum()
        return F.cross_entropy(self.head(self.second(x) * self.scale), ids.flatten())


def batch(step, share):
    generator = torch.Generator().manual_seed(100 * step + share)
    return torch.randint(1, 7, (2, 5), generator=generator)


def train_in_rows(unit_size, part_size, stored, bucket_bytes, guarded_penalty, steps=4):
    """Steps in parts and steps of one process on all data, compared."""
    world, rank = dist.get_world_size(), dist.get_rank()
    axes = make_axes(rank=rank, world_size=world, unit_size=unit_size, part_size=part_size)
    torch.manual_seed(0)
    ours = Net()
    plain = copy.deepcopy(ours)
    parameters = Parameters(ours, axes, stored=stored, bucket_bytes=bucket_bytes)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
    for step in range(steps):
        optimizers[0].zero_grad()
        loss = ours(batch(step, axes.outer_rank))
        if guarded_penalty:
            loss = loss + 0.1 * sum(p.square().sum() for p in ours.parameters() if p.requires_grad)
        loss.backward()
        with parameters.stepping():
            optimizers[0].step()
        optimizers[1].zero_grad()
        total = sum(plain(batch(step, share)) for share in range(axes.outer_size)) / axes.outer_size
        if guarded_penalty:
            total = total + 0.1 * sum(p.square().sum() for p in plain.parameters() if p.requires_grad)
        total.backward()
        optimizers[1].step()
        for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
            local = parameters.local(p)
            assert tuple(local.shape) == parameters.layout(p).local_shape
            torch.testing.assert_close(
                local, parameters.layout(p).local_part(q.detach()), rtol=1e-12, atol=1e-13, msg=f"{step} {name}"
            )
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                expected = parameters.layout(p).local_part(q.grad)
                torch.testing.assert_close(p.grad, expected, rtol=1e-11, atol=1e-12, msg=f"{step} {name}")
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-13)
    parameters.give_back()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert type(p) is nn.Parameter and p.is_leaf
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    assert not [k for p in ours.parameters() for k in vars(p)]


PLACED = {"second.weight": S(1), "first.weight": S(1, groups=3), "head.weight": S(1), "conv.weight": S(0)}


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize(
    ("world_size", "unit_size", "part_size", "stored"),
    [(2, 1, 2, {}), (4, 1, 4, {}), (4, 1, 2, {}), (2, 2, 1, PLACED), (4, 2, 2, PLACED), (4, 2, 1, PLACED)],
    ids=["rows of 2", "rows of 4", "rows in 2 groups", "unit", "unit and rows", "unit twice"],
)
def test_training_equals_one_process(run, world_size, unit_size, part_size, stored, bucket_bytes, penalty):
    run(train_in_rows, unit_size, part_size, stored, bucket_bytes, penalty, world_size=world_size)
