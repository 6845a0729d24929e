"""The drawing of a plan matches the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from nnx_colossalai.plan import timeline
from nnx_colossalai.plan.planner import Planned, evaluate
from nnx_colossalai.plan.spec import Group, ModelSpec, Placement, RankResources, Tier
from nnx_colossalai.plan.timeline import draw_timeline
from nnx_core.errors import PlanError

MIB = 2**20
LAYERS = tuple(
    Group(name=f"layers.{at}", numel=MIB, trainable=MIB, activation_bytes=8 * MIB) for at in range(6)
)
SPEC = ModelSpec(groups=(*LAYERS, Group(name="", numel=10, trainable=10)), other_device_bytes=9 * MIB)
RESOURCES = RankResources(device_bytes=150 * MIB, host_bytes=200 * MIB)


def planned(tier: Tier, spec: ModelSpec = SPEC) -> Planned:
    return evaluate(spec, RESOURCES, Placement(dict.fromkeys([group.name for group in spec.groups], tier)))


def drawn(path: Path, plan: Planned, resources: RankResources = RESOURCES) -> dict[str, float]:
    """Share of the picture that each kind's color fills, without the legend."""
    draw_timeline(plan.memory, resources, path, title="a title")
    pixels = imread(path)[..., :3]
    pixels = pixels[:, : int(0.84 * pixels.shape[1])]
    return {
        kind: float((np.abs(pixels - np.array(to_rgb(color))).max(axis=2) < 0.02).mean())
        for kind, color in timeline._COLORS.items()
    }


@pytest.mark.full
def test_every_kind_of_memory_is_drawn_as_large_as_it_is(tmp_path: Path) -> None:
    plan = planned(Tier.GATHERED)
    shares = drawn(tmp_path / "new" / "a.png", plan)
    sizes = {kind: sum(m.by_kind[kind] for m in plan.memory.timeline) for kind in shares}
    assert {kind for kind, share in shares.items() if share} == {kind for kind, size in sizes.items() if size}
    assert shares["optimizer"] == pytest.approx(2 * shares["masters"], rel=0.1)
    assert shares["activations"] / shares["masters"] == pytest.approx(
        sizes["activations"] / sizes["masters"], rel=0.15
    )


def test_what_is_in_host_memory_is_not_drawn_as_the_devices(tmp_path: Path) -> None:
    shares = drawn(tmp_path / "a.png", planned(Tier.STREAMED))
    assert shares["masters"] == shares["optimizer"] == shares["weights"] == 0
    assert shares["gathered"] > 0 and shares["staging"] > 0


@pytest.mark.full
def test_a_budget_near_the_peak_is_a_line_and_one_far_above_does_not_flatten_the_picture(
    tmp_path: Path,
) -> None:
    plan = planned(Tier.GATHERED)
    near = drawn(tmp_path / "near.png", plan, replace(RESOURCES, device_bytes=300 * MIB))
    far = drawn(tmp_path / "far.png", plan, replace(RESOURCES, device_bytes=2**40))
    assert far["masters"] > 1.5 * near["masters"]


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 300])
def test_models_of_one_and_of_many_chunks_are_drawn(tmp_path: Path, count: int) -> None:
    groups = tuple(replace(LAYERS[0], name=f"layers.{at}") for at in range(count))
    assert drawn(tmp_path / "a.png", planned(Tier.SHARDED, ModelSpec(groups=groups)))["masters"] > 0


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PlanError, match=r"the drawing .*a\.png' cannot be written: .*\. Choose another path\."
    ):
        draw_timeline(planned(Tier.SHARDED).memory, RESOURCES, tmp_path / "file" / "a.png")
