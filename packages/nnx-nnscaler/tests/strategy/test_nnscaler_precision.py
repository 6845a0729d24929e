"""`NnScalerPrecision` behaves like Lightning's own plugins, and accepts a scaler."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn

from nnx_core.errors import OptionError
from nnx_nnscaler import NnScalerPrecision
from nnx_nnscaler.strategy import PRECISIONS

DTYPES = {
    "32-true": (torch.float32, torch.float32),
    "16-true": (torch.float16, torch.float16),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_and_computation_have_the_dtypes_that_the_precision_says(precision):
    plugin = NnScalerPrecision(precision)
    assert isinstance(plugin, NnScalerPrecision) and isinstance(plugin, Precision)
    linear = plugin.convert_module(nn.Linear(4, 4))
    with plugin.forward_context():
        output = linear(plugin.convert_input(torch.ones(2, 4)))
        made = torch.zeros(1)
    assert (linear.weight.dtype, output.dtype) == DTYPES[precision]
    assert made.dtype == DTYPES[precision][0]
    assert torch.get_default_dtype() == torch.float32


def test_only_16_mixed_has_a_scaler_unless_it_is_given_one():
    assert {name for name in PRECISIONS if NnScalerPrecision(name).scaler is not None} == {"16-mixed"}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for precision in ("32-true", "16-true", "16-mixed"):
        plugin = NnScalerPrecision(precision, scaler)
        assert plugin.scaler is scaler
        assert plugin.state_dict()["scale"] == 8.0
    assert isinstance(NnScalerPrecision("16-true"), HalfPrecision)
    assert isinstance(NnScalerPrecision("16-mixed"), MixedPrecision)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("16",), r"precision='16' is not allowed.*16-true"),
        (("64-true",), r"precision='64-true' is not allowed"),
        (("bf16-mixed", torch.amp.GradScaler("cpu")), r"bfloat16 has the range of float32.*Leave the scaler"),
    ],
)
def test_a_precision_that_is_not_offered_is_refused(arguments, message):
    with pytest.raises(OptionError, match=message):
        NnScalerPrecision(*arguments)
