"""The engine's work around backward, and statistics that modules share, in real processes."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

from nnx_core.backend import ParallelContext
from nnx_nnscaler.axes import make_axes
from nnx_nnscaler.backend import NnScalerBackend
from nnx_nnscaler.options import NnScalerOptions
from nnx_nnscaler.shared_statistics import StatisticsOverUnits

DEADLINE = 60


@pytest.fixture
def run(pool):
    def run(job, *args, world_size=2):
        return pool.run(job, *args, world_size=world_size, init="gloo", timeout=DEADLINE)

    return run


def set_up(module, sample=None, **options):
    backend = NnScalerBackend(NnScalerOptions(**options))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    context = {"rank": rank, "local_rank": rank, "world_size": world, "local_world_size": world}
    backend.setup(ParallelContext(device=device, **context))
    backend.parallelize(module, lambda: (sample, {}))
    return backend


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2, dtype=torch.float64)


def backward_of_a_loss_that_uses_no_parameter():
    module = linear()
    backend = set_up(module, policy="dp")
    x = torch.ones(3, 4, dtype=torch.float64)
    unrelated = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = backend.run_step(module, lambda: module(x).sum() if dist.get_rank() == 0 else unrelated * 2)
    backend.backward(module, loss)
    torch.testing.assert_close(module.weight.grad, torch.full((2, 4), 1.5, dtype=torch.float64))
    backend.backward(nn.ModuleList([module]), module(x).sum())  # as Fabric passes several
    torch.testing.assert_close(module.weight.grad, torch.full((2, 4), 4.5, dtype=torch.float64))


def test_a_rank_whose_loss_uses_no_parameter_takes_part(run):
    run(backward_of_a_loss_that_uses_no_parameter)


def clip_what_users_changed(savedir):
    module, plain = linear(), linear()
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    backend = set_up(module, (x,), policy="tp", plan_ngpus=2, gen_savedir=savedir)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backend.setup_optimizers(module, [optimizer])
    backend.backward(module, backend.run_step(module, module, x).square().sum())
    plain(x).square().sum().backward()
    for m in (module, plain):
        m.weight.grad.data[0].mul_(3)  # of which the guard sees nothing
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(backend.clip_grad_norm(optimizer, 0.5), expected)
    for m in (module, plain):
        m.bias.grad.data.mul_(2)
    backend.backward(module, backend.run_step(module, module, x).sum())
    plain(x).sum().backward()
    for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad + 0, other.grad)


def test_the_engine_clips_and_adds_to_what_users_made_of_gradients(run, tmp_path):
    run(clip_what_users_changed, str(tmp_path))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.total = torchmetrics.SumMetric()
        self.of_all = torchmetrics.SumMetric(process_group=dist.group.WORLD)
        self.norm = nn.SyncBatchNorm(2)


def count(unit_size):
    rank, world = dist.get_rank(), dist.get_world_size()
    module = Counting()
    statistics = StatisticsOverUnits(
        module, make_axes(rank=rank, world_size=world, unit_size=unit_size, part_size=1)
    )
    for metric in (module.total, module.of_all):
        metric.update(torch.tensor(1.0 + rank // unit_size))  # as the ranks of a unit have the same batch
    seen = [float(module.total.compute()), float(module.of_all.compute())]
    units = dist.get_world_size(module.norm.process_group)
    module.norm.process_group = None  # groups cannot be copied
    module.of_all = None
    copied = copy.deepcopy(module)
    copied.total.reset(), copied.total.update(torch.tensor(1.0))
    stored = pickle.loads(pickle.dumps(module)).total
    stored.reset(), stored.update(torch.tensor(1.0))
    seen += [float(copied.total.compute()), float(stored.compute())]
    statistics.undo()
    module.total.reset(), module.total.update(torch.tensor(1.0))
    assert module.norm.process_group is None
    return [*seen, float(module.total.compute()), units]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("world_size", "unit_size", "expected"),
    [
        (2, 2, [1.0, 2.0, 1.0, 2.0, 2.0, 1]),
        (4, 2, [3.0, 6.0, 2.0, 4.0, 4.0, 2]),
        (2, 1, [3.0, 3.0, 2.0, 2.0, 2.0, 2]),
    ],
    ids=["one unit", "two units", "units of one"],
)
def test_statistics_count_every_unit_once(run, world_size, unit_size, expected):
    assert run(count, unit_size, world_size=world_size) == [expected] * world_size


def metrics_of_a_module_that_is_laid_out(savedir):
    module = nn.Sequential(nn.Linear(4, 2))
    module.total = torchmetrics.SumMetric()
    module.forward = lambda x, own=module[0]: own(x)
    backend = set_up(module, (torch.ones(2, 4),), policy="tp", plan_ngpus=2, gen_savedir=savedir)
    module.total.update(torch.tensor(2.0))
    laid_out = float(module.total.compute())
    backend.unparallelize(module)
    module.total.reset(), module.total.update(torch.tensor(2.0))
    return laid_out, float(module.total.compute())


def test_metrics_are_shared_over_units_while_a_module_is_laid_out(run, tmp_path):
    assert run(metrics_of_a_module_that_is_laid_out, str(tmp_path)) == [(2.0, 4.0)] * 2
