"""The inputs of a stored program besides the model: a program for another machine is never reused."""

import dataclasses

import pytest
import torch
from torch import nn

from nnx_core.machine.hardware import Hardware, profile
from nnx_nnscaler import compilation
from nnx_nnscaler.axes import Axes
from nnx_nnscaler.options import NnScalerOptions
from nnx_nnscaler.plan.cost import CostModel

UNIT_OF_TWO = Axes(None, None, None, None, None, 0, 2, 0, 1, 0, 1)
MEASURED = dataclasses.replace(profile("cpu"), origin="measured", bandwidth=1.23456789e9)


def kept_at(savedir, *, device="cpu", hardware=MEASURED):
    """The file of the program of one model, which is planned or used again."""
    options = NnScalerOptions(policy="tp", plan_ngpus=2, gen_savedir=str(savedir))
    module = nn.Linear(4, 4)
    compiler = compilation._compiler(
        module,
        options,
        compilation._Planned(UNIT_OF_TWO, options),
        torch.device(device),
        CostModel(hardware=hardware),
    )
    return compiler.compile(module, ((torch.ones(2, 4),), {}))[1]


@pytest.fixture
def limit(monkeypatch):
    """Sets the device memory that `_memory_limit` finds."""

    def set_limit(found):
        monkeypatch.setattr(compilation, "_memory_limit", lambda options, device: found)

    set_limit(80_000_000_000)
    return set_limit


def test_a_program_is_used_again_on_the_same_machine(tmp_path, limit):
    again = Hardware.of_json(MEASURED.to_json())  # as it is read from where measurements are kept
    assert kept_at(tmp_path) == kept_at(tmp_path, hardware=again)
    assert len(list(tmp_path.rglob("forward.py"))) == 1


def test_devices_with_less_memory_do_not_share_a_program(tmp_path, limit):
    first = kept_at(tmp_path)
    limit(40_000_000_000)
    assert kept_at(tmp_path) != first


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda"},
        {"hardware": dataclasses.replace(MEASURED, name="another device")},
        {"hardware": dataclasses.replace(MEASURED, bandwidth=2e9)},
    ],
)
def test_other_devices_and_other_figures_do_not_share_a_program(tmp_path, limit, other):
    assert kept_at(tmp_path) != kept_at(tmp_path, **other)
