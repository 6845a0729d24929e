"""The choices that each policy leaves to the planner, by the resulting plans."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.nnscaler_plan_graphs import GraphMaker, mlp, stack, strategies_of
from nnx_core.errors import OptionError, PlanError, UnsupportedError
from nnx_nnscaler.ir.graph import Graph, Size, TensorMeta
from nnx_nnscaler.ir.placement import P, R, S
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.plan.policies import PolicyContext


def planned(graph: Graph, policy: Any, **more: Any) -> ProgramPlan:
    return plan_program(graph, size=2, policy=policy, strategies_of=strategies_of, **more)


def names(plan: ProgramPlan) -> dict[str, str]:
    return {name: strategy.name for name, strategy in plan.choices.items()}


def test_data_splits_the_batch_of_every_operator_and_synchronizes_every_parameter() -> None:
    plan = planned(mlp(), "data")
    assert names(plan) == {"up": "batch", "act": "dim0", "down": "batch", "loss": "batch"}
    assert set(plan.stored.values()) == {R}
    assert plan.synchronized == {"up.weight", "down.weight"}
    assert plan.divisible == (("B", 2),)


def test_zero_splits_the_batch_and_stores_every_parameter_in_parts() -> None:
    plan = planned(mlp(), "zero")
    assert names(plan) == names(planned(mlp(), "data"))
    assert set(plan.stored.values()) == {S(0)}
    assert not plan.synchronized


def test_zero_leaves_a_parameter_whole_that_cannot_be_cut_evenly() -> None:
    plan = planned(mlp(width=63, hidden=65), "zero")
    assert set(plan.stored.values()) == {R}
    assert plan.synchronized == {"up.weight", "down.weight"}


def test_tp_splits_every_weight_and_never_the_batch() -> None:
    plan = planned(stack(2), "tp")
    assert plan.stored == {
        **{f"blocks.{i}.up.weight": S(0) for i in range(2)},
        **{f"blocks.{i}.down.weight": S(1) for i in range(2)},
    }
    assert plan.divisible == ()
    assert {names(plan)[name] for name in ("up0", "up1", "down0", "down1")} == {"column", "row"}


def test_a_graph_with_a_fixed_batch_is_split_along_the_first_dim() -> None:
    graph = mlp()
    fix_batch(graph)
    assert names(planned(graph, "data"))["up"] == "batch"
    assert names(planned(graph, "tp"))["loss"] == "replicate"


def fix_batch(graph: Graph) -> None:
    def fixed(meta: TensorMeta) -> TensorMeta:
        return TensorMeta(meta.hints, meta.dtype, meta.differentiable)

    graph.symbols.clear()
    graph.metas = {name: fixed(meta) for name, meta in graph.metas.items()}
    for op in graph.ops:
        assert isinstance(op.output, TensorMeta)
        op.output = fixed(op.output)


def test_dp_is_for_units_of_one_rank_only() -> None:
    with pytest.raises(
        PlanError, match=r"policy 'dp' splits nothing, but a unit has 2 ranks.*Leave plan_ngpus at 1"
    ):
        planned(mlp(), "dp")
    plan = plan_program(mlp(), size=1, policy="dp", strategies_of=strategies_of)
    assert set(names(plan).values()) == {"replicate"}
    assert not plan.synchronized


def test_a_policy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no policy 'fastest'.*Use one of dp, data, zero, tp, autodist"):
        planned(mlp(), "fastest")


@pytest.mark.parametrize("policy", ["pp", "hybrid"])
def test_a_pipeline_is_not_one_program(policy: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{policy!r} plans a pipeline, which is not one program"):
        planned(mlp(), policy)


def test_a_callable_pins_what_it_wants_and_leaves_the_rest() -> None:
    def rows_first(context: PolicyContext) -> None:
        assert context.pin("up", "row") == 1

    plan = planned(mlp(), rows_first)
    assert plan.policy == "rows_first"
    assert names(plan)["up"] == "row"
    assert plan.choices["up"].outputs == (P,)


def test_a_callable_may_return_strategies_or_their_names() -> None:
    def some(context: PolicyContext) -> dict[str, Any]:
        row = next(one for one in context.strategies["down"] if one.name == "row")
        return {"up": "column", "down": row}

    assert {names(planned(mlp(), some))[name] for name in ("up", "down")} == {"column", "row"}


def test_a_pattern_reaches_all_layers_and_one_name_only_one() -> None:
    pinned = names(planned(stack(3), lambda context: context.pin("blocks.*.up", "row") and None))
    assert [pinned[f"up{layer}"] for layer in range(3)] == ["row"] * 3
    pinned = names(planned(stack(3), "data", constraints={"blocks.1.up.weight": "batch"}))
    assert pinned["up1"] == "batch"


def test_a_callable_may_say_how_parameters_are_stored() -> None:
    plan = planned(mlp(), lambda context: context.store("*.weight", S(1)) and None)
    assert set(plan.stored.values()) == {S(1)}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda c: c.pin("nothing.*", "column"), r"no operator belongs to 'nothing.\*'.*such as down, up"),
        (lambda c: c.pin("up", "diagonal"), r"no operator of 'up' can be split as 'diagonal' over 2 ranks"),
        (lambda c: c.store("bias", R), r"no parameter is called 'bias'.*such as up.weight"),
        (lambda c: c.store("up.weight", P), r"'up.weight' of shape \[256, 64\] cannot be stored P"),
        (lambda c: {"left": "row"}, "chooses for 'left', which is no operator of the graph"),
        (lambda c: {"up": "diagonal"}, "chooses 'diagonal' for 'up', which cannot be split so.*replicate"),
    ],
)  # fmt: skip
def test_a_policy_that_asks_for_the_impossible_is_told(policy: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(mlp(), policy)


def test_choices_that_contradict_each_other_are_told() -> None:
    """Partial sums are requested of a value that cannot be one."""
    make = GraphMaker()
    x = make.input("x", 16)
    total = make.add("total", x, make.linear("lin", x, 16))
    with pytest.raises(PlanError, match="policy 'sums' and its constraints contradict each other"):
        planned(make.finish(total), sums)


def sums(context: PolicyContext) -> dict[str, str]:
    return {"total": "partial"}


def test_a_frozen_parameter_is_never_synchronized() -> None:
    make = GraphMaker()
    x = make.input("x", 16, differentiable=True)
    weight = make.parameter("frozen.weight", 16, 16, trains=False)
    out = make.op("lin", "aten.linear.default", (x, weight), (make.batch, 16), "frozen")
    plan = planned(make.finish(make.mean("loss", out)), "data")
    assert plan.stored == {"frozen.weight": R}
    assert not plan.synchronized


def test_what_must_divide_is_recorded_for_every_symbol() -> None:
    make = GraphMaker(batch=8)
    x = make.input("x", 16, 32)
    flat = make.op("flat", "aten.view.default", (x, [-1, 32]), (Size("16*B", 128), 32))
    plan = planned(make.finish(make.mean("loss", make.linear("lin", flat, 8))), "data")
    assert plan.divisible == (("16*B", 2), ("B", 2))
