"""The automatic choice of units, on models that are not trained."""

from __future__ import annotations

import pytest
from torch import nn

from nnx_core.errors import OptionError
from nnx_core.view.modules import Layers
from nnx_fsdp.units import choose_units, options_by_choice, remedy_by_choice, tied_across


def _names(model: nn.Module, **options: object) -> list[str]:
    return [name for name, _ in choose_units(model, **options).units]  # type: ignore[arg-type]


def test_transformer_layers_are_found_in_encoder_and_decoder() -> None:
    model = nn.Transformer(64, 4, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=128)
    assert _names(model, min_num_params=1000) == [
        *(f"encoder.layers.{i}" for i in range(2)),
        *(f"decoder.layers.{i}" for i in range(3)),
    ]
    assert choose_units(model, min_num_params=1000).last is None  # of two stacks


def test_the_last_layer_is_the_last_of_one_stack() -> None:
    assert choose_units(nn.Sequential(*(nn.Linear(400, 400) for _ in range(3)))).last == "2"
    assert choose_units(nn.Linear(400, 400)).last is None


def test_layers_inside_a_unit_are_not_units() -> None:
    block = lambda: nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))  # noqa: E731

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"a": block()}) for _ in range(2))

    assert _names(Stack()) == ["layers.0.a.0", "layers.0.a.1", "layers.1.a.0", "layers.1.a.1"]
    assert _names(nn.Transformer(512, 8, 2, 1)) == ["encoder.layers.0", "encoder.layers.1"]


def test_small_models_are_one_unit_and_the_reason_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    choice = choose_units(model)
    assert choice.units == ()
    assert choice.describe(model) == (
        "one unit of 40 parameters (not split: no layers of min_num_params=100,000 or more parameters "
        "repeat in a container)"
    )


def test_the_choice_is_told_with_classes_sizes_and_reason() -> None:
    model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(3)))
    assert choose_units(model).describe(model) == (
        "3 units (3 x Linear; the largest has 160,400 parameters) and the root, 481,200 "
        "parameters in all (they repeat in a container and have at least 100,000 parameters each)"
    )


def test_layers_tied_to_the_outside_are_left_to_the_root() -> None:
    model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(3)))
    model[2].weight = model[0].weight
    assert _names(model) == ["1"]
    assert tied_across(model, model[0]) == ["2.weight"]
    model[1].weight = model[0].weight
    assert choose_units(model).reason == "every repeated layer shares parameters with modules outside of it"


def test_children_come_before_parents() -> None:
    model = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2))
    names = _names(model, policy=[nn.TransformerEncoderLayer, nn.TransformerEncoder])
    assert names == ["0.layers.0", "0.layers.1", "0"]


def test_a_minimum_size_applies_to_policies_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(40, 40))
    assert _names(model, policy=nn.Linear, min_num_params=100) == ["1"]
    with pytest.raises(OptionError, match="matches no module of Sequential with at least 9,999 parameters"):
        choose_units(model, policy=nn.Linear, min_num_params=9999)


def test_layer_classes_are_checked() -> None:
    assert nn.Linear(2, 2) in Layers(nn.Linear, option="x")
    assert nn.Linear(2, 2) in Layers([nn.Conv1d, nn.Linear], option="x")
    assert nn.Linear(2, 2) not in Layers(None, option="x")
    with pytest.raises(OptionError, match="x holds <class 'int'>, which is not a module class"):
        Layers([int], option="x")


class Block(nn.Linear):
    """A layer that YAML names."""


class SmallBlock(Block):
    """It counts as its base."""


@pytest.mark.parametrize("name", ["Block", f"{__name__}.Block"])
def test_layer_classes_may_be_named(name: str) -> None:
    model = nn.Sequential(Block(2, 2), SmallBlock(2, 2), nn.Linear(2, 2))
    layers = Layers(name, option="x")
    layers.check(model)
    assert [module in layers for module in model] == [True, True, False]
    wanted = nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(8, 2))
    for known in ("Linear", "nn.Linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear"):
        Layers(known, option="x").check(wanted)
        assert wanted[0] in Layers(known, option="x")
    assert wanted[1] not in Layers("Layer", option="x")


def test_a_name_of_no_module_is_refused_with_the_nearest() -> None:
    model = nn.Sequential(Block(2, 2))
    with pytest.raises(OptionError, match=rf"names 'Blok', .* Did you mean '{__name__}\.Block'\?"):
        choose_units(model, policy="Blok")
    with pytest.raises(
        OptionError, match=r"names 'other\.Block', and no module of Sequential .* Did you mean"
    ):
        choose_units(model, policy=["other.Block"])
    with pytest.raises(OptionError, match=r"names 'Conv2d'.* a class that the model has: Block\."):
        Layers("Conv2d", option="x").check(model)
    assert _names(model, policy="Block") == ["0"]


class Mixture(nn.Module):
    """A block with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Model(nn.Module):
    """Blocks with experts inside, and experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
        self.listed = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))


LISTED = [f"listed.{i}.{j}" for i in range(2) for j in range(2)]


@pytest.mark.parametrize("by_choice", ["listed", ["listed"], nn.Sequential, "Sequential"])
def test_layers_of_by_choice_and_what_is_in_them_are_no_units(by_choice: object) -> None:
    assert sorted(_names(Model(), min_num_params=1)) == ["blocks.0", "blocks.1", *LISTED]
    assert _names(Model(), min_num_params=1, by_choice=by_choice) == ["blocks.0", "blocks.1"]
    assert _names(Model(), policy=[Mixture, nn.Linear], by_choice=by_choice)[-2:] == ["blocks.0", "blocks.1"]
    choice = choose_units(Model(), min_num_params=1, by_choice=[Mixture, "listed"])
    assert not choice.units
    assert choice.reason.endswith("layers of by_choice are no units")


def test_what_by_choice_names_must_exist() -> None:
    with pytest.raises(OptionError, match="by_choice names 'lsted', and no module of Model"):
        choose_units(Model(), by_choice=["lsted"])


def test_the_remedy_names_the_list_and_works() -> None:
    options = options_by_choice(Model(), LISTED)
    message = (
        "rank 0 came to the gather of listed.0.0; rank 1 came to the reduction of listed.1.1's gradients."
    )
    assert remedy_by_choice(options, message).endswith('pass by_choice=["listed"].')
    assert remedy_by_choice(options, "rank 0 came to the end of the step.") == ""
    assert options_by_choice(nn.Sequential(nn.Linear(2, 2)), ["0"]) == {"0": "Linear"}
