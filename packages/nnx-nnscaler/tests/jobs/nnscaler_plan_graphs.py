"""Small handmade graphs and rules that test planning without tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnx_nnscaler.ir.graph import Graph, Input, Op, Ref, Size, TensorMeta
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.rules.rule import outputs_of, replicate


class GraphMaker:
    """Builds a graph operator by operator.

    Args:
        batch: Traced batch; the inputs' first dim is a symbol with that value.
    """

    def __init__(self, batch: int = 8, *, training: bool = True) -> None:
        self.batch = Size("B", batch)
        self.graph = Graph([], {}, {}, {}, {}, [], None, training=training)

    def input(self, name: str, *rest: int, differentiable: bool = False) -> Ref:
        meta = TensorMeta((self.batch, *rest), "float32", differentiable)
        self.graph.inputs.append(Input(name, meta))
        self.graph.metas[name] = meta
        self.graph.symbols["B"] = (name, 0)
        return Ref(name)

    def parameter(self, fqn: str, *shape: int, trains: bool = True) -> Ref:
        name = "p_" + fqn.replace(".", "_")
        self.graph.parameters[name] = fqn
        self.graph.metas[name] = TensorMeta(shape, "float32", differentiable=trains)
        return Ref(name)

    def op(self, name: str, target: str, args: Sequence[Any], shape: Sequence[Any], module: str = "") -> Ref:
        op = Op(name, target, tuple(args), {}, None, module, f"model.py:{len(self.graph.ops) + 1}: {name}")
        followed = any(self.graph.meta(operand).differentiable for operand in op.operands())
        op.output = TensorMeta(tuple(shape), "float32", followed)
        self.graph.ops.append(op)
        return Ref(name)

    def linear(self, name: str, x: Ref, outputs: int, module: str = "") -> Ref:
        shape = self.graph.meta(x.name).shape
        weight = self.parameter(f"{module or name}.weight", outputs, int(shape[-1]))
        return self.op(name, "aten.linear.default", (x, weight), (*shape[:-1], outputs), module or name)

    def relu(self, name: str, x: Ref, module: str = "") -> Ref:
        return self.op(name, "aten.relu.default", (x,), self.graph.meta(x.name).shape, module)

    def add(self, name: str, x: Ref, y: Ref, module: str = "") -> Ref:
        return self.op(name, "aten.add.Tensor", (x, y), self.graph.meta(x.name).shape, module)

    def mean(self, name: str, x: Ref, module: str = "") -> Ref:
        return self.op(name, "aten.mean.default", (x,), (), module)

    def finish(self, *outputs: Ref) -> Graph:
        self.graph.outputs = outputs[0] if len(outputs) == 1 else list(outputs)
        return self.graph


def strategies_of(op: Op, graph: Graph, size: int) -> list[Strategy]:
    """Return the strategies of the few operators in these graphs."""
    metas = [graph.meta(name) for name in op.operands()]
    found = [replicate(op)]
    if op.target == "aten.linear.default":
        last = len(metas[0].shape) - 1
        found += [Strategy("batch", (S(d), R), (S(d),)) for d in range(last)]
        found += [Strategy("column", (R, S(0)), (S(last),)), Strategy("row", (S(last), S(1)), (P,))]
    elif op.target == "aten.mean.default":
        found += [Strategy("batch", (S(0),), (P,))]
    else:
        found += [
            Strategy(f"dim{d}", (S(d),) * len(metas), (S(d),)) for d in range(len(outputs_of(op)[0].shape))
        ]
        if op.target == "aten.add.Tensor":
            found.append(Strategy("partial", (P, P), (P,)))
    return [strategy for strategy in found if _fits(op, graph, strategy, size)]


def _fits(op: Op, graph: Graph, strategy: Strategy, size: int) -> bool:
    metas = [*(graph.meta(name) for name in op.operands()), *outputs_of(op)]
    placed = zip(metas, (*strategy.inputs, *strategy.outputs), strict=True)
    return all(placement.fits(meta.hints, size) for meta, placement in placed)


def mlp(batch: int = 8, width: int = 64, hidden: int = 256) -> Graph:
    """Two linear layers and a loss."""
    make = GraphMaker(batch)
    x = make.input("x", width)
    up = make.linear("up", x, hidden)
    down = make.linear("down", make.relu("act", up), width)
    return make.finish(make.mean("loss", down))


def stack(layers: int, batch: int = 8, width: int = 64) -> Graph:
    """Residual blocks in a list, as transformers have them."""
    make = GraphMaker(batch)
    x = make.input("x", 16, width)
    for layer in range(layers):
        block = f"blocks.{layer}"
        up = make.linear(f"up{layer}", x, 4 * width, f"{block}.up")
        down = make.linear(f"down{layer}", make.relu(f"act{layer}", up, block), width, f"{block}.down")
        x = make.add(f"sum{layer}", x, down, block)
    return make.finish(make.mean("loss", x))


def stack_plan_text() -> str:
    """A plan as it is written."""
    from nnx_nnscaler.ir.program_plan import plan_to_text
    from nnx_nnscaler.plan.planning import plan_program

    return plan_to_text(plan_program(stack(3), size=2, policy="autodist", strategies_of=strategies_of))
