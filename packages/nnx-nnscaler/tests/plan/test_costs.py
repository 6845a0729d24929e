"""The costs of operators, collectives and parameters, and the known rates of machines."""

from __future__ import annotations

import pytest

from jobs.nnscaler_plan_graphs import GraphMaker, mlp, stack, strategies_of
from nnx_core.machine.hardware import profile
from nnx_nnscaler.ir.graph import Graph, Op, Ref, TensorMeta
from nnx_nnscaler.ir.placement import P, R, S, Strategy, Use
from nnx_nnscaler.plan.cost import CostModel, Prices, Stored
from nnx_nnscaler.plan.extra_work import NOTHING, extra_work
from nnx_nnscaler.plan.peak_memory import peak_memory
from nnx_nnscaler.plan.planning import assignment_of, plan_program
from nnx_nnscaler.plan.policies import PolicyContext
from nnx_nnscaler.plan.work import Local, saved_by, work_of


def prices(graph: Graph, *, size: int = 2, units: int = 1, zero: bool = False) -> Prices:
    model = CostModel(hardware=profile("h100-nvlink"))
    return model.prices(graph, size=size, units=units, zero=zero)


def one(target: str, *shapes: tuple[int, ...], output: tuple[int, ...], args: tuple[object, ...] = ()) -> Op:
    names = [Ref(f"v{index}") for index in range(len(shapes))]
    return Op("op", target, (*names, *args), {}, TensorMeta(output, "float32", True))


def locals_of(*shapes: tuple[int, ...]) -> list[Local]:
    return [Local(shape, "float32", True) for shape in shapes]


@pytest.mark.parametrize(
    ("target", "shapes", "output", "flops"),
    [
        ("aten.linear.default", [(4, 8), (16, 8)], (4, 16), 2 * 4 * 8 * 16),
        ("aten.mm.default", [(4, 8), (8, 3)], (4, 3), 2 * 4 * 8 * 3),
        ("aten.addmm.default", [(3,), (4, 8), (8, 3)], (4, 3), 2 * 4 * 8 * 3),
        ("aten.conv2d.default", [(2, 3, 8, 8), (5, 3, 3, 3)], (2, 5, 6, 6), 2 * 2 * 5 * 36 * 27),
        ("aten.scaled_dot_product_attention.default", [(2, 4, 8, 16)] * 3, (2, 4, 8, 16), 4 * 64 * 8 * 16),
        ("aten.add.Tensor", [(4, 8), (4, 8)], (4, 8), 0),
    ],
)
def test_products_are_counted_as_they_are_multiplied(
    target: str, shapes: list[tuple[int, ...]], output: tuple[int, ...], flops: int
) -> None:
    op = one(target, *shapes, output=output)
    forward, _ = work_of(op, locals_of(*shapes), locals_of(output), whole=1)
    assert forward.flops == flops


def test_views_are_free_and_dropout_draws_for_all_ranks() -> None:
    view = one("aten.view.default", (4, 8), output=(32,))
    assert work_of(view, locals_of((4, 8)), locals_of((32,)), whole=32)[0].nbytes == 0
    for training, drawn in ((True, 64), (False, 0)):
        dropout = one("aten.dropout.default", (4, 8), output=(4, 8), args=(0.1, training))
        assert work_of(dropout, locals_of((4, 8)), locals_of((4, 8)), whole=64)[0].random == drawn


@pytest.mark.parametrize(
    ("target", "shapes", "operands", "output"),
    [
        ("aten.linear.default", [(4, 8), (16, 8)], (0, 1), False),
        ("aten.relu.default", [(4, 8)], (), True),
        ("aten.gelu.default", [(4, 8)], (0,), False),
        ("aten.add.Tensor", [(4, 8), (4, 8)], (), False),
        ("aten.scaled_dot_product_attention.default", [(2, 4, 8, 16)] * 3, (0, 1, 2), True),
        ("aten.layer_norm.default", [(4, 8), (8,), (8,)], (0,), False),
    ],
)
def test_what_autograd_keeps_is_known(
    target: str, shapes: list[tuple[int, ...]], operands: tuple[int, ...], output: bool
) -> None:
    op = one(target, *shapes, output=shapes[0])
    saved = saved_by(op, locals_of(*shapes), locals_of(shapes[0]))
    assert (saved.operands, saved.output) == (operands, output)


def test_splitting_an_operator_makes_it_cheaper_and_a_backward_pass_dearer() -> None:
    graph = mlp(4096, 1024, 4096)
    op, bound = graph.ops[0], prices(graph)
    whole, batch = strategies_of(op, graph, 2)[:2]
    assert bound.operator(op, batch).seconds < 0.6 * bound.operator(op, whole).seconds
    graph = mlp(4096, 1024, 4096)
    graph.training = False
    assert prices(graph).operator(op, whole).seconds < 0.6 * bound.operator(op, whole).seconds


def test_conversions_cost_their_collectives_there_and_back() -> None:
    make = GraphMaker(8)
    graph = make.finish(make.input("x", 1024, differentiable=True))
    bound, meta = prices(graph), graph.metas["x"]
    link, whole = profile("h100-nvlink").inside, 8 * 1024 * 4
    gather, scatter = (link.seconds(kind, whole, 2) for kind in ("all_gather", "reduce_scatter"))  # type: ignore[arg-type]
    assert bound.conversion(meta, S(0), Use(R, True)).communication == pytest.approx(gather + scatter)
    assert bound.conversion(meta, S(0), Use(R)).communication == pytest.approx(gather)
    assert bound.conversion(meta, P, Use(S(0))).moved == 2 * whole
    assert bound.conversion(meta, R, Use(R)).seconds == 0
    still = TensorMeta(meta.shape, meta.dtype)
    assert bound.conversion(still, R, Use(R, True)).seconds == 0


def loss_graph() -> tuple[Graph, Op]:
    """A cross entropy of 512 classes."""
    make = GraphMaker(64)
    scores = make.linear("head", make.input("x", 32), 512)
    target = make.input("target")
    args = (scores, target, None, 1)
    loss = make.op("loss", "aten.cross_entropy_loss.default", args, ())
    return make.finish(loss), make.graph.ops[-1]


@pytest.mark.parametrize(
    ("strategy", "moved"),
    [
        (Strategy("replicate", (R, R), (R,)), 0),
        (Strategy("batch", (S(0), S(0)), (P,)), 8),  # how many samples count
        (Strategy("vocabulary", (S(1), R), (R,), "vocabulary_cross_entropy"), 64 * 4 * (2 + 2)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_collectives_inside_of_the_runtimes_functions_are_priced(strategy: Strategy, moved: int) -> None:
    graph, op = loss_graph()
    price = prices(graph).operator(op, strategy)
    assert price.moved == moved
    assert (price.communication > 0) == (moved > 0)


@pytest.mark.parametrize(
    ("call", "there", "back"),
    [("batch_norm_over_unit", 2 * 2 * 4 * 8, 2 * 4 * 8), ("batch_norm_of_channels", 2 * 4 * 16, 0)],
)
def test_statistics_of_a_whole_unit_are_exchanged_there_and_back(call: str, there: int, back: int) -> None:
    """Of 8 channels on each rank: mean and variance, and two sums for the gradient."""
    x = Local((4, 8, 6, 6), "float32", True)
    op = one("aten.batch_norm.default", (4, 8, 6, 6), output=(4, 8, 6, 6))
    found = extra_work(op, Strategy("batch", (S(0),), (S(0),), call), [x], [x], size=2)
    assert [sum(whole for _, whole in extra.collectives) for extra in found] == [there, back]


def test_a_table_in_rows_masks_what_other_ranks_have() -> None:
    op = one("aten.embedding.default", (100, 16), (8,), output=(8, 16))
    inputs = [Local((50, 16), "float32", True), Local((8,), "int64", False)]
    rows = Strategy("vocabulary", (S(0), R), (P,))
    forward, backward = extra_work(op, rows, inputs, locals_of((8, 16)), size=2)
    assert forward.nbytes == backward.nbytes == 2 * 8 * 16 * 4
    columns = Strategy("column", (S(1), R), (S(1),))
    assert extra_work(op, columns, inputs, locals_of((8, 8)), size=2) == (NOTHING, NOTHING)


def test_what_is_recomputed_takes_time_again_and_less_memory() -> None:
    graph = stack(4, batch=256)
    plain, again = (
        plan_program(graph, size=1, costs=CostModel(recompute=patterns), strategies_of=strategies_of)
        for patterns in ((), ("blocks.*",))
    )
    assert again.prediction.compute > 1.2 * plain.prediction.compute
    assert again.prediction.memory < 0.7 * plain.prediction.memory
    # What comes into a block is kept; while one is recomputed, all that it keeps is there as well.
    x = 256 * 16 * 64 * 4
    assert again.prediction.memory > 4 * x + 4 * x
    graph.training = False
    for patterns in ((), ("blocks.*",)):
        costs = CostModel(recompute=patterns)
        plan = plan_program(graph, size=1, costs=costs, strategies_of=strategies_of)
        assert plan.prediction.compute < plain.prediction.compute


def test_conversions_in_what_is_recomputed_are_made_again() -> None:
    make = GraphMaker(8)
    bound, meta = prices(make.finish(make.input("x", 1024))), TensorMeta((8, 1024), "float32", True)
    once, twice = (bound.conversion(meta, P, Use(R), again=again) for again in (False, True))
    assert twice.moved == 2 * once.moved > 0


def test_an_exchange_of_grouped_parts_is_a_gathering() -> None:
    make = GraphMaker(8)
    graph = make.finish(make.input("x", 96))
    bound, meta = prices(graph), graph.metas["x"]
    gathered = bound.conversion(meta, S(0), Use(R))
    assert bound.conversion(meta, S(0), Use(S(1, groups=3))).communication == gathered.communication
    assert bound.conversion(meta, S(0), Use(S(1))).communication < gathered.communication


def test_gradients_that_are_reduced_take_room_twice_until_they_are() -> None:
    """Counts a persistent buffer and autograd's gradient; the optimizer steps on the buffer."""
    graph = mlp(2, 64, 4096)  # next to no activations
    nbytes = 2 * 64 * 4096 * 4
    alone, shared = (
        plan_program(graph, size=1, units=units, strategies_of=strategies_of).prediction.memory
        for units in (1, 2)
    )
    assert alone == pytest.approx(4 * nbytes + nbytes / 2, rel=0.05)  # and one result while stepping
    assert shared == pytest.approx(5 * nbytes, rel=0.05)


def test_units_pay_the_start_of_their_reduction_whatever_is_chosen() -> None:
    bound = [
        prices(mlp(), units=units, zero=zero).standing.seconds
        for units, zero in ((1, False), (2, False), (2, True))
    ]
    assert 0 == bound[0] < bound[1] < bound[2]


def test_parameters_in_parts_take_less_memory_and_time_to_update() -> None:
    graph = mlp(8, 64, 256)
    meta = graph.metas["p_up_weight"]
    whole, part = Stored(R), Stored(S(0))
    assert prices(graph).kept(meta, whole) == 64 * 256 * (4 + 4 + 8)
    assert prices(graph).kept(meta, part) == prices(graph).kept(meta, whole) // 2
    # In parts of four, gathered for a step, and a buffer in which gradients are reduced.
    assert prices(graph, units=4, zero=True).kept(meta, whole) == 64 * 256 * (16 // 4 + 4 + 4)
    assert prices(graph, units=4).kept(meta, whole) == 64 * 256 * (16 + 4)
    assert prices(graph).parameter(meta, part).compute < prices(graph).parameter(meta, whole).compute
    reduced = prices(graph).parameter(meta, Stored(R, synchronized=True))
    assert reduced.communication > 0 == prices(graph).parameter(meta, whole).communication
    frozen = TensorMeta(meta.shape, meta.dtype)
    assert prices(graph).kept(frozen, whole) == 64 * 256 * 4


def test_the_peak_of_one_rank_is_what_a_step_really_holds() -> None:
    """Counted by hand: parameters with gradient and state, inputs, and live tensors around the loss."""
    graph = mlp(128, 64, 256)
    plan = plan_program(graph, size=1, strategies_of=strategies_of)
    lasting = 2 * 64 * 256 * 16 + 128 * 64 * 4
    hidden, small = 128 * 256 * 4, 128 * 64 * 4
    # Backward: relu's result is kept; its gradient and that of what it was made of are alive together.
    assert plan.prediction.memory >= lasting + hidden + hidden
    assert plan.prediction.memory <= lasting + 3 * hidden + 2 * small
    context = PolicyContext(graph, 1, lambda op, graph, size: strategies_of(op, graph, 1)[:1])
    bound = CostModel().prices(graph, size=1)
    assert peak_memory(context.flow, assignment_of(graph, plan), bound) == plan.prediction.memory
