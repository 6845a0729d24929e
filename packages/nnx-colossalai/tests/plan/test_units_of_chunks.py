"""The modules that become chunks: every parameter is in one chunk, with its ties, and no memory is wasted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from jobs.colossalai_llama import Llama, llama2_7b
from nnx_colossalai.plan.units import find_units, padded_numel, waste
from nnx_core.errors import OptionError


def names(model: nn.Module, **options: object) -> list[str]:
    return [unit.name for unit in find_units(model, **options)]  # type: ignore[arg-type]


def small_llama(**options) -> Llama:
    return Llama(dim=16, heads=2, inner=40, layers=3, words=50, **options)


def assert_each_parameter_once(model: nn.Module, **options: object) -> None:
    units = find_units(model, **options)  # type: ignore[arg-type]
    assert units[-1].name == "" and units[-1].module is model
    assert all(model.get_submodule(unit.name) is unit.module for unit in units)
    found = {name: parameter for unit in units for name, parameter in unit.parameters.items()}
    assert sum(len(unit.parameters) for unit in units) == len(found)
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name] is parameter for name, parameter in expected.items())
    for unit in units:
        inside = {id(module) for module in unit.module.modules()}
        own = {id(parameter) for parameter in unit.parameters.values()}
        users = [m for m in model.modules() if own & {id(p) for p in m._parameters.values()}]
        assert all(id(user) in inside for user in users), f"{unit.name} is used outside of itself"


def test_layers_embeddings_and_heads_are_units_in_the_order_of_definition_and_the_root_is_last() -> None:
    units = find_units(small_llama(), min_numel=500)
    assert [u.name for u in units] == ["embed", "layers.0", "layers.1", "layers.2", "head", ""]
    assert list(units[-1].parameters) == ["norm.weight"]


def test_chunks_of_llama2_7b_are_exact_and_waste_less_than_half_a_percent() -> None:
    units = find_units(llama2_7b())
    assert len(units) == 35
    assert sum(unit.numel for unit in units) == 6_738_415_616
    for world_size in (1, 8):
        assert waste(units, world_size=world_size) < 0.005
    assert waste(units, world_size=7) > 0  # it does count


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (5, 3), (8, 2), (7, 1, 2)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_padding_is_that_of_equal_parts(shape: tuple[int, ...], world_size: int) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    if parameter.ndim == 0 or parameter.numel() == 0:
        expected = parameter.numel()
    else:
        expected = torch.chunk(parameter, world_size)[0].numel() * world_size
    assert padded_numel(parameter, world_size) == expected


def test_a_head_tied_to_the_embedding_is_in_the_root() -> None:
    model = small_llama()
    model.head.weight = model.embed.weight
    assert names(model, min_numel=500) == ["layers.0", "layers.1", "layers.2", ""]
    assert list(find_units(model, min_numel=500)[-1].parameters) == ["embed.weight", "norm.weight"]
    assert_each_parameter_once(model, min_numel=500)


def test_weights_tied_within_a_layer_stay_in_it() -> None:
    model = small_llama()
    model.layers[1].k.weight = model.layers[1].q.weight
    assert names(model, min_numel=500)[:4] == ["embed", "layers.0", "layers.1", "layers.2"]
    assert_each_parameter_once(model, min_numel=500)


def test_layers_that_share_a_little_are_divided_and_only_that_goes_to_the_root() -> None:
    model = small_llama()
    for layer in model.layers:
        layer.norm1.weight = model.layers[0].norm1.weight
    found = names(model, min_numel=500)
    assert "layers.0" not in found and {"layers.0.gate", "layers.2.down"} <= set(found)
    assert_each_parameter_once(model, min_numel=500)


def test_a_module_that_two_layers_hold_is_in_neither() -> None:
    model = small_llama()
    model.layers[2].up = model.layers[0].up
    found = names(model, min_numel=500)
    assert "layers.1" in found and "layers.0" not in found and "layers.2" not in found
    assert_each_parameter_once(model, min_numel=500)


def test_one_layer_used_several_times_is_one_unit() -> None:
    layer = nn.Linear(30, 30)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(30, 30))
    assert names(model, min_numel=500) == ["0", "3", ""]
    assert_each_parameter_once(model, min_numel=500)


def test_units_of_too_many_elements_are_divided_and_small_remainders_go_up() -> None:
    model = small_llama()
    found = {unit.name: unit for unit in find_units(model, min_numel=600, max_numel=700)}
    assert {"layers.0.gate", "layers.0.up", "layers.0.down"} <= set(found)
    assert list(found["layers.0"].parameters) == [
        f"layers.0.{name}.weight" for name in ("q", "k", "v", "o", "norm1", "norm2")
    ]
    assert_each_parameter_once(model, min_numel=600, max_numel=700)
    assert_each_parameter_once(model, min_numel=1, max_numel=20)
    assert "layers.0" not in names(model, min_numel=1, max_numel=20)  # nothing is left of it


def test_what_is_left_of_a_divided_layer_goes_up_where_it_is_small() -> None:
    units = find_units(small_llama(), min_numel=200, max_numel=700)
    assert "layers.0" not in [unit.name for unit in units]
    assert {"layers.0.norm1.weight", "layers.2.norm2.weight"} <= set(units[-1].parameters)


def test_inner_units_come_before_those_around_them() -> None:
    found = names(small_llama(), min_numel=600, max_numel=700)
    assert found.index("layers.0.down") < found.index("layers.0") < found.index("layers.1.gate")


class Scaled(nn.Linear):
    """A class that is not torch's own."""


@pytest.mark.parametrize(
    "module",
    [
        nn.MultiheadAttention(32, 4),
        nn.TransformerEncoderLayer(32, 4, dim_feedforward=64),
        nn.LSTM(32, 32, num_layers=2),
        weight_norm(nn.Linear(64, 64)),
        weight_norm(Scaled(64, 64)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_use_their_childrens_weights_are_whole(module: nn.Module) -> None:
    model = nn.Sequential(module, nn.ReLU())
    assert names(model, min_numel=1, max_numel=100) == ["0", ""]


def test_modules_without_a_forward_are_no_units() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList([torch.zeros(1000)])
            self.box = nn.Module()
            self.box.register_parameter("weight", nn.Parameter(torch.zeros(1000)))
            self.linear = nn.Linear(40, 40)

    model = Holder()
    assert names(model, min_numel=100) == ["linear", ""]
    assert_each_parameter_once(model, min_numel=100)


def test_a_policy_alone_decides() -> None:
    assert names(small_llama(), policy=nn.Embedding) == ["embed", ""]
    assert names(small_llama(), policy=lambda module: isinstance(module, nn.RMSNorm))[:2] == [
        "layers.0.norm1",
        "layers.0.norm2",
    ]


def test_modules_that_are_left_out_go_to_the_root() -> None:
    found = names(small_llama(), min_numel=500, leave=["head", "layers.1"])
    assert "head" not in found and "layers.1" not in found and "layers.0" in found


def test_frozen_parameters_are_counted_apart() -> None:
    model = small_llama()
    model.layers[0].requires_grad_(False)
    model.layers[1].q.requires_grad_(False)
    trainable = {unit.name: (unit.numel - unit.trainable) for unit in find_units(model, min_numel=500)}
    assert trainable["layers.0"] == 2976 and trainable["layers.1"] == 256 and trainable["layers.2"] == 0


def test_a_model_without_parameters_is_its_root() -> None:
    assert names(nn.Sequential(nn.ReLU())) == [""]
    assert waste(find_units(nn.ReLU()), world_size=2) == 0


@pytest.mark.parametrize("options", [{"min_numel": 10, "max_numel": 5}, {"max_numel": 0}])
def test_bounds_that_contradict_each_other_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(
        OptionError, match=r"min_numel=10 is more than max_numel=5|max_numel=0 leaves no room"
    ):
        find_units(nn.Linear(2, 2), **options)


def test_an_upper_bound_lowers_the_lower_one() -> None:
    assert len(find_units(small_llama(), max_numel=300)) > 10


@pytest.mark.full
def test_units_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from jobs.colossalai_llama import Llama; from nnx_colossalai.plan.units import find_units;"
        "print([(u.name, list(u.parameters)) for u in find_units(Llama(16, 2, 40, 2, 50), max_numel=700)])"
    )
    here = [(unit.name, list(unit.parameters)) for unit in find_units(Llama(16, 2, 40, 2, 50), max_numel=700)]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == repr(here)
