"""A check of a program before its first step: against the user's own forward, on the traced inputs.

The ranks are threads of this process, so the check needs as many copies of the model as a unit has ranks; it
is for small models on CPU. It never changes the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nnx.errors import PlanError, UnsupportedError
from nnx_nnscaler.codegen.emit import emit
from nnx_nnscaler.codegen.verify import compare, replicated_plan, run_ranks
from nnx_nnscaler.ir import Graph, Op, Ref, TensorMeta
from nnx_nnscaler.plan.program_plan import ProgramPlan

__all__ = ["SMALL", "checked_if_small", "checked_up_to", "self_check"]

SMALL = 1_000_000
"""Elements of parameters and results, over all ranks of a unit, up to which a model is checked unless told.

That takes a tenth of a second.
"""
_TOLERANCE = 1e-3


def self_check(root: nn.Module, graph: Graph, plan: ProgramPlan, call: tuple[Any, Any]) -> None:
    """Compare a program with the module on one call, outputs and gradients.

    What it cannot judge passes: submodules that run whole, other devices than the CPU, half precision.

    Raises:
        PlanError: They differ; the message names the first operator whose result does.
    """
    if plan.size == 1 or graph.kept or not _can_be_checked(root):
        return
    borrowed = cast(nn.Module, _Borrowed(root))
    found = compare(borrowed, graph, plan, call)
    if found.error <= _TOLERANCE:
        return
    first = _first_difference(borrowed, graph, plan, call)
    where = f"{first.name} ({first.target}) of {first.module or 'the root'}, {first.source}" if first else ""
    raise PlanError(
        f"the program of {type(root).__name__} for policy {plan.policy!r} on {plan.size} ranks computes "
        f"something else than its forward: {found.worst} differs by {found.error:.1e}"
        f"{f', and the first operator whose result differs is {where}' if where else ''}.",
        remedy="Please report it with the model; meanwhile use policy='dp', or verify=False to run it.",
    )


def checked_up_to(elements: int | None) -> Callable[[nn.Module, Graph, ProgramPlan, Any], None]:
    """The check for models of at most that many elements over all ranks; None is any number.

    Args:
        elements: Of parameters, and of the results of all operators for the traced sample.
    """

    def check(root: nn.Module, graph: Graph, plan: ProgramPlan, call: Any) -> None:
        if elements is None or _elements(root, graph) * plan.size <= elements:
            self_check(root, graph, plan, call)

    return check


def checked_if_small(root: nn.Module, graph: Graph, plan: ProgramPlan, call: Any) -> None:
    """What is done unless told: a small model whose program is wrong runs whole instead.

    Raises:
        UnsupportedError: The program is wrong.
    """
    try:
        checked_up_to(SMALL)(root, graph, plan, call)
    except PlanError as error:
        raise UnsupportedError(error.message, remedy=error.remedy) from error


def _elements(root: nn.Module, graph: Graph) -> int:
    metas = [op.output for op in graph.ops if isinstance(op.output, TensorMeta)]
    return sum(p.numel() for p in root.parameters()) + sum(math.prod(meta.hints) for meta in metas)


def _can_be_checked(root: nn.Module) -> bool:
    tensors: list[Tensor] = [*root.parameters(), *root.buffers()]
    kinds = (torch.float16, torch.bfloat16)
    if torch.is_autocast_enabled("cpu"):
        return False
    return all(tensor.device.type == "cpu" and tensor.dtype not in kinds for tensor in tensors)


class _Borrowed:
    """A module's code with tensors of its own, as far as a check needs it.

    Copying the module itself could copy whatever it refers to: the trainer, its data.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        clones = {
            id(parameter): nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for parameter in root.parameters()
        }
        named = root.named_parameters(remove_duplicate=False)
        self._parameters = {name: clones[id(parameter)] for name, parameter in named}
        self._buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Borrowed:
        return _Borrowed(self._root)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._root, self._parameters | self._buffers, args, kwargs)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._parameters.values()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for name, parameter in self._parameters.items():
            if not (remove_duplicate and id(parameter) in seen):
                yield name, parameter
            seen.add(id(parameter))

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        yield from self._buffers.items()


def _first_difference(module: nn.Module, graph: Graph, plan: ProgramPlan, call: tuple[Any, Any]) -> Op | None:
    """The first operator whose result is another one under the plan than where every rank does everything."""
    ops = [
        op for op in graph.ops if isinstance(op.output, TensorMeta) and op.output.dtype.startswith("float")
    ]
    shown = replace(graph, outputs=[Ref(op.name) for op in ops])
    whole = replicated_plan(graph, plan.size)
    expected, found = (
        run_ranks(emit(shown, made), shown, made, module, call)[0].outputs for made in (whole, plan)
    )
    for op, one, other in zip(ops, expected, found, strict=True):
        scale = float(one.detach().abs().max()) if one.numel() else 0.0
        if one.numel() and float((one - other).detach().abs().max()) > _TOLERANCE * max(scale, 1e-6):
            return op
    return None
