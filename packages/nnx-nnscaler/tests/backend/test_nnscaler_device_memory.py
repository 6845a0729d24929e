"""The device never holds the unsharded model, neither during setup nor when the model is returned."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jobs.nnscaler_codegen_models import Mixture
from nnx_core.backend import Call, ParallelContext
from nnx_core.machine.hardware import profile
from nnx_nnscaler import compilation
from nnx_nnscaler.backend import NnScalerBackend
from nnx_nnscaler.options import NnScalerOptions
from nnx_nnscaler.runtime import storage

DEADLINE = 120
LAYERS, WIDTH = 16, 128
LARGEST = WIDTH * WIDTH * 4
"""Bytes of each parameter; activations are a hundredth of that."""


class Live(TorchDispatchMode):
    """The peak of the live bytes of all tensors that any operator read or made.

    Args:
        module: The user's module; its parameters do not count.
    """

    def __init__(self, module=None):
        super().__init__()
        self.peak = 0
        self._live = {}
        tensors = [] if module is None else module.parameters()
        self._apart = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not (tensor.is_meta or isinstance(tensor, FakeTensor)):
                memory = tensor.untyped_storage()
                self._live[StorageWeakRef(memory)] = memory.nbytes()
        self._live = {kept: size for kept, size in self._live.items() if not kept.expired()}
        self.peak = max(self.peak, sum(size for kept, size in self._live.items() if kept not in self._apart))
        return result

    def to_host(self, *args, move=storage._on_host):
        """Exclude a tensor that moves to host memory."""
        moved = move(*args)
        self._apart.add(StorageWeakRef(moved.untyped_storage()))
        return moved


def stack():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def built(where, build=stack):
    torch.manual_seed(0)
    with torch.device(where):
        return build()


def set_up(module, sample, **options):
    backend = NnScalerBackend(NnScalerOptions(**options))
    rank, world = dist.get_rank(), dist.get_world_size()
    backend.setup(
        ParallelContext(
            device=torch.device("cpu"), rank=rank, local_rank=rank, world_size=world, local_world_size=world
        )
    )
    backend.parallelize(module, sample)
    return backend


def live_bytes(where, options):
    """The peaks while a model is laid out, and while it is given back; which must not change a value."""
    x = torch.ones(2, WIDTH)
    expected, module = built("cpu"), built(where)
    torch.manual_seed(0)
    setup, teardown = Live(module), Live()
    with mock.patch.object(compilation, "calibrated", lambda *args, **kwargs: profile("cpu")), setup:
        backend = set_up(module, lambda: ((x,), {}), **options)
    with torch.no_grad():
        torch.testing.assert_close(backend.run_step(module, module, x), expected(x))
    with mock.patch.object(storage, "_on_host", teardown.to_host), teardown:
        backend.unparallelize(module)
    for mine, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, other)
    return setup.peak / LARGEST, teardown.peak / LARGEST


TP = {"policy": "tp", "plan_ngpus": 2, "verify": False}  # verifying takes copies of the model
STAGES = {"policy": "pp", "plan_ngpus": 2}
ZERO = {"policy": "zero", "compute_config": {"reducer_bucket_cap_mb": LARGEST / 1024**2}}


@pytest.mark.full
@pytest.mark.parametrize("where", ["meta", "cpu"])
@pytest.mark.parametrize("options", [TP, STAGES, ZERO], ids=["tp", "pp", "zero"])
def test_the_device_holds_own_parts_and_few_whole_parameters_at_a_time(pool, tmp_path, options, where):
    options = {**options, "gen_savedir": str(tmp_path)}
    for setup, teardown in pool.run(live_bytes, where, options, world_size=2, init="gloo", timeout=DEADLINE):
        assert setup <= LAYERS / 2 + 2.1  # the next one comes while a thread of gloo lets go of the last
        # Gathered, what was received, what a CPU compares it with, and what ZeRO gathers next.
        assert teardown <= LAYERS / 2 + 4.1


class Scaled(nn.Module):
    """A step that needs a parameter before it calls the model, which has a layer that depends on the data."""

    def __init__(self, inner):
        super().__init__()
        self.scale, self.inner = nn.Linear(1, 1, bias=False), inner

    def forward(self, x):
        return self.inner(x * self.scale.weight[0])


class Sample:
    """As Trainer's: it begins a step to find the first call."""

    def __init__(self, module, x):
        self.module, self.x = module, x

    def __call__(self):
        return (self.x,), {}

    def first_call(self):
        return Call(self.module.inner, (self.x * self.module.scale.weight[0],), {})


def plan_what_is_on_meta(build, folder):
    module, x = built("meta", lambda: Scaled(build())), torch.randn(4, 8)
    torch.manual_seed(0)
    backend = set_up(module, Sample(module, x), policy="tp", plan_ngpus=2, gen_savedir=folder)
    programs = backend._laid_out[module].programs
    assert programs.root is module.inner
    with torch.no_grad():
        found = backend.run_step(module, module, x)
    parts = [placement for placement in programs.layout.stored.values() if placement.is_shard]
    backend.unparallelize(module)
    torch.testing.assert_close(found, module(x))
    return programs.causes, bool(parts), [sorted(made.graph.kept) for made in programs.variants]


def two_layers():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("build", "kept"), [(two_layers, []), (Mixture, ["experts"])])
def test_what_is_built_on_meta_is_planned_as_what_has_values(pool, tmp_path, build, kept):
    """Tracing of value-dependent modules gets real values."""
    outcomes = pool.run(
        plan_what_is_on_meta, build, str(tmp_path), world_size=2, init="gloo", timeout=DEADLINE
    )
    assert outcomes == [([], True, [kept, kept][: len(outcomes[0][2])])] * 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(8, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 8)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


def train_what_is_tied_on_meta(options):
    module, ids = built("meta", Tied), torch.arange(8)
    torch.manual_seed(dist.get_rank())  # rank 0's values count
    backend = set_up(module, lambda: ((ids,), {}), **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    backend.setup_optimizers(module, [optimizer])
    backend.backward(module, backend.run_step(module, module, ids).square().sum())
    backend.optimizer_step(optimizer, optimizer.step)
    backend.unparallelize(module)
    assert module.head.weight is module.embedding.weight
    assert [name for name, _ in module.named_parameters()] == [
        "embedding.weight", "norm.weight", "norm.bias", "head.bias"
    ]  # fmt: skip
    return [value.tolist() for value in module.state_dict().values()]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("options", [TP, ZERO], ids=["tp", "zero"])
def test_parameters_that_are_tied_on_meta_stay_so_and_are_the_same_on_all_ranks(pool, tmp_path, options):
    options = {**options, "gen_savedir": str(tmp_path)}
    first, second = pool.run(train_what_is_tied_on_meta, options, world_size=2, init="gloo", timeout=DEADLINE)
    assert first == second
