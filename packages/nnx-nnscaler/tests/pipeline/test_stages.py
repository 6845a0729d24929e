"""The partition into stages is optimal, and stages get their inputs."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nnx_core.errors import PlanError
from nnx_nnscaler.pipeline.call import can_split
from nnx_nnscaler.pipeline.cuts import choose_cuts
from nnx_nnscaler.pipeline.memory import rooms
from nnx_nnscaler.pipeline.microbatches import cut_batch
from nnx_nnscaler.pipeline.outline import Outline, StageCosts
from nnx_nnscaler.pipeline.stages import homes_of, make_stages
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.schedules import Arrangement
from nnx_nnscaler.trace import trace_forward


class Deep(nn.Module):
    """Layers with a skip over all of them, and a mask that needs no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        first = y = self.first(x * mask)
        for layer in self.layers:
            y = layer(y).relu()
        return self.last(y + first) * mask


def outline() -> Outline:
    return Outline(cut_batch(trace_forward(Deep(), (torch.randn(8, 4),), {})).graph)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.1, 9), min_size=4, max_size=9), st.integers(2, 4), st.data())
def test_the_longest_stage_is_as_short_as_that_of_any_other_cut(
    times: list[float], stages: int, data: st.DataObject
) -> None:
    sent = data.draw(st.lists(st.integers(1, 100), min_size=len(times) + 1, max_size=len(times) + 1))
    seconds = np.concatenate([[0.0], np.cumsum(times)])
    may = np.ones(len(seconds), dtype=bool)
    may[[0, -1]] = False
    nothing = np.zeros(len(seconds))
    cuts = choose_cuts(
        StageCosts(seconds, np.array(sent, dtype=float), may, nothing, nothing, nothing), stages
    )
    assert cuts is not None

    def longest(places: tuple[int, ...]) -> float:
        bounds = [0, *places, len(times)]
        return max(float(seconds[stop] - seconds[start]) for start, stop in pairwise(bounds))

    others = list(combinations(range(1, len(times)), stages - 1))
    best = min(map(longest, others))
    assert longest(tuple(cuts)) <= 1.02 * best + 1e-12
    as_short = [places for places in others if longest(places) <= 1.02 * best]
    assert sum(sent[place] for place in cuts) == min(sum(sent[p] for p in places) for places in as_short)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=6, max_size=9), st.booleans(), st.data())
def test_the_longest_stage_is_as_short_as_that_of_any_cut_that_fits_into_the_memory(
    ops: list[tuple[int, int, int]], coupled: bool, data: st.DataObject
) -> None:
    arrangement = Arrangement(2, 4) if coupled else Arrangement(3, 3)
    seconds, lasting, kept = np.pad(np.cumsum(np.array(ops, dtype=float), axis=0), ((1, 0), (0, 0))).T
    may = np.ones(len(seconds), dtype=bool)
    may[[0, -1]] = False
    limit = data.draw(st.integers(int(lasting[-1]) // 3, int(lasting[-1] + kept[-1])))
    found = rooms(arrangement, "gpipe", 4, [limit] * arrangement.ranks)
    sent = np.ones(len(seconds))
    cuts = choose_cuts(
        StageCosts(seconds, sent, may, np.zeros(len(seconds)), lasting, kept), arrangement.stages, rooms=found
    )

    def fits(places: tuple[int, ...]) -> bool:
        taken = [0.0] * arrangement.ranks
        for stage, (start, stop) in enumerate(pairwise([0, *places, len(ops)])):
            taken[arrangement.rank_of(stage)] += lasting[stop] - lasting[start] + kept[stop] - kept[start] + 2
        return max(taken) <= limit

    def longest(places: tuple[int, ...]) -> float:
        return max(float(seconds[stop] - seconds[start]) for start, stop in pairwise([0, *places, len(ops)]))

    others = list(combinations(range(1, len(ops)), arrangement.stages - 1))
    fitting = [places for places in others if fits(places)]
    assert (cuts is None) == (not fitting)
    if cuts is not None:
        assert fits(tuple(cuts))
        if not coupled or fitting == others:
            assert longest(tuple(cuts)) <= 1.02 * min(map(longest, fitting))


def test_too_many_stages_are_refused_with_the_number_there_can_be() -> None:
    found = outline()
    with pytest.raises(PlanError, match=r"can be cut into \d+ stages at most, and 99 are requested"):
        choose_cuts(found.costs(CostModel()), 99)


def test_skips_cross_and_what_needs_no_parameter_is_computed_where_it_is_used() -> None:
    found = outline()
    cuts = [found.place_of_module("layers.2"), found.place_of_module("layers.4")]
    first, middle, last = make_stages(found, cuts)
    assert set(first.graph.parameters.values()) == {
        f"{name}.{kind}" for name in ("first", "layers.0", "layers.1") for kind in ("weight", "bias")
    }
    crossing = set(last.arguments) & set(first.gives)
    assert len(crossing) == 1, "the skip"
    assert not crossing & set(middle.arguments)
    assert any(op.target.startswith("aten.gt") for op in last.graph.ops), "the mask is made again"
    assert homes_of([first, middle, last], Arrangement(3, 3))["last.weight"] == 2


def test_a_submodule_that_computes_nothing_is_named() -> None:
    with pytest.raises(PlanError, match=r"stage_cuts names 'layers\.9', which computes nothing"):
        outline().place_of_module("layers.9")


@pytest.mark.parametrize(
    ("forward", "can"),
    [
        (lambda m, x: m.last(m.layers[0](m.first(x)).relu()), True),
        (lambda m, x: m.last(m.layers[0](m.layers[0](m.first(x)))), False),
        (lambda m, x: m.first(x) * m.scale.exp() + m.scale.exp(), False),
        (lambda m, x: m.layers[1](m.first(x) + (bias := m.scale.exp())) * bias, False),
    ],
)
def test_gradients_of_weights_wait_where_each_meets_the_samples_once(forward: Any, can: bool) -> None:
    class Model(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)  # type: ignore[no-any-return]

    found = Outline(cut_batch(trace_forward(Model(), (torch.randn(8, 4),), {})).graph)
    _, last = make_stages(found, [1])
    assert can_split(last, frozenset(last.arguments)) == can
