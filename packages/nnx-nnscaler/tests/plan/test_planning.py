"""Plans within memory and for given layouts are consistent."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jobs.nnscaler_plan_graphs import GraphMaker, mlp, stack, stack_plan_text, strategies_of
from nnx_core.errors import PlanError
from nnx_core.machine.hardware import profile
from nnx_nnscaler.ir.graph import Graph, Op, Ref, Size, TensorMeta
from nnx_nnscaler.ir.placement import R, S, Strategy, Use, conversion, uses_of
from nnx_nnscaler.ir.program_plan import ProgramPlan
from nnx_nnscaler.parity import check_parity
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.mesh import plan_mesh
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.rules.rule import replicate

BIG = mlp(4096, 64, 256)
"""Its fastest plan splits the batch and keeps the parameters whole."""


def planned(graph: Graph, policy: str = "autodist", **more: object) -> ProgramPlan:
    return plan_program(graph, size=2, policy=policy, strategies_of=strategies_of, **more)  # type: ignore[arg-type]


def test_a_limit_that_nothing_reaches_changes_nothing() -> None:
    free = planned(BIG)
    assert planned(BIG, memory_limit=free.prediction.memory) == free


def test_a_limit_is_kept_and_costs_time() -> None:
    graph = mlp(64, 256, 1024)
    free = planned(graph, costs=CostModel(hardware=profile("h100-nvlink")))
    whole = planned(graph, "data")
    limit = int(whole.prediction.memory * 0.7)
    limited = planned(graph, memory_limit=limit)
    assert limited.prediction.memory <= limit < whole.prediction.memory
    assert limited.prediction.time >= planned(graph).prediction.time
    assert free.prediction.time > 0


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("share", [0.75, 0.8, 0.9, 1.0])
def test_every_limit_between_least_and_most_is_met(share: float) -> None:
    graph = stack(4, batch=32)
    most = planned(graph, "data").prediction.memory
    limit = int(share * most)
    assert planned(graph, memory_limit=limit).prediction.memory <= limit


def test_what_is_missing_is_said_in_bytes_with_what_helps() -> None:
    with pytest.raises(PlanError) as caught:
        planned(BIG, "data", memory_limit=1000, units=2)
    found = re.fullmatch(
        r"no plan of policy 'data' fits into 1000 bytes on each of 2 ranks: (\d+) bytes \(.* MiB\) are "
        r"missing, the smallest plan found takes .* MiB\. What helps: more ranks for each unit "
        r"\(plan_ngpus, now 2\), use_zero=True, policy 'autodist', activation checkpointing \(recompute\) "
        r"or a smaller batch\.",
        str(caught.value),
    )
    assert found, str(caught.value)
    enough = int(found[1]) + 1000
    assert planned(BIG, "data", memory_limit=enough, units=2).prediction.memory == enough


def test_zero_over_the_units_saves_memory() -> None:
    whole, parts = (planned(BIG, units=8, zero=zero).prediction for zero in (False, True))
    assert parts.memory < whole.memory


def test_a_further_program_keeps_the_layout_that_exists() -> None:
    stored = {"up.weight": S(1), "down.weight": R}
    plan = planned(mlp(), stored=stored, synchronized={"down.weight"})
    assert (plan.stored, plan.synchronized) == (stored, {"down.weight"})
    evaluating = mlp()
    evaluating.training = False
    assert planned(evaluating, "tp", stored=stored, synchronized={"down.weight"}).stored == stored


def test_a_parameter_that_the_first_program_did_not_have_is_whole() -> None:
    assert planned(mlp(), stored={}).stored == {"up.weight": R, "down.weight": R}


def test_evaluation_costs_no_backward_pass() -> None:
    train, evaluate = mlp(4096), mlp(4096)
    evaluate.training = False
    assert planned(evaluate, "data").prediction.time < planned(train, "data").prediction.time / 2


def test_what_writes_into_a_value_gets_the_value_itself() -> None:
    """A converted copy would be changed in its place."""
    make = GraphMaker(8)
    x = make.input("x", 64)
    make.graph.buffers["b_seen"] = "seen"
    make.graph.metas["b_seen"] = TensorMeta((64,), "float32")
    hidden = make.linear("lin", x, 64)
    first = make.op("count", "aten.add_.Tensor", (Ref("b_seen"), 1), (64,))

    def rules(op: Op, graph: Graph, size: int) -> list[Strategy]:
        if op.name == "count":
            return [Strategy("dim0", (S(0),), (S(0),)), Strategy("replicate", (R,), (R,))]
        return strategies_of(op, graph, size)

    plan = plan_program(make.finish(hidden, first), size=2, policy="autodist", strategies_of=rules)
    assert plan.choices["count"].name == "replicate"


def test_results_of_an_operator_with_several_come_as_it_makes_them() -> None:
    make = GraphMaker(8)
    hidden = make.linear("lin", make.input("x", 64), 96)
    part = TensorMeta((make.batch, 32), "float32", True)
    ops = make.graph.ops
    ops.append(Op("split", "aten.split.Tensor", (hidden, 32, 1), {}, (part, None, part)))
    ops += [Op(f"part{i}", "getitem", (Ref("split"), i), {}, part) for i in (0, 2)]
    picks = [Ref("part0"), Ref("part2")]

    def rules(op: Op, graph: Graph, size: int) -> list[Strategy]:
        if op.name == "split":
            return [Strategy("parts", (S(1, groups=3),), (S(1), R))]
        return strategies_of(op, graph, size)

    plan = plan_program(make.finish(*picks), size=2, policy="autodist", strategies_of=rules)
    assert plan.choices["part0"] == Strategy("getitem", (S(1),), (S(1),))
    assert plan.choices["part2"] == Strategy("getitem", (R,), (R,))
    assert list(plan.choices) == [op.name for op in make.graph.ops]


def test_a_submodule_kept_whole_may_return_anything_nested() -> None:
    """A dict, a tuple with a tuple inside, one tensor: all of it is replicated, for any consumer."""
    make = GraphMaker(8)
    hidden = make.linear("lin", make.input("x", 64), 96)
    rows, number = TensorMeta((make.batch, 96), "float32", True), TensorMeta((), "float32", True)
    ops = make.graph.ops
    ops.append(Op("whole", "module", (hidden,), {}, (rows, None), "expert"))
    ops.append(Op("out", "getitem", (Ref("whole"), "out"), {}, rows))
    ops.append(Op("more", "getitem", (Ref("whole"), 1), {}, (None, number)))
    ops.append(Op("more_1", "getitem", (Ref("more"), 1), {}, number))

    def rules(op: Op, graph: Graph, size: int) -> list[Strategy]:
        return [replicate(op)] if op.target == "module" else strategies_of(op, graph, size)

    graph = make.finish(make.mean("loss", make.relu("act", Ref("out"))), Ref("more_1"))
    for limit in (None, 1 << 30):
        plan = plan_program(graph, size=2, policy="tp", strategies_of=rules, memory_limit=limit)
        assert list(plan.choices) == [op.name for op in ops]
        assert plan.choices["out"] == plan.choices["more_1"] == Strategy("getitem", (R,), (R,))
        assert plan.choices["lin"].name == "column"


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Chains and diamonds of linear, relu and add, of any sizes."""
    make = GraphMaker(draw(st.sampled_from([2, 3, 8])))
    width = draw(st.sampled_from([4, 6, 7, 8]))
    values = [make.input("x", width)]
    for index in range(draw(st.integers(1, 6))):
        kind, x = draw(st.sampled_from(["linear", "relu", "add"])), draw(st.sampled_from(values))
        if kind == "linear":
            values.append(make.linear(f"lin{index}", x, width))
        elif kind == "relu":
            values.append(make.relu(f"act{index}", x))
        else:
            values.append(make.add(f"sum{index}", x, draw(st.sampled_from(values))))
    outputs = [make.mean("loss", values[-1])] + ([values[1]] if draw(st.booleans()) else [])
    return make.finish(*outputs)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(),
    size=st.sampled_from([1, 2, 4]),
    policy=st.sampled_from(["data", "zero", "tp", "autodist"]),
    link=st.sampled_from(["cpu", "h100-nvlink"]),
    units=st.sampled_from([1, 2]),
)
def test_every_plan_is_consistent(graph: Graph, size: int, policy: str, link: str, units: int) -> None:
    costs = CostModel(hardware=profile(link))
    plan = plan_program(
        graph, size=size, policy=policy, costs=costs, units=units, strategies_of=strategies_of
    )
    assert list(plan.choices) == [op.name for op in graph.ops]
    assert list(plan.stored) == list(graph.parameters.values())
    for op in graph.ops:
        strategy = plan.choices[op.name]
        for name, use in zip(op.operands(), uses_of(strategy), strict=True):
            assert use.placement.fits(graph.meta(name).hints, size)
            conversion(placement_of(graph, plan, name), use)  # there is one
            check_divisible(graph.meta(name), use, plan)
            synchronized = graph.parameters.get(name) in plan.synchronized
            assert not (synchronized and placement_of(graph, plan, name) != R)
    if size == 1:
        assert all(strategy.is_replicated for strategy in plan.choices.values())
    assert plan.prediction.time > 0
    assert plan.prediction.memory > 0


def placement_of(graph: Graph, plan: ProgramPlan, name: str):  # type: ignore[no-untyped-def]
    if name in graph.parameters:
        return plan.stored[graph.parameters[name]]
    return plan.choices[name].outputs[0] if name in plan.choices else R


def check_divisible(meta: TensorMeta, use: Use, plan: ProgramPlan) -> None:
    if use.placement.is_shard and isinstance(dim := meta.shape[use.placement.dim], Size):
        assert (dim.expr, plan.size * use.placement.groups) in plan.divisible


@pytest.mark.full
def test_plans_do_not_depend_on_hash_seeds() -> None:
    """Compare all fields of a plan with those from another process with another seed."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from jobs.nnscaler_plan_graphs import stack_plan_text;"
        "print(stack_plan_text())"
    )
    tests = str(Path(__file__).parents[1])
    environment = {"PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, tests]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert other.stdout.strip() == stack_plan_text().strip()


# --- two axes: how large units are, and whether they keep parameters in parts ---------------------


H100 = CostModel(hardware=profile("h100-nvlink"))


@pytest.mark.full
def test_a_mesh_of_a_thousand_devices_is_planned_without_them() -> None:
    start = time.process_time()
    search = plan_mesh(stack(8, batch=128), world_size=1024, costs=H100, strategies_of=strategies_of)
    assert time.process_time() - start < 30
    assert {plan.program.size for plan in search.tried} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert {plan.zero for plan in search.tried} == {True, False}
    assert search.best.seconds_per_batch == min(plan.seconds_per_batch for plan in search.tried)
    assert not search.refused


def test_plenty_of_memory_and_a_large_batch_want_small_units() -> None:
    search = plan_mesh(mlp(8192, 64, 256), world_size=16, costs=H100, strategies_of=strategies_of)
    assert search.best.program.size == 1


def test_little_memory_wants_zero_or_larger_units_and_says_what_was_refused() -> None:
    graph = mlp(8, 512, 2048)
    free = plan_mesh(graph, world_size=8, costs=H100, strategies_of=strategies_of)
    alone = next(plan for plan in free.tried if plan.program.size == 1 and not plan.zero)
    limit = alone.program.prediction.memory // 2
    search = plan_mesh(graph, world_size=8, costs=H100, memory_limit=limit, strategies_of=strategies_of)
    assert search.best.zero or search.best.program.size > 1
    assert search.best.program.prediction.memory <= limit
    assert "are missing" in search.refused[1, False]


def test_dp_tries_units_of_one_rank_only() -> None:
    search = plan_mesh(mlp(), world_size=4, policy="dp", costs=H100, strategies_of=strategies_of)
    assert [(plan.program.size, plan.units, plan.zero) for plan in search.tried] == [
        (1, 4, False),
        (1, 4, True),
    ]


def test_no_shape_that_fits_is_an_error_with_the_least_that_is_missing() -> None:
    with pytest.raises(
        PlanError, match=r"no shape of a mesh of 4 ranks has a plan: no plan of policy 'autodist'"
    ):
        plan_mesh(mlp(), world_size=4, costs=H100, memory_limit=10, strategies_of=strategies_of)


def test_units_that_do_not_divide_the_world_are_refused() -> None:
    with pytest.raises(PlanError, match="units of 3 ranks do not divide a world of 8"):
        plan_mesh(mlp(), world_size=8, sizes=[3], costs=H100, strategies_of=strategies_of)


# --- gradients of what every rank repeats are summed with the parameters', not where they arise ---


class Embedded(nn.Module):
    """Adds positions, which every rank looks up, to a batch that is cut."""

    def __init__(self, read_again=False):
        super().__init__()
        self.positions = nn.Embedding(8, 16)
        self.scale = nn.Linear(16, 16)
        self.read_again = read_again

    def forward(self, x):
        added = self.positions(torch.arange(8)) * 2.0
        y = self.scale(x + added)
        return (y, added.sum()) if self.read_again else y


def test_a_position_embedding_takes_no_collective_of_its_own():
    found = check_parity(Embedded(), (torch.randn(8, 8, 16),), size=2, policy="data")
    assert found.error < 1e-12, found.worst
    assert "positions.weight" in found.plan.synchronized
    assert "keep__all_reduce" not in found.source


def test_a_use_with_a_complete_gradient_counts_once():
    found = check_parity(Embedded(read_again=True), (torch.randn(8, 8, 16),), size=2, policy="data")
    assert found.error < 1e-12, found.worst
    assert "keep__divide" in found.source


def test_it_is_right_at_more_ranks_and_under_every_policy():
    for policy in ("data", "zero", "tp", "autodist"):
        found = check_parity(Embedded(read_again=True), (torch.randn(8, 8, 16),), size=4, policy=policy)
        assert found.error < 1e-12, (policy, found.worst)
