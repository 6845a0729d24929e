"""Bad options are refused before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from nnx_core.errors import OptionError
from nnx_fsdp.options import FSDPOptions, MixedPrecision


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_num_params": -1}, "min_num_params=-1 is negative. Pass a number of parameters."),
        (
            {"auto_wrap_policy": 3},
            "auto_wrap_policy holds 3, which is not a module class. Pass a subclass of",
        ),
        ({"auto_wrap_policy": ["Block", int]}, "auto_wrap_policy holds <class 'int'>, which is not a module"),
        ({"auto_wrap_policy": "Block, Head"}, "auto_wrap_policy holds 'Block, Head', which is not a module"),
        ({"activation_checkpointing": True}, "activation_checkpointing holds True, which is not a module"),
        ({"activation_checkpointing": len}, "activation_checkpointing holds <built-in function len>"),
        ({"replicate_size": 0}, "replicate_size=0 is not positive. Pass a divisor of the world size."),
        (
            {"auto_wrap": False, "auto_wrap_policy": "Block"},
            "auto_wrap_policy has no effect with manual wrapping.",
        ),
    ],
)
def test_contradictions_and_bad_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        FSDPOptions(**options)
    assert str(caught.value).startswith(message)


def test_a_dtype_that_does_not_exist_is_refused_with_the_ones_that_do() -> None:
    with pytest.raises(OptionError, match=r"param_dtype='bf16' is not allowed\. Use one of None, 'float32'"):
        MixedPrecision(param_dtype="bf16")


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("min_num_params", "many", "Pass int."),
        ("cpu_offload", "yes", "Pass bool."),
        ("compile", "inductor", "Pass bool or Mapping."),
        ("mixed_precision", "bf16", "Pass MixedPrecision."),
    ],
)
def test_values_of_another_type_are_refused(option: str, value: Any, remedy: str) -> None:
    with pytest.raises(OptionError) as caught:
        FSDPOptions(**{option: value})
    assert str(caught.value) == f"{option}={value!r} is of type str. {remedy}"
