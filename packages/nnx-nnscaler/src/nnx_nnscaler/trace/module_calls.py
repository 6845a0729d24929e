"""Calls of submodules that stay whole as operators of a graph, and their results taken apart by getitems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from nnx_nnscaler.ir import Argument, Make, Op, Ref, TensorMeta
from nnx_nnscaler.trace.blame import source_of
from nnx_nnscaler.trace.steps import Step, is_float, module_of, notes_of
from nnx_nnscaler.trace.structure import Slot, map_slots

if TYPE_CHECKING:
    from nnx_nnscaler.trace.build import Builder

__all__ = ["add_module_call"]


def add_module_call(builder: Builder, step: Step) -> None:
    """Add the call of a submodule that a step stands for."""
    tensors, _, key = step.args
    call = builder.exported.calls[key]
    operands = [builder.argument(node) for node in tensors]
    args = map_slots(call.args, lambda part: builder.output(part, operands))
    kwargs = map_slots(call.kwargs, lambda part: builder.output(part, operands))
    values = list(step.value[:-1])
    found: list[Argument] = [None] * len(step.value)
    builder.several[step.node] = found
    structure = call.result.structure
    context = ", ".join(
        filter(None, ("torch.no_grad()" if step.frozen and builder.gradients else "", step.context))
    )
    name = builder.names.new(call.fqn.rpartition(".")[2])
    output = _meta_of(builder, structure, values, step)
    source = source_of(notes_of(step))
    builder.graph.ops.append(Op(name, "module", tuple(args), dict(kwargs), output, call.fqn, source, context))
    _take(builder, structure, Ref(name), values, found, step)


def _meta_of(builder: Builder, structure: Any, values: list[Tensor], step: Step) -> Any:
    """Meta of a tensor, a tuple of those of a container's parts, or None."""
    if isinstance(structure, Slot):
        tensor = values[structure.index]
        return builder.sizes.meta(tensor, differentiable=is_float(tensor) and not step.frozen)
    metas = [_meta_of(builder, part, values, step) for _, part in _parts(structure)]
    return tuple(meta if isinstance(meta, TensorMeta) else None for meta in metas) if metas else None


def _take(
    builder: Builder, structure: Any, value: Ref, values: list[Tensor], found: list[Argument], step: Step
) -> None:
    """Add getitems down to every tensor of a result."""
    if isinstance(structure, Slot):
        found[structure.index] = value
        builder.differentiable |= {value.name} if builder.graph.meta(value.name).differentiable else set()
        return
    for key, part in _parts(structure):
        if not isinstance(part, Slot) and not _parts(part):
            continue
        name = builder.names.new(f"{value.name}_{key}")
        output = _meta_of(builder, part, values, step)
        builder.graph.ops.append(Op(name, "getitem", (value, key), {}, output, module_of(step.node)))
        _take(builder, part, Ref(name), values, found, step)


def _parts(structure: Any) -> list[tuple[Any, Any]]:
    """Keys and parts of a container."""
    if isinstance(structure, (list, tuple)):
        return list(enumerate(structure))
    fields = structure.fields if isinstance(structure, Make) else structure
    return list(fields.items()) if isinstance(fields, dict) else []
