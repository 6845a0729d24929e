"""The model as numbers: widths of precisions, state of optimizers, sizes of groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jobs.colossalai_llama import Llama, llama2_7b
from nnx_colossalai.plan.kept import Probe
from nnx_colossalai.plan.model import buffer_bytes, model_spec, optimizer_state, widths
from nnx_colossalai.plan.units import find_units
from nnx_core.errors import OptionError


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("32-true", (4, 4, 4)),
        (32, (4, 4, 4)),
        ("64-true", (8, 8, 8)),
        ("bf16-mixed", (2, 4, 4)),
        ("bf16", (2, 4, 4)),
        ("16-mixed", (2, 4, 4)),
        (16, (2, 4, 4)),
        ("bf16-true", (2, 2, 2)),
        ("16-true", (2, 2, 2)),
    ],
)
def test_every_precision_has_its_widths(precision: str | int, expected: tuple[int, int, int]) -> None:
    spec = model_spec(find_units(nn.Linear(2, 2)), precision=precision)
    assert (spec.working_bytes, spec.master_bytes, spec.gradient_bytes) == expected
    assert spec.optimizer_bytes == 2 * expected[1]


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(OptionError, match=r"precision='8-true' is unknown to chunks. Use one of '32-true'"):
        widths("8-true")


OPTIMIZERS = {
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Rprop": {},
    "Adagrad": {},
    "ASGD": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9},
    "Adafactor": {},
    "Muon": {},
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_torchs_optimizers_is_what_they_keep_after_a_step(name: str, plain: bool) -> None:
    cls = getattr(torch.optim, name, None)
    if cls is None:
        pytest.skip(f"this torch has no {name}")
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = cls([weight], lr=0.1, **({} if plain else OPTIMIZERS[name]))
    foretold = optimizer_state(optimizer).tensors
    weight.grad = torch.randn(64, 64)
    optimizer.step()
    kept = sum(v.numel() for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.ndim)
    assert foretold == kept // weight.numel()
    assert optimizer_state(optimizer).note == ""


def test_classes_own_subclasses_and_several_optimizers_are_known() -> None:
    class Mine(torch.optim.SGD):
        pass

    weights = [nn.Parameter(torch.ones(2))]
    assert optimizer_state(Mine(weights, lr=0.1, momentum=0.5)).tensors == 1
    assert optimizer_state(torch.optim.SGD).tensors == 0
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": weights, "momentum": 0.9}]
    assert optimizer_state(torch.optim.SGD(groups, lr=0.1)).tensors == 1
    assert optimizer_state([torch.optim.SGD(weights, lr=1.0), torch.optim.Adam(weights)]).tensors == 2


def test_an_unknown_optimizer_is_taken_for_adam_and_it_is_said() -> None:
    class Shampoo(torch.optim.Optimizer):
        pass

    found = optimizer_state(Shampoo)
    assert found.tensors == 2
    assert found.note == "the state of Shampoo is not known: taken for as large as Adam's."
    assert "no optimizer is known yet" in optimizer_state(None).note
    assert optimizer_state([]) == optimizer_state(None)


def test_the_groups_of_llama2_7b_are_exact() -> None:
    spec = model_spec(find_units(llama2_7b()), world_size=8, precision="bf16-mixed", optimizer=8)
    assert len(spec.groups) == 35 and spec.groups[-1].name == ""
    assert sum(group.numel for group in spec.groups) == 6_738_415_616
    assert spec.groups[1].numel == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert (spec.world_size, spec.optimizer_bytes) == (8, 8)


def test_groups_count_what_sharding_adds_and_what_is_trained() -> None:
    model = Llama(dim=10, heads=2, inner=33, layers=2, words=50)
    model.layers[0].requires_grad_(False)
    units = find_units(model, min_numel=400)
    alone, four = (model_spec(units, world_size=ranks) for ranks in (1, 4))
    layer = 4 * 100 + 3 * 330 + 20
    assert [group.numel for group in alone.groups] == [500, layer, layer, 500, 10]
    assert [group.trainable for group in alone.groups] == [500, 0, layer, 500, 10]
    padded = 4 * 120 + 2 * 36 * 10 + 12 * 33 + 24
    assert [group.numel for group in four.groups] == [520, padded, padded, 520, 12]
    assert [group.trainable for group in four.groups] == [520, 0, padded, 520, 12]


def test_what_a_probe_found_and_buffers_are_taken_over() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))
    found = Probe({"0": 100, "": 7}, {"0": 3000, "": 500}, temporary_bytes=11)
    spec = model_spec(find_units(model, min_numel=100), probe=found, flops=1e3, other_device_bytes=1000)
    assert [group.activation_bytes for group in spec.groups] == [100, 7]
    assert [group.compute_seconds for group in spec.groups] == [3.0, 0.5]
    assert buffer_bytes(model) == 2 * 20 * 4 + 8
    assert spec.other_device_bytes == 1000 + 11 + 168
