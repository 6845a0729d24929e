"""Users see sharded gradients as unsharded in every function, and their changes reach the shards."""

import copy
import pickle
from functools import partial

import lightning.pytorch.utilities as lightning_utilities
import pytest
import torch
import torch.distributed as dist
from torch import nn

from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import local_mode
from nnx_nnscaler.axes import Axes, make_axes
from nnx_nnscaler.ir.placement import R, S
from nnx_nnscaler.runtime.functions import Conversions
from nnx_nnscaler.runtime.storage import Parameters
from nnx_nnscaler.thread_ranks import run_as_ranks

DEADLINE = 60
X = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)


def source():
    torch.manual_seed(1)
    return nn.Linear(6, 8, dtype=torch.float64)


def backward(module):
    module(X).tanh().sum().backward()
    (module.weight.exp() * 0.1).sum().backward()


def in_unit(job, placement, size=2, synchronized=frozenset()):
    """Run `job(module, parameters, plain twin)` with gradients on every rank of a unit of threads."""
    original = source()

    def run(unit):
        axes = Axes(None, None, None, None, None, unit.rank, unit.size, 0, 1, 0, 1)
        ours, plain = copy.deepcopy(original), copy.deepcopy(original)
        stored = {"weight": placement}
        parameters = Parameters(ours, axes, stored=stored, synchronized=synchronized, unit=unit)
        for module in (ours, plain):
            backward(module)
        return job(ours, parameters, plain)

    return run_as_ranks(size, run)


WAYS = {
    "S(0)": (S(0), frozenset()),
    "S(1)": (S(1), frozenset()),
    "S(0, 2)": (S(0, groups=2), frozenset()),
    "not summed yet": (R, frozenset({"weight"})),
}
every_way = pytest.mark.parametrize(("placement", "synchronized"), WAYS.values(), ids=WAYS)

CLOSE = {"rtol": 1e-13, "atol": 1e-15}


def local(parameter):
    with local_mode():
        return parameter.grad


def check(module, parameters, plain):
    """Check the optimizer's gradient and the user's gradient against one process."""
    torch.testing.assert_close(module.weight.grad + 0, plain.weight.grad, **CLOSE)
    held = local(module.weight)
    is_summand = module.weight in parameters._synchronized
    if is_summand and not parameters.reducer.is_complete(module.weight):
        held = parameters._unit.communicator.all_reduce(held)
    torch.testing.assert_close(held, parameters.layout(module.weight).local_part(plain.weight.grad), **CLOSE)


READS = {
    "norm": lambda m: m.weight.grad.norm(),
    "norm of data": lambda m: m.weight.grad.data.norm(3.0),
    "detached": lambda m: m.weight.grad.detach().abs().max(),
    "clipping's": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e9),
    "total": lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
    "lightning's": lambda m: torch.tensor(list(lightning_utilities.grad_norm(m, 2).values())),
    "foreach": lambda m: torch._foreach_norm([m.weight.grad])[0],
    "histogram": lambda m: torch.histc(m.weight.grad, 5),
    "numpy": lambda m: torch.from_numpy(m.weight.grad.numpy()),
    "row": lambda m: m.weight.grad[5],
    "arithmetic": lambda m: 1 - m.weight.grad * m.weight.detach(),
    "vector": lambda m: torch.cat([p.grad.flatten() for p in m.parameters()]),
    "stack": lambda m: torch.stack([m.weight.grad, m.weight.grad]),
    "number": lambda m: torch.tensor(m.weight.grad.sum().item()),
    "finite": lambda m: torch.isfinite(m.weight.grad).all(),
    "copy": lambda m: copy.deepcopy(m.weight.grad),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.weight.grad)),
}


@every_way
def test_whoever_reads_a_gradient_sees_the_whole(placement, synchronized):
    def job(module, parameters, plain):
        for name, read in READS.items():
            seen, expected = read(module), read(plain)
            torch.testing.assert_close(seen, expected, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
        gradient = module.weight.grad
        assert gradient is module.weight.grad and isinstance(gradient, torch.Tensor)
        assert gradient.shape == (8, 6) and gradient.numel() == 48 and gradient.dtype == torch.float64
        assert not gradient.requires_grad and gradient.grad_fn is None and gradient.is_leaf
        assert repr(gradient).startswith("tensor([[")

    in_unit(job, placement, synchronized=synchronized)


def _halve_through_view(m):
    m.weight.grad.view(-1).mul_(0.5)
    m.weight.grad.sum()


def _replace(m):
    m.weight.grad = m.weight.grad * 2 + 1


def _replace_by_itself(m):
    gradient = m.weight.grad
    gradient.mul_(3)
    m.weight.grad = gradient


def _replace_by_another(m):
    twin = m.weight.grad.clone()
    m.weight.grad = None
    assert m.weight.grad is None
    m.weight.grad = twin


def _data(m):
    m.weight.grad.data = m.weight.grad.data + 2


def _item(m):
    m.weight.grad[2:4] = 0.25


def _zero(m, set_to_none):
    torch.optim.SGD(m.parameters(), lr=0.1).zero_grad(set_to_none=set_to_none)
    backward(m)


CHANGES = {
    "clip norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "clip value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "foreach": lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 0.5),
    "in place": lambda m: m.weight.grad.mul_(2).add_(1),
    "through data": lambda m: m.weight.grad.data.clamp_(-0.1, 0.1),
    "through a view": _halve_through_view,
    "items": _item,
    "normalized": lambda m: m.weight.grad.div_(m.weight.grad.norm()),
    "centralized": lambda m: m.weight.grad.sub_(m.weight.grad.mean(dim=1, keepdim=True)),
    "data given": _data,
    "replaced": _replace,
    "replaced by itself": _replace_by_itself,
    "replaced by another": _replace_by_another,
    "zeroed": partial(_zero, set_to_none=False),
    "dropped": partial(_zero, set_to_none=True),
}


@every_way
@pytest.mark.parametrize("change", CHANGES)
def test_whoever_changes_a_gradient_changes_every_part(change, placement, synchronized):
    def job(module, parameters, plain):
        for m in (module, plain):
            m.weight.grad.sum()  # gathered already
            CHANGES[change](m)
        check(module, parameters, plain)

    in_unit(job, placement, synchronized=synchronized)


@every_way
def test_changes_that_nobody_has_seen_are_written_back_before_an_optimizer_steps(placement, synchronized):
    def job(module, parameters, plain):
        for m in (module, plain):
            rows = m.weight.grad.data[1:3]
            rows.zero_()
        with parameters.stepping():
            pass
        check(module, parameters, plain)

    in_unit(job, placement, synchronized=synchronized)


def test_users_may_step_by_hand():
    def job(module, parameters, plain):
        for m in (module, plain):
            with torch.no_grad():
                for p in m.parameters():
                    p.sub_(0.1 * p.grad)
                    p.data.add_(p.grad, alpha=-0.1)
                    torch.add(p, p.grad, alpha=0.5, out=p)
        torch.testing.assert_close(module.weight + 0, plain.weight + 0, **CLOSE)
        parameters.end_step()
        torch.testing.assert_close(module.weight + 0, plain.weight + 0, **CLOSE)

    in_unit(job, S(1))


def test_a_gradient_that_was_kept_stays_what_it_was():
    def job(module, parameters, plain):
        kept, expected = module.weight.grad, plain.weight.grad
        for m in (module, plain):
            m.weight.grad = None
        parameters.end_step()
        for m in (module, plain):
            (m.weight * 5).sum().backward()
        torch.testing.assert_close(kept + 0, expected + 0, **CLOSE)
        check(module, parameters, plain)
        assert module.weight.grad is not kept

    in_unit(job, S(0))


def test_a_gradient_of_another_shape_is_refused():
    def job(module, parameters, plain):
        with pytest.raises(RuntimeError, match=r"gradient of shape \(4, 6\) .* parameter of shape \(8, 6\)"):
            module.weight.grad = torch.zeros(4, 6, dtype=torch.float64)
        with pytest.raises(TypeError):
            module.weight.grad = "none"

    in_unit(job, S(0))


def _zero_two_rows(gradient):
    gradient.data[1:3].zero_()


HOOKS = {
    "masks": lambda g: g * torch.arange(48.0, dtype=torch.float64).view(8, 6),
    "normalizes": lambda g: g / g.norm(),
    "changes in place": lambda g: g.mul_(2).add_(1),
    "changes its data": _zero_two_rows,
    "looks": lambda g: None if g.shape == (8, 6) else g * 0,
    "hands back": lambda g: g,
}


@every_way
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_see_the_whole_gradient(hook, placement, synchronized):
    def job(module, parameters, plain):
        for m in (module, plain):
            m.weight.grad = None
            handle = m.weight.register_hook(HOOKS[hook])
            m(X).tanh().sum().backward()
            handle.remove()
            m(X).sum().backward()
        check(module, parameters, plain)

    in_unit(job, placement, synchronized=synchronized)


def test_hooks_after_accumulation_see_the_whole_gradient():
    def job(module, parameters, plain):
        seen = []
        for m in (module, plain):
            m.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
            backward(m)
        torch.testing.assert_close(seen[:2], seen[2:], **CLOSE)

    in_unit(job, S(0))


def test_second_derivatives_through_programs_are_refused():
    def job(unit):
        rt = Conversions(unit)
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        y = rt.all_reduce__keep(rt.part(rt.keep__all_reduce(x) ** 3, dim=0).sum())
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        torch.testing.assert_close(gradient, torch.full((4,), 3.0, dtype=torch.float64))
        with pytest.raises(UnsupportedError, match=r"second derivative .* as shards.*'nnscaler_dp'"):
            gradient.sum().backward()

    run_as_ranks(2, job)


# --- rows, in real processes ----------------------------------------------------------------------


@pytest.fixture
def run(pool):
    def run(job, *args, world_size=2):
        return pool.run(job, *args, world_size=world_size, init="gloo", timeout=DEADLINE)

    return run


def gradients_in_rows(unit_size, part_size, stored):
    axes = make_axes(
        rank=dist.get_rank(), world_size=dist.get_world_size(), unit_size=unit_size, part_size=part_size
    )

    def layers():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(8, 1)).double()

    def train(m):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        fired, norms = [], []
        m[1].weight.register_hook(lambda g: fired.append(g.shape) or g * 0.5)
        m[1].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.shape))
        for _ in range(2):
            optimizer.zero_grad()
            m(X).tanh().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.5))
            m[0].weight.grad[3:] *= 0.5
            m[1].bias.grad = m[1].bias.grad + 1
            yield optimizer
        yield fired, norms, [p.grad + 0 for p in m.parameters()]

    ours, plain = layers(), layers()
    parameters = Parameters(ours, axes, stored=stored)
    ours_runs, plain_runs = train(ours), train(plain)
    for _ in range(2):
        optimizer = next(ours_runs)
        with parameters.stepping():
            optimizer.step()
        next(plain_runs).step()
    fired, norms, gradients = next(ours_runs)
    expected_fired, expected_norms, expected_gradients = next(plain_runs)
    assert sorted(fired) == sorted(expected_fired)
    torch.testing.assert_close(norms, expected_norms, **CLOSE)
    torch.testing.assert_close(gradients, expected_gradients, **CLOSE)
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine + 0, other + 0, **CLOSE)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("world_size", "unit_size", "part_size", "stored"),
    [
        pytest.param(2, 1, 2, {}, id="rows"),
        pytest.param(4, 2, 2, {"1.weight": S(0), "1.bias": S(0)}, id="rows of parts"),
    ],
)
def test_gradients_in_rows_are_seen_whole(run, world_size, unit_size, part_size, stored):
    run(gradients_in_rows, unit_size, part_size, stored, world_size=world_size)
