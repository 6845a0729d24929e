"""Use the private names of torch that this package needs, and names that differ between versions.

`PRIVATE_NAMES` lists them with the torch versions that have them; tests/test_private_names.py checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.export import ExportedProgram
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._sympy.printers import PythonPrinter

from nnx_base._torch_compat import IMPORT, Private

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "PythonPrinter",
    "checkpoints_replaced",
    "free_fake_inputs",
    "has_any_global_hook",
    "lstm_replaced",
    "saves_inputs_only",
    "safe_softmax",
    "schedule_actions",
    "stage_backward_input",
    "stage_backward_weight",
    "unflatten_dense_tensors",
]

PRIVATE_NAMES = {
    "torch._C._nn.unflatten_dense_tensors": Private(IMPORT),
    "torch._decomp.decompositions": Private("a trace raises ImportError", last="2.12"),
    "torch._decomp.decompositions.one_layer_lstm": Private("a trace raises AttributeError", last="2.12"),
    "torch._ops.HigherOrderOperator": Private(IMPORT),
    "torch._ops.OpOverload": Private(IMPORT),
    "torch._ops.OpOverloadPacket": Private(IMPORT),
    "torch._subclasses.fake_tensor.FakeTensor": Private(IMPORT),
    "torch.distributed.pipelining._backward.stage_backward_input": Private(IMPORT),
    "torch.distributed.pipelining._backward.stage_backward_weight": Private(IMPORT),
    "torch.nn.modules.module._has_any_global_hook": Private(IMPORT),
    "torch.ops.aten._safe_softmax": Private(IMPORT),
    "torch.utils._sympy.printers.PythonPrinter": Private(IMPORT),
    "torch.utils.checkpoint._NoopSaveInputs": Private("nothing: no checkpoint calls it", last="2.11"),
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": Private(
        "tracing raises AttributeError"
    ),
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl": Private(
        "the name without _impl is taken", first="2.14"
    ),
}
"""The private names of torch that this module uses, each with its effect if torch lacks it."""

has_any_global_hook: Callable[[], bool] = _has_any_global_hook
"""A function that returns True if a hook is registered for all modules."""
safe_softmax: Any = torch.ops.aten._safe_softmax
"""A softmax that is 0 where all scores of a row are masked."""
unflatten_dense_tensors: Any = torch._C._nn.unflatten_dense_tensors
"""A function that returns views of a flat tensor, one for each given tensor."""


def schedule_actions(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """Return each rank's actions in one of torch's pipeline schedules, as ``("F", stage, microbatch)``.

    Raises:
        ValueError: The schedule refuses these numbers.
        AssertionError: The schedule refuses these numbers.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    def flat(action: Any) -> list[tuple[str, int, int]]:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            return []
        if action.sub_actions is not None:
            return [one for part in action.sub_actions for one in flat(part)]
        return [(action.computation_type.value, action.stage_index, action.microbatch_index)]

    # A schedule reads only these attributes of a stage when it makes its order.
    sizes = {"group_rank": 0, "group_size": ranks, "num_stages": ranks * stages_per_rank}
    stages: Any = [
        SimpleNamespace(**sizes, stage_index=number * ranks, submod=None, has_backward=True)
        for number in range(stages_per_rank)
    ]
    order: Any = get_schedule_class(schedule)(stages, microbatches)
    return [[one for action in order.pipeline_order[rank] for one in flat(action)] for rank in range(ranks)]


def free_fake_inputs(program: ExportedProgram) -> None:
    """Free the objects of a program's trace with the program, which torch would keep forever.

    The symbolic sizes refer to the fake inputs. These refer to the sizes from C++, where no collector looks.
    """
    for node in program.graph.nodes:
        value = node.meta.get("val")
        environment = value.fake_mode.shape_env if isinstance(value, FakeTensor) else None
        if environment is not None:
            environment.tracked_fakes = []
            return


def checkpoints_replaced(by: Callable[..., Any]) -> dict[str, Any]:
    """Return replacements for names of `torch.utils.checkpoint`, so that each checkpoint calls `by`.

    torch 2.14 calls ``_checkpoint_without_reentrant_generator_impl``. It keeps the name without ``_impl`` for
    other libraries, which torch 2.11 to 2.13 call. If torch has neither, this raises an error.
    """
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(module, "_checkpoint_without_reentrant_generator_impl"):
        name = "_checkpoint_without_reentrant_generator_impl"
    getattr(module, name)
    return {name: by, "CheckpointFunction": type("CheckpointFunction", (), {"apply": staticmethod(by)})}


def saves_inputs_only(cls: type) -> bool:
    """Return True if an autograd function is `_NoopSaveInputs`, in which torch 2.11 keeps inputs."""
    return cls.__module__ == "torch.utils.checkpoint" and cls.__qualname__ == "_NoopSaveInputs"


def lstm_replaced() -> tuple[Any, dict[str, Any]]:
    """Return a module of torch, and replacements for its names by which a trace gets an LSTM's shapes right.

    Without values, torch 2.11 and 2.12 give the hidden states of an LSTM one dim too many.
    """
    from torch._decomp import decompositions

    if torch.__version__ >= "2.13":  # TorchVersion compares by version, not by letters
        return decompositions, {}
    one_layer: Any = decompositions.one_layer_lstm

    def with_shapes(inp: Tensor, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        output, states = one_layer(inp, hidden, *args, **kwargs)
        return output, tuple(new.reshape(old.shape) for new, old in zip(states, hidden, strict=True))

    return decompositions, {"one_layer_lstm": with_shapes}
