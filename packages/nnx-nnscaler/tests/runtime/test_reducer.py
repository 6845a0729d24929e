"""The reducer in real processes: equal to DDP bit for bit, and right in cases that DDP refuses."""

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nnx_base.ranks import engine_group
from nnx_core.agree import parameter_usage
from nnx_core.errors import UnsupportedError
from nnx_nnscaler.axes import make_axes
from nnx_nnscaler.runtime.storage import Parameters

DEADLINE = 60


@pytest.fixture
def run(pool):
    def run(job, *args, world_size=2):
        return pool.run(job, *args, world_size=world_size, init="gloo", timeout=DEADLINE)

    return run


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class TinyGPT(nn.Module):
    """With tied embeddings, and 1.9 MiB: more than the first bucket."""

    def __init__(self, width=96, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def axes_of_world():
    return make_axes(rank=dist.get_rank(), world_size=dist.get_world_size(), unit_size=1, part_size=1)


def batch(step, rank, rows=2):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 128, (rows, 12), generator=generator)


def train(model, forward, steps=10, accumulate=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate is not None:
            with accumulate():
                forward(batch(step + 50, dist.get_rank())).backward()
        loss = forward(batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()]


def compare_with_ddp(accumulates):
    torch.manual_seed(0)
    ours = TinyGPT()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    parameters = Parameters(ours, axes_of_world())
    losses, values, gradients = train(
        ours, ours, accumulate=(lambda: held(parameters)) if accumulates else None
    )
    expected = train(theirs.module, theirs, accumulate=theirs.no_sync if accumulates else None)
    assert losses == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(values, expected[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[2], strict=True))
    buckets = parameters.reducer._arranged().buckets
    assert len(buckets) > 1  # else their layout was not tried
    parameters.give_back()


class held:
    def __init__(self, parameters):
        self.reducer = parameters.reducer

    def __enter__(self):
        self.reducer.synchronize = False

    def __exit__(self, *_):
        self.reducer.synchronize = True


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_equals_ddp_bit_for_bit(run, world_size, accumulates):
    run(compare_with_ddp, accumulates, world_size=world_size)


# --- what DDP refuses or gets wrong, against the mean of what each rank computes alone --------------


def net(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(6, 6, dtype=torch.float64) for name in "abcd"})


def mean_over_ranks(gradients):
    """The reference: means of plain gradients, and None where no rank has one."""
    means = []
    for gradient in gradients:
        all_of_them = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, gradient)
        if all(g is None for g in all_of_them):
            means.append(None)
        else:
            shape = next(g for g in all_of_them if g is not None).shape
            zero = torch.zeros(shape, dtype=torch.float64)
            means.append(sum((zero if g is None else g) for g in all_of_them) / len(all_of_them))
    return means


def gradients_of(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def check(module, reference):
    for (name, parameter), expected in zip(
        module.named_parameters(), mean_over_ranks(reference), strict=True
    ):
        if expected is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-13, atol=1e-14)


def both(scenario, bucket_bytes, steps=3):
    """Run a scenario on a reduced module and on a plain copy, and compare after every step."""
    ours, plain = net(), net()
    parameters = Parameters(ours, axes_of_world(), bucket_bytes=bucket_bytes)
    rank = dist.get_rank()
    for step in range(steps):
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        for module in (ours, plain):
            module.zero_grad()
            scenario(module, x, step, rank, parameters if module is ours else None)
        check(ours, gradients_of(plain))
    parameters.give_back()


def unused_on_some_ranks(module, x, step, rank, parameters):
    used = "ab" if (rank + step) % 2 else "bc"  # d is used by none
    for name in used:
        x = module[name](x).tanh()
    x.sum().backward()


def zero_on_one_rank_and_unused_on_the_other(module, x, step, rank, parameters):
    """A gradient of zeros, of either sign, is a gradient: weight decay and momentum act on it."""
    y = module["a"](x).sum()
    if rank == step % 2:
        y = y + (0.0 * module["b"](x)).sum() + (-0.0 * module["c"].bias).sum()
    y.backward()


def frozen_in_between(module, x, step, rank, parameters):
    module["b"].requires_grad_(step != 1)
    module["c"].requires_grad_(step == 2)  # frozen at first
    for name in "abcd":
        x = module[name](x).tanh()
    x.sum().backward()


def several_losses(module, x, step, rank, parameters):
    y = module["a"](x).tanh()
    module["b"](y).sum().backward(retain_graph=True)
    (2 * module["c"](y)).sum().backward()


def gradients_kept_between_steps(module, x, step, rank, parameters):
    """The user holds on to gradients of the first pass while the second runs."""
    module["a"](x).tanh().sum().backward()
    kept = module["a"].weight.grad
    before = kept.clone()
    module.zero_grad()
    (3 * module["a"](x)).sum().backward()
    assert torch.equal(kept, before)


def a_slice_of_a_gradient_kept(module, x, step, rank, parameters):
    module["a"](x).tanh().sum().backward()
    kept = module["a"].weight.grad[1:3]
    before = kept.clone()
    module.zero_grad()
    (3 * module["a"](x)).sum().backward()
    assert torch.equal(kept, before)


def zeroed_in_place(module, x, step, rank, parameters):
    module["a"](module["b"](x)).sum().backward()
    module.zero_grad(set_to_none=False)
    module["a"](x).sum().backward()


def accumulated_without_the_last_use(module, x, step, rank, parameters):
    """A parameter that only the unsynchronized backward used has to be reduced all the same."""
    with held(parameters) if parameters else nullcontext():
        module["a"](module["b"](x)).sum().backward()
    module["b"](x).sum().backward()


def recomputed(module, x, step, rank, parameters):
    for name in "abcd":
        x = checkpoint(lambda y, layer=module[name]: layer(y).tanh(), x, use_reentrant=False)
    x.sum().backward()


def recomputed_reentrantly(module, x, step, rank, parameters):
    x = module["a"](x)
    for name in "bc":
        x = checkpoint(lambda y, layer=module[name]: layer(y).tanh(), x, use_reentrant=True)
    module["d"](x).sum().backward()


def recomputed_reentrantly_in_one_pass(module, x, step, rank, parameters):
    with parameters.reducer.backward_pass() if parameters else nullcontext():
        recomputed_reentrantly(module, x, step, rank, parameters)


def used_again_inside_a_reentrant_part(module, x, step, rank, parameters):
    """Its gradient grows after its bucket has left."""
    with parameters.reducer.backward_pass() if parameters else nullcontext():
        x = checkpoint(lambda y: module["a"](module["d"](y)).tanh(), x.requires_grad_(), use_reentrant=True)
        module["d"](module["a"](x)).sum().backward()


def not_used_at_all_on_a_rank(module, x, step, rank, parameters):
    leaf = torch.zeros(1, requires_grad=True)
    with parameters.reducer.backward_pass() if parameters else nullcontext():
        (leaf.sum() if rank == 1 else module["a"](x).sum()).backward()


def with_a_graph_of_the_gradients(module, x, step, rank, parameters):
    module["a"](x).tanh().sum().backward(create_graph=True)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


SCENARIOS = [
    unused_on_some_ranks,
    zero_on_one_rank_and_unused_on_the_other,
    frozen_in_between,
    several_losses,
    gradients_kept_between_steps,
    a_slice_of_a_gradient_kept,
    zeroed_in_place,
    accumulated_without_the_last_use,
    recomputed,
    recomputed_reentrantly,
    recomputed_reentrantly_in_one_pass,
    used_again_inside_a_reentrant_part,
    not_used_at_all_on_a_rank,
    with_a_graph_of_the_gradients,
]


@pytest.mark.quick(every=9)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gradients_are_the_mean_over_the_ranks(run, scenario, bucket_bytes):
    run(both, scenario, bucket_bytes)


def accumulate_what_comes_twice():
    module = net()
    parameters = Parameters(module, axes_of_world(), bucket_bytes=1)
    x = torch.ones(2, 6, dtype=torch.float64)
    for step in range(3):
        module.zero_grad(set_to_none=False)
        expected = step == 2 and pytest.raises(
            UnsupportedError, match=r"completed twice.*use_reentrant=False"
        )
        with expected or nullcontext():
            used_again_inside_a_reentrant_part(module, x, 0, dist.get_rank(), parameters)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_gradient_that_grows_while_it_is_reduced_is_refused(run):
    run(accumulate_what_comes_twice)


class Planted(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise Planted


def fail_in_backward():
    ours, plain = net(), net()
    parameters = Parameters(ours, axes_of_world(), bucket_bytes=1)
    x = torch.ones(2, 6, dtype=torch.float64) * (dist.get_rank() + 1)
    for _ in range(2):  # so that there are several buckets
        ours.zero_grad()
        ours["a"](ours["b"](x)).sum().backward()
    for _ in range(2):
        with pytest.raises(Planted):
            ours["a"](Fails.apply(ours["b"](x))).sum().backward()
        parameters.reducer.recover()
        for module in (ours, plain):
            module.zero_grad()
            module["a"](module["b"](x)).sum().backward()
        check(ours, gradients_of(plain))
    with pytest.raises(Planted), parameters.reducer.backward_pass():
        ours["a"](Fails.apply(ours["b"](x))).sum().backward()
    for module in (ours, plain):
        module.zero_grad()
        module["a"](module["b"](x)).sum().backward()
    check(ours, gradients_of(plain))


@pytest.mark.full
def test_an_error_in_backward_leaves_nothing_for_the_next_step(run):
    run(fail_in_backward)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number or a tensor, for which it would wait for a device."""

    def __init__(self):
        super().__init__()
        self.numbers = self.tensors = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def cpu(self, tensor):
        self.tensors += 1
        return tensor.to("cpu")


def reads_of_backward(loss):
    with Reads() as reads, mock.patch.object(Tensor, "cpu", lambda tensor: reads.cpu(tensor)):
        loss.backward()
    return reads.numbers, reads.tensors


def read_in_a_backward(dtype):
    torch.manual_seed(0)
    module = nn.ModuleList(nn.Linear(3, 3, dtype=dtype) for _ in range(12))
    module.append(nn.Linear(0, 3, dtype=dtype))  # without elements there is nothing to read
    parameters = Parameters(module, axes_of_world())
    for step in range(3):
        module.zero_grad()
        loss = module[step + dist.get_rank()](torch.ones(2, 3, dtype=dtype)).abs().sum()
        assert reads_of_backward(loss) == (0, 1)
        used = [index for index, layer in enumerate(module) if layer.weight.grad is not None]
        assert used == [step, step + 1]
    outputs = [layer(torch.ones(2, layer.in_features, dtype=dtype)) for layer in module]
    assert reads_of_backward(torch.cat(outputs).abs().sum()) == (0, 0)  # every parameter is used
    parameters.give_back()


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_unused_parameters_cost_one_read_for_each_bucket(run, dtype):
    run(read_in_a_backward, dtype)


def agree_while_backward_runs():
    embedding = nn.Embedding(10, 4, sparse=True)
    parameters = Parameters(embedding, axes_of_world())
    with mock.patch.object(
        parameter_usage, "all_reduce", autospec=True, side_effect=dist.all_reduce
    ) as calls:
        embedding(torch.tensor([1, 2])).sum().backward()
    flags = [call.kwargs for call in calls.call_args_list if call.args[0].dtype == torch.uint8]
    assert [(of["group"], of.get("async_op")) for of in flags] == [(engine_group(), True)]
    parameters.give_back()


def test_ranks_agree_on_use_in_host_memory_and_do_not_wait_for_it(run):
    run(agree_while_backward_runs)


def reduce_sparse_gradients():
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
    parameters = Parameters(embedding, axes_of_world())
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    rank = dist.get_rank()
    for rows in ([1, 2 + rank], [2 + rank, 7]):
        optimizer.zero_grad()
        (embedding(torch.tensor(rows)) * (rank + 1)).sum().backward()
        gradient = embedding.weight.grad
        assert gradient.is_sparse
        expected = torch.zeros(10, 4, dtype=torch.float64)
        for other in range(2):
            for row in [r - rank + other if r == 2 + rank else r for r in rows]:
                expected[row] += (other + 1) / 2
        assert torch.equal(gradient.to_dense(), expected)
        optimizer.step()
    del parameters


def test_sparse_gradients_stay_sparse(run):
    run(reduce_sparse_gradients)


def keep_strides():
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    parameters = Parameters(layer, axes_of_world())
    layer(torch.ones(2, 4, 5, 5, dtype=torch.float64) * (dist.get_rank() + 1)).sum().backward()
    assert layer.weight.grad.stride() == layer.weight.stride()
    torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, 2 * 9 * 1.5))
    parameters.give_back()
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)


def test_gradients_keep_the_strides_of_their_parameters(run):
    run(keep_strides)


def leave_no_hooks():
    module = net()
    parameters = Parameters(module, axes_of_world())
    parameters.give_back()
    module["a"](torch.ones(1, 6, dtype=torch.float64) * dist.get_rank()).sum().backward()
    assert module["a"].weight.grad[0, 0].item() == dist.get_rank()


def test_parameters_given_back_are_no_longer_reduced(run):
    run(leave_no_hooks)


def add_to_gradients_that_are_sums_over_the_unit():
    """Each rank of a unit has a share of the gradient; a reduced gradient must not be summed again."""
    rank = dist.get_rank()
    axes = make_axes(rank=rank, world_size=dist.get_world_size(), unit_size=2, part_size=1)
    module = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    parameters = Parameters(module, axes, synchronized=frozenset({"weight"}))
    share = float(axes.unit_rank + 1)  # 1 + 2 in each unit, whose data differ by a factor

    def backward(factor):
        with parameters.local_mode():
            weight = parameters.unit_local(module.weight)
            loss = weight.sum() * share * factor * (axes.outer_rank + 1)
        loss.backward()

    mean = 3.0 * (1.0 if axes.outer_size == 1 else 1.5)

    def check(expected):
        whole = torch.full((2, 3), expected, dtype=torch.float64)
        torch.testing.assert_close(module.weight.grad + 0, whole, rtol=1e-14, atol=0)

    backward(1)
    check(mean)
    backward(2)  # a second loss, without zeroing
    check(3 * mean)
    parameters.reducer.synchronize = False
    backward(4)  # accumulated on top of what was reduced
    parameters.reducer.synchronize = True
    backward(8)
    check(15 * mean)
    parameters.reducer.synchronize = False
    backward(4)
    parameters.reducer.synchronize = True
    module.weight.grad = torch.full((2, 3), 1.0, dtype=torch.float64)  # in place of summands: the whole
    backward(1)
    check(1 + mean)
    module.zero_grad(set_to_none=False)
    backward(1)
    check(mean)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_gradient_that_is_a_sum_over_the_unit_is_added_to(run, world_size):
    run(add_to_gradients_that_are_sums_over_the_unit, world_size=world_size)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.arange(6).view(2, 3), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(2, 1, dtype=torch.float64))


def train_beside_integers():
    module = Quantized()
    axes = axes_of_world()
    parameters = Parameters(module, axes)
    (module.scale * module.codes * (dist.get_rank() + 1)).sum().backward()
    assert module.codes.grad is None and not module.codes.requires_grad
    torch.testing.assert_close(module.scale.grad, torch.tensor([[4.5], [18.0]], dtype=torch.float64))
    parameters.give_back()


def test_integer_parameters_are_left_alone(run):
    run(train_beside_integers)
