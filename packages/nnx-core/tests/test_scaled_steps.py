"""A scaled step of a fused optimizer whose parameters are on another device than the overflow flag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnx_core.optimizers import gradients
from nnx_core.optimizers.gradients import ParallelGradScaler


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_infinite", [False, True])
def test_a_fused_optimizer_in_host_memory_is_not_left_to_read_a_flag_of_the_card(
    device: str, is_infinite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "unscale_gradients", lambda *_: torch.tensor(float(is_infinite)))
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], fused=True)
    flags: list[Tensor | None] = []

    def look(optimizer: Any, *_: Any) -> None:
        flags.append(getattr(optimizer, "found_inf", None))

    optimizer.register_step_pre_hook(look)
    scaler = ParallelGradScaler(
        lambda _: [], torch.device("cpu"), replaces=torch.amp.GradScaler("cpu", init_scale=2.0)
    )
    scaler._nnx_device = torch.device(device)  # of the gradients; there is no card to have them on
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)

    steps_by_flag = device == "cpu"
    assert len(flags) == int(steps_by_flag or not is_infinite)
    assert all((flag is not None) == steps_by_flag for flag in flags)
    assert torch.equal(weight.detach(), torch.ones(3)) == is_infinite
    assert optimizer._step_supports_amp_scaling
