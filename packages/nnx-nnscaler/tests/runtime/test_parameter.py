"""Guarded parameters: unsharded for user code, local in local mode. Ranks are threads of this process."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nnx_base.box import find_fault
from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import can_be_guarded, guarded_mode, local_mode, part_of
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.ir.placement import R, S
from nnx_nnscaler.runtime.part import ParameterLayout, rows_of
from nnx_nnscaler.runtime.storage import Parameters
from nnx_nnscaler.thread_ranks import run_as_ranks


def axes_of(unit):
    return Axes(None, None, None, None, None, unit.rank, unit.size, 0, 1, 0, 1)


def source(shape=(8, 6)):
    torch.manual_seed(1)
    return nn.Linear(shape[1], shape[0], dtype=torch.float64)


def local_gradient(parameter):
    with local_mode():
        return parameter.grad


PLACEMENTS = [S(0), S(1), S(0, groups=2)]


ROWS = S(0)


def on_ranks(job, placement=ROWS, size=2, synchronized=frozenset(), module=source):
    """Run `job(module, parameters, plain twin)` on every rank of a unit."""
    original = module()

    def run(unit):
        ours, plain = copy.deepcopy(original), copy.deepcopy(original)
        stored = {"weight": placement, "bias": R}
        parameters = Parameters(ours, axes_of(unit), stored=stored, synchronized=synchronized, unit=unit)
        return job(ours, parameters, plain)

    return run_as_ranks(size, run)


# --- reading ------------------------------------------------------------------------------------

READS = {
    "shape": lambda w: w.shape,
    "size": lambda w: (w.size(), w.size(0), w.dim(), w.ndim, w.numel(), len(w), w.stride(), w.nbytes),
    "contiguity": lambda w: (w.is_contiguous(), w.storage_offset(), torch.numel(w)),
    "class": lambda w: (isinstance(w, nn.Parameter), type(w).__name__, w.is_leaf, w.requires_grad, w.grad_fn),
    "dtype and device": lambda w: (w.dtype, w.device, w.is_floating_point(), w.element_size(), w.layout),
    "arithmetic": lambda w: 2 * w + 1,
    "reflected": lambda w: torch.ones((), dtype=torch.float64) - w,
    "linear": lambda w: F.linear(torch.ones(3, 6, dtype=torch.float64), w),
    "matmul": lambda w: torch.ones(3, 8, dtype=torch.float64) @ w,
    "norm": lambda w: w.norm() + torch.linalg.vector_norm(w, 3),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "index": lambda w: w[1:5, 0],
    "transpose": lambda w: w.T,
    "list of tensors": lambda w: torch.cat([w, w]) + torch.stack((w, w)).sum(),
    "keyword": lambda w: torch.add(input=w, other=w),
    "like": lambda w: torch.zeros_like(w) + w.new_ones(w.shape),
    "numbers": lambda w: (w.tolist(), w.sum().item(), w.detach().numpy().sum(), bool((w == w).all())),
    "iteration": lambda w: [row.sum() for row in w],
    "to": lambda w: w.to(torch.float32),
    "same to": lambda w: w.to(torch.float64),
    "text": lambda w: (repr(w), str(w), f"{w.sum():.5f}"),
    "vector": lambda w: nn.utils.parameters_to_vector([w, w]),
    "foreach": lambda w: torch._foreach_norm([w, 2 * w]),
}


def same(ours, plain):
    if isinstance(plain, torch.Tensor):
        if not torch.equal(ours, plain):
            return False
        # While none are recorded, a view of a parameter still says that it requires gradients: nobody asks.
        return ours.requires_grad == plain.requires_grad or not torch.is_grad_enabled()
    if isinstance(plain, (list, tuple)):
        return len(ours) == len(plain) and all(same(a, b) for a, b in zip(ours, plain, strict=True))
    return ours == plain


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_whoever_reads_a_parameter_sees_the_whole(placement):
    def job(module, parameters, plain):
        for name, read in READS.items():
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    assert same(read(module.weight), read(plain.weight)), name
        with torch.inference_mode():
            assert torch.equal(module.weight * 2, plain.weight * 2)
        assert torch.equal(module.weight * 2, plain.weight * 2)  # nothing of inference mode is left

    on_ranks(job, placement)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_the_whole_arrive_at_the_parts(placement, size):
    def job(module, parameters, plain):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8)
        for m in (module, plain):
            y = m(x).tanh().sum() + 0.1 * m.weight.square().sum() + m.weight[2:5].exp().sum()
            y.backward()
            (m.weight * 3).sum().backward()  # a second backward adds up
        expected = parameters.layout(module.weight).local_part(plain.weight.grad)
        torch.testing.assert_close(local_gradient(module.weight), expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(module.weight.grad + 0, plain.weight.grad, rtol=1e-14, atol=0)
        torch.testing.assert_close(module.bias.grad, plain.bias.grad, rtol=1e-14, atol=0)
        (gradient,) = torch.autograd.grad((module.weight * 2).sum(), [module.weight])
        assert torch.equal(gradient, torch.full_like(plain.weight, 2))
        parameters.unit_local(module.weight)
        with pytest.raises(UnsupportedError, match=r"`torch.autograd.grad` .* as shards.*`backward`"):
            torch.autograd.grad((module.weight * 2).sum(), [module.weight])

    on_ranks(job, placement, size=size, module=lambda: source((8, 8)))


def test_a_synchronized_parameter_hands_out_its_share_of_the_gradient():
    def job(module, parameters, plain):
        (module.weight * 3).sum().backward()
        assert torch.equal(module.weight, plain.weight)
        assert torch.equal(module.weight.grad, torch.full((8, 6), 3.0, dtype=torch.float64))
        return local_gradient(module.weight)

    gradients = on_ranks(job, R, synchronized=frozenset({"weight"}))
    assert torch.equal(sum(gradients), torch.full((8, 6), 3.0, dtype=torch.float64))


# --- changing -----------------------------------------------------------------------------------


def _set_data(w):
    w.data = w.data * 2 + 1


def _ema(w):
    w.data.lerp_(torch.ones_like(w), 0.25)


def _view(w):
    w.view(-1)[3:20].fill_(2.0)


def _setitem(w):
    w[1:3] = 4.0
    w.data[0] = 5.0


def _operator(w):
    w += 1
    w.data *= 2


CHANGES = {
    "in place": lambda w: w.mul_(2).add_(1),
    "data": _set_data,
    "through data": _ema,
    "through detach": lambda w: w.detach().clamp_(-0.1, 0.1),
    "through a view": _view,
    "items": _setitem,
    "operators": _operator,
    "copy": lambda w: w.copy_(torch.arange(48.0, dtype=torch.float64).view(8, 6)),
    "out": lambda w: torch.add(torch.ones_like(w), 2, out=w),
    "init": lambda w: nn.init.constant_(w, 0.3),
    "init by eye": lambda w: nn.init.eye_(w),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "from a vector": lambda w: nn.utils.vector_to_parameters(torch.arange(48.0, dtype=torch.float64), [w]),
    "index": lambda w: w.index_fill_(0, torch.tensor([1, 6]), 0.0),
}


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_whoever_changes_a_parameter_changes_every_part(change, placement):
    def job(module, parameters, plain):
        before = id(module.weight)
        for m in (module, plain):
            with torch.no_grad():
                m.weight.sum()  # gathered already
                CHANGES[change](m.weight)
        expected = parameters.layout(module.weight).local_part(plain.weight.detach())
        assert torch.equal(parameters.local(module.weight), expected)
        parameters.end_step()
        assert torch.equal(module.weight, plain.weight) and id(module.weight) == before

    on_ranks(job, placement)


def test_random_initialization_under_one_seed_is_that_of_one_process():
    def job(module, parameters, plain):
        with local_mode():
            assert module.weight.shape == (4, 6)
        values = torch.arange(48.0, dtype=torch.float64).view(8, 6)
        module.load_state_dict({"weight": values, "bias": module.bias.detach()})
        assert torch.equal(module.weight, values)
        assert torch.equal(module.state_dict()["weight"], values)

    on_ranks(job)


def test_what_an_optimizer_changes_is_seen_at_once():
    def job(module, parameters, plain):
        assert module.weight.sum() == plain.weight.sum()
        with parameters.stepping(), torch.no_grad():
            assert type(module.weight) is nn.Parameter and module.weight.shape == (4, 6)
            module.weight.add_(1)
            with parameters.user_code():
                assert module.weight.shape == (8, 6)
                assert torch.equal(module.weight, plain.weight + 1)
            assert type(module.weight) is nn.Parameter and module.weight.shape == (4, 6)
        assert torch.equal(module.weight, plain.weight + 1)

    on_ranks(job)


def test_a_change_in_place_that_autograd_would_refuse_is_refused():
    def job(module, parameters, plain):
        for change in (lambda w: w.mul_(2), lambda w: w.__setitem__(0, 1.0), lambda w: w.__iadd__(1)):
            with pytest.raises(RuntimeError, match=r"changed in place .*`torch.no_grad\(\)`"):
                change(module.weight)
        with pytest.raises(RuntimeError, match="modified inplace"):
            module.weight[0].fill_(1.0)
        assert torch.equal(module.weight, plain.weight)
        module.weight.requires_grad_(False)
        module.weight.mul_(2)
        assert torch.equal(module.weight, plain.weight * 2) and not (module.weight * 1).requires_grad

    on_ranks(job)


def test_data_of_another_shape_is_refused():
    def job(module, parameters, plain):
        with pytest.raises(ValueError, match=r"shape \(4, 6\) cannot become the data .* \(8, 6\)"):
            module.weight.data = torch.zeros(4, 6, dtype=torch.float64)

    on_ranks(job)


def test_a_module_in_parts_can_be_converted():
    def job(module, parameters, plain):
        module.float()
        assert module.weight.dtype == torch.float32
        assert parameters.local(module.weight).shape == (4, 6)
        assert torch.equal(module.weight, plain.weight.float())

    on_ranks(job)


# --- modes, copies, identity --------------------------------------------------------------------


def test_in_local_mode_a_parameter_is_its_part():
    def job(module, parameters, plain):
        with parameters.local_mode():
            assert module.weight.shape == (4, 6) and module.weight.detach().shape == (4, 6)
            assert F.linear(torch.ones(1, 6, dtype=torch.float64), module.weight).shape == (1, 4)
            with guarded_mode():
                assert module.weight.shape == (8, 6)
            assert module.weight.shape == (4, 6)
        part = parameters.unit_local(module.weight)
        assert part.shape == (4, 6) and type(part) is torch.Tensor
        part.sum().backward()
        assert torch.equal(local_gradient(module.weight), torch.ones(4, 6, dtype=torch.float64))
        assert parameters.unit_local(module.bias) is module.bias  # it is whole, and not guarded

    on_ranks(job)


def test_copies_and_files_hold_plain_whole_parameters():
    def job(module, parameters, plain):
        module.weight.tag = ["mine"]
        twin = copy.deepcopy(module)
        assert type(twin.weight) is nn.Parameter and twin.weight.tag == ["mine"]
        assert part_of(twin.weight) is None and torch.equal(twin.weight, plain.weight)
        assert type(pickle.loads(pickle.dumps(module.weight))) is nn.Parameter
        file = io.BytesIO()
        torch.save({"module": module.state_dict(), "weight": module.weight}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded["module"]["weight"], plain.weight)
        assert torch.equal(loaded["weight"], plain.weight) and type(loaded["weight"]) is nn.Parameter
        assert copy.deepcopy(module.weight.detach()).equal(plain.weight)

    on_ranks(job)


def test_a_parameter_keeps_identity_hooks_and_attributes():
    def job(module, parameters, plain):
        weight = module.weight
        assert {weight: 1}[weight] == 1 and weight in dict.fromkeys(module.parameters())
        seen = []
        weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
        (weight * 2).sum().backward()
        assert seen == [(8, 6), True]
        weight.grad = None
        assert weight.grad is None
        parameters.give_back()
        assert type(weight) is nn.Parameter and module.weight is weight and not vars(weight)
        assert torch.equal(weight, plain.weight) and weight.grad is None

    on_ranks(job)


class Tagged(nn.Parameter):
    """A user's subclass that leaves torch functions alone."""


class Special(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with local_mode():
            return func(*args, **(kwargs or {}))


def test_subclasses_of_parameters_stay_what_they_are():
    def job(module, parameters, plain):
        assert isinstance(module.weight, Tagged) and module.weight.shape == (8, 6)
        assert type(copy.deepcopy(module.weight)) is Tagged
        parameters.give_back()
        assert type(module.weight) is Tagged

    def tagged():
        module = source()
        module.weight = Tagged(module.weight.detach())
        return module

    on_ranks(job, module=tagged)


def test_parameters_that_answer_torch_functions_themselves_are_not_cut():
    special = Special(torch.zeros(4))
    assert not can_be_guarded(special) and not can_be_guarded(nn.LazyLinear(3).weight)
    module = nn.Module()
    module.special = special
    axes = Axes(None, None, None, None, None, 0, 2, 0, 1, 0, 1)
    with pytest.raises(UnsupportedError, match=r"'special' is a Special, which cannot be sharded.*'R'"):
        Parameters(module, axes, stored={"special": S(0)})


def test_a_parameter_is_gathered_once_until_it_changes_or_the_step_ends():
    def job(module, parameters, plain):
        gathers = []
        original = parameters._unit.whole
        parameters._unit.whole = lambda *a: gathers.append(1) or original(*a)
        for _ in range(3):
            module(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            module.weight.norm()
        counts = [len(gathers)]
        with parameters.stepping(), torch.no_grad():
            module.weight.add_(1)
        module.weight.norm()
        parameters.end_step()
        module.weight.norm()
        return [*counts, len(gathers)]

    assert on_ranks(job) == [[1, 3]] * 2


def test_shards_describe_parts_also_after_changes_that_are_not_written_back_yet():
    def job(module, parameters, plain):
        with torch.no_grad():
            view = module.weight.view(-1)
            view.fill_(3.0)
        shard = parameters.shard(module.weight)
        assert shard.shape == (8, 6) and shard.boxes[0].size == (4, 6)
        assert torch.equal(shard.data[0], torch.full((4, 6), 3.0, dtype=torch.float64))
        state = torch.zeros(4, 6, dtype=torch.float64)
        assert parameters.shard(state, parameter=module.weight).boxes == shard.boxes
        assert parameters.shard(torch.tensor(1.0), parameter=module.weight).is_whole
        assert (parameters.replicas(module.weight), parameters.replicas(module.bias)) == (1, 2)

    on_ranks(job)


# --- layouts of parameters: parts of all ranks together are the whole, whichever way it is cut ----


CASES = [
    ((8, 6), R),
    ((8, 6), S(0)),
    ((8, 6), S(1)),
    ((12, 5), S(0, groups=3)),
    ((5, 12), S(1, groups=3)),
    ((3, 4, 2), S(1)),
    ((7,), R),
    ((1, 4), R),
    ((0, 4), R),
]


def layouts(shape, placement, unit_size, parts):
    for unit_rank, part in itertools.product(range(unit_size), range(parts)):
        layout = ParameterLayout(shape=shape, placement=placement, unit_rank=unit_rank, unit_size=unit_size)
        rows = rows_of(layout.unit_shape[0], rank=part, size=parts) if parts > 1 else None
        yield ParameterLayout(
            shape=shape, placement=placement, unit_rank=unit_rank, unit_size=unit_size, rows=rows
        )


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "placement"), CASES)
def test_the_parts_of_all_ranks_are_the_whole(shape, placement, parts):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    rebuilt = torch.full(shape, -1.0, dtype=torch.float64)
    boxes = set()
    for layout in layouts(shape, placement, 2, parts):
        local = layout.local_part(whole).contiguous()
        assert tuple(local.shape) == layout.local_shape
        shard = layout.shard_of_local(local)
        for box, view in zip(shard.boxes, shard.data, strict=True):
            boxes.add(box)
            rebuilt[box.slices] = view
    assert torch.equal(rebuilt, whole)
    assert find_fault(shape, boxes) == ""


def test_shards_are_views_that_fill_the_local_tensor():
    layout = ParameterLayout(shape=(12, 2), placement=S(0, groups=3), unit_rank=1, unit_size=2, rows=(1, 5))
    local = torch.zeros(4, 2)
    whole = torch.arange(24.0).view(12, 2)
    layout.shard_of_local(local).fill_from(whole)
    assert torch.equal(local, layout.local_part(whole))


def test_a_rank_without_rows_has_no_box():
    layout = ParameterLayout(shape=(1, 4), rows=(1, 1))
    shard = layout.shard_of_local(torch.empty(0, 4))
    assert shard.boxes == () and shard.nbytes == 0


def test_a_parameter_of_one_number_stays_whole():
    shard = ParameterLayout(shape=()).shard_of_local(torch.tensor(3.0))
    assert shard.is_whole and shard.data[0].item() == 3.0
