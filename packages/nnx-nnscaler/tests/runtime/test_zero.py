"""Parameters sharded by rows, and units of two ranks beside them, in real processes: equal to one process."""

import copy
import gc
import io

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import local_mode
from nnx_nnscaler.axes import make_axes
from nnx_nnscaler.ir.placement import S
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
    """Compare sharded steps with steps of one process on all data."""
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
                local,
                parameters.layout(p).local_part(q.detach()),
                rtol=1e-12,
                atol=1e-13,
                msg=f"{step} {name}",
            )
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                expected = parameters.layout(p).local_part(q.grad)
                with local_mode():
                    torch.testing.assert_close(p.grad, expected, rtol=1e-11, atol=1e-12, msg=f"{step} {name}")
                torch.testing.assert_close(p.grad + 0, q.grad, rtol=1e-11, atol=1e-12, msg=f"{step} {name}")
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-12, atol=1e-13)
    parameters.give_back()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert type(p) is nn.Parameter and p.is_leaf
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    assert not [k for p in ours.parameters() for k in vars(p)]


PLACED = {"second.weight": S(1), "first.weight": S(1, groups=3), "head.weight": S(1), "conv.weight": S(0)}


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize(
    ("world_size", "unit_size", "part_size", "stored"),
    [(2, 1, 2, {}), (4, 1, 4, {}), (4, 1, 2, {}), (2, 2, 1, PLACED), (4, 2, 2, PLACED), (4, 2, 1, PLACED)],
    ids=["rows of 2", "rows of 4", "rows in 2 groups", "unit", "unit and rows", "unit twice"],
)
def test_training_equals_one_process(run, world_size, unit_size, part_size, stored, bucket_bytes, penalty):
    run(train_in_rows, unit_size, part_size, stored, bucket_bytes, penalty, world_size=world_size)


# --- programs -----------------------------------------------------------------------------------


def train_a_program(part_size, recomputes, steps=3):
    """As an emitted program does it: each rank takes half of its unit's batch, and a penalty on top.

    `first` is synchronized, `second` stored in columns and used for its part of the work.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    axes = make_axes(rank=rank, world_size=world, unit_size=2, part_size=part_size)
    torch.manual_seed(0)
    ours = nn.ModuleDict({"first": nn.Linear(6, 5), "second": nn.Linear(5, 4, bias=False)}).double()
    plain = copy.deepcopy(ours)
    parameters = Parameters(
        ours, axes, synchronized=frozenset({"first.weight", "first.bias"}), stored={"second.weight": S(0)}
    )
    conversions = parameters._unit

    def program(x, w):
        halves = conversions.split__all_gather(x, 0)

        def segment(y):
            return F.linear(y, w["first.weight"], w["first.bias"]).tanh()

        h = checkpoint(segment, halves, use_reentrant=False) if recomputes else segment(halves)
        whole = conversions.all_gather__reduce_scatter(h, 0)
        part = F.linear(whole, w["second.weight"])
        return conversions.all_gather__split(part, 1).square().sum()

    for step in range(steps):
        ours.zero_grad(), plain.zero_grad()
        generator = torch.Generator().manual_seed(step)
        shares = torch.randn(axes.outer_size, 4, 6, dtype=torch.float64, generator=generator)
        with parameters.local_mode():
            w = {name: parameters.unit_local(p) for name, p in ours.named_parameters()}
            loss = program(shares[axes.outer_rank], w)
        (loss + sum(p.square().sum() for p in ours.parameters())).backward()
        total = (
            sum(plain["second"](plain["first"](x).tanh()).square().sum() for x in shares) / axes.outer_size
        )
        (total + sum(p.square().sum() for p in plain.parameters())).backward()
        for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad + 0, q.grad, rtol=1e-12, atol=1e-13, msg=f"{step} {name}")
        with torch.no_grad(), parameters.stepping():
            for p in ours.parameters():
                p -= 0.01 * p.grad
        with torch.no_grad():
            for q in plain.parameters():
                q -= 0.01 * q.grad


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("world_size", "part_size"), [(2, 1), (4, 1), (4, 2)])
def test_programs_and_code_outside_of_them_share_parameters(run, world_size, part_size, recomputes):
    run(train_a_program, part_size, recomputes, world_size=world_size)


# --- the rest of what rows promise --------------------------------------------------------------


def rows_of_world(module, **options):
    axes = make_axes(rank=dist.get_rank(), world_size=dist.get_world_size(), unit_size=1, part_size=2)
    return Parameters(module, axes, **options)


def bytes_alive():
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.device.type == "cpu"]
    with local_mode():
        storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def free_what_was_gathered():
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    before = bytes_alive()
    parameters = rows_of_world(module, bucket_bytes=64 * 64 * 4)
    whole = 8 * 64 * 64 * 4
    assert bytes_alive() <= before - whole // 2 + 64
    at_rest = bytes_alive()
    rest_of_step = at_rest + whole // 2 + whole // 4  # gloo's thread may hold on to its last tensors
    loss = module(torch.ones(1, 64)).sum()
    assert bytes_alive() >= at_rest + whole
    loss.backward()
    del loss
    assert bytes_alive() <= rest_of_step  # gradients, in rows too
    with torch.no_grad():
        module(torch.ones(1, 64))
    parameters.end_step()
    assert bytes_alive() <= rest_of_step


def test_gathered_rows_are_freed_after_backward_and_after_steps(run):
    run(free_what_was_gathered)


def accumulate_rows():
    module = nn.Linear(4, 4, dtype=torch.float64)
    parameters = rows_of_world(module)
    x = torch.ones(2, 4, dtype=torch.float64) * (dist.get_rank() + 1)
    parameters.reducer.synchronize = False
    module(x).sum().backward()
    parameters.reducer.synchronize = True
    module(2 * x).sum().backward()
    torch.testing.assert_close(module.weight.grad + 0, torch.full((4, 4), 9.0, dtype=torch.float64))
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(module.weight.grad + 0, torch.full((4, 4), 3.0, dtype=torch.float64))


def test_gradients_in_rows_add_up(run):
    run(accumulate_rows)


def gather_twice_for_one_backward():
    ours = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))
    plain = copy.deepcopy(ours)
    parameters = rows_of_world(ours)  # both in one bucket
    for module in (ours, plain):
        y = module[0](module[1](torch.ones(2, 4, dtype=torch.float64)))
        parameters.end_step()
        module[0](y).tanh().sum().backward()  # both gradients come before that of module[1]
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad + 0, q.grad, rtol=1e-14, atol=0)


def test_rows_gathered_twice_for_one_backward_get_both_gradients(run):
    run(gather_twice_for_one_backward)


def convert_rows():
    module = nn.Linear(4, 4)
    parameters = rows_of_world(module)
    with pytest.raises(UnsupportedError, match=r"stored in rows cannot become torch.float64 .*`precision`"):
        module.double()
    parameters.give_back()
    assert module.double().weight.dtype == torch.float64


def test_rows_of_another_dtype_are_refused(run):
    run(convert_rows)


def change_rows_whole():
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
    plain = copy.deepcopy(module)
    parameters = rows_of_world(module)
    for m in (module, plain):
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(2)
                p.data[0] = 1.0
                p.view(-1)[-1].fill_(3.0)
    with local_mode():
        assert module[0].weight.shape == ((2, 5) if dist.get_rank() == 0 else (1, 5))
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        parameters.end_step()
        assert torch.equal(p, q)
        assert torch.equal(parameters.local(p), parameters.layout(p).local_part(q))


def test_whoever_changes_a_parameter_in_rows_changes_every_part(run):
    run(change_rows_whole)


def save_in_parts(save):
    """Return the error of saving row-sharded parameters on this rank."""
    module = nn.Linear(4, 6)
    Parameters(module, make_axes(rank=dist.get_rank(), world_size=2, unit_size=1, part_size=2))
    with pytest.raises(UnsupportedError) as raised:
        save(dict(module.named_parameters()))
    return str(raised.value)


def pickle_to_memory(weights):
    torch.save(weights, io.BytesIO())


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("save", "says"),
    [(pickle_to_memory, "as `torch.save` does"), (safetensors.torch.save, "as `safetensors` does")],
)
def test_a_part_is_never_saved_as_if_it_were_all(run, save, says):
    for message in run(save_in_parts, save):
        assert says in message and "Gather on all ranks" in message
