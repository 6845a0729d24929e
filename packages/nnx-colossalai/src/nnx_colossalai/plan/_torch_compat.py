"""Every private name of torch that planning uses.

Checked against torch 2.11 and 2.13. Running a model on tensors without memory has no public entry point but
``torch.export``, which does not say what a backward keeps.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

__all__ = ["FakeTensorMode", "TorchDispatchMode", "flops_of", "tree_leaves", "tree_map"]


def flops_of(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating point operations of one call; 0 for operators that are not matrix products of some kind."""
    count = flop_registry.get(operator._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
