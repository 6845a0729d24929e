"""Steps of optimizers in user code outside of Trainer's control."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.optim import SGD

from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.own_optimizers import OwnOptimizers


def test_a_step_with_gradients_that_no_engine_reduces_is_refused_until_the_engine_is_freed() -> None:
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    watching = OwnOptimizers(layer, list, engine="the engine")
    with pytest.raises(UnsupportedError, match="SGD steps weight, which no optimizer of"):
        SGD(layer.parameters(), lr=0.1).step()
    del watching
    gc.collect()
    SGD(layer.parameters(), lr=0.1).step()
