"""Check a program before its first step, against the user's own forward on the traced inputs.

The ranks are threads of this process, so the check needs a copy of the model for each rank of a unit. It is
for small models on CPU. It never changes the module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nnx_core.errors import PlanError, UnsupportedError
from nnx_nnscaler.codegen.emit import Program, emit
from nnx_nnscaler.ir.graph import Graph, Op, Ref, TensorMeta
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.parity import _tensors, compare, run_ranks
from nnx_nnscaler.plan.pipeline_plan import AnyPlan
from nnx_nnscaler.plan.planning import replicated_plan

__all__ = [
    "SMALL",
    "checked_if_small",
    "checked_up_to",
    "self_check",
]


log = logging.getLogger("nnx.nnscaler")

SMALL = 1_000_000
"""Maximum elements of parameters and results, over all ranks of a unit, for a check by default.

The check then takes a tenth of a second.
"""
_TOLERANCE = 1e-3


def self_check(
    root: nn.Module,
    graph: Graph,
    plan: AnyPlan,
    call: tuple[Any, Any],
    program: Program | None = None,
) -> None:
    """Compare a program with the module on one call, outputs and gradients.

    Programs that cannot be compared pass, see `_hindrance`.

    Args:
        root: The module.
        graph: The traced graph.
        plan: The plan of the program.
        call: The arguments of the forward.
        program: The program; by default the one generated for the plan.

    Raises:
        PlanError: They differ. The message names the first operator with another result.
    """
    if (plan.size == 1 and program is None) or _hindrance(root, graph, call):
        return
    borrowed = cast(nn.Module, _Borrowed(root))
    found = compare(borrowed, graph, plan, call, program=program)
    if found.error <= _TOLERANCE:
        return
    first = _first_difference(borrowed, graph, plan, call) if isinstance(plan, ProgramPlan) else None
    where = f"{first.name} ({first.target}) of {first.module or 'the root'}, {first.source}" if first else ""
    raise PlanError(
        f"the compiled program of {type(root).__name__} (policy {plan.policy!r}, {plan.size} ranks) does not "
        f"match the eager forward: {found.worst} differs by {found.error:.1e}"
        f"{f'. First operator that differs: {where}' if where else ''}.",
        remedy="Please report it with the model. Until then use policy='dp', or verify=False to run it.",
    )


def checked_up_to(elements: int | None) -> Callable[..., None]:
    """Return a check for models up to a number of elements over all ranks; None for any number.

    The user requested a check of any number, so that one logs why it does nothing.

    Args:
        elements: The maximum number of elements of parameters, and of the results of all operators for the
            traced sample.
    """

    def check(
        root: nn.Module, graph: Graph, plan: AnyPlan, call: Any, program: Program | None = None
    ) -> None:
        hindrance = _hindrance(root, graph, call)
        if elements is None and hindrance:
            name = type(root).__name__
            log.warning("verify=True: skip the check of %s (%s)", name, hindrance)
        if elements is None or _elements(root, graph) * plan.size <= elements:
            self_check(root, graph, plan, call, program)

    return check


def checked_if_small(root: nn.Module, graph: Graph, plan: ProgramPlan, call: Any) -> None:
    """The default check: a small model with a wrong program falls back to eager.

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


def _hindrance(root: nn.Module, graph: Graph, call: Any) -> str:
    """Return the reason why a program cannot be compared; empty if it can."""
    tensors: list[Tensor] = [*root.parameters(), *root.buffers(), *_tensors(call)]
    device = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "")
    if device:
        return f"it is on {device}, and the comparison runs on CPU only"
    kinds = (torch.float16, torch.bfloat16)
    if torch.is_autocast_enabled("cpu") or any(tensor.dtype in kinds for tensor in tensors):
        return "it computes in half precision, in which correct results differ too"
    if graph.kept:
        return f"{next(iter(graph.kept))} falls back to eager"
    return ""


class _Borrowed:
    """A module's code with its own tensors, as far as a check needs it.

    A copy of the module itself could copy the objects that it refers to: the trainer, its data.
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
    """Return the first operator whose result differs under the plan from that of replicated operators."""
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
