"""The text of a plan."""

from __future__ import annotations

from dataclasses import replace

from nnx_colossalai.plan.document import plan_table, summary
from nnx_colossalai.plan.planner import _Search, evaluate
from nnx_colossalai.plan.spec import Constraints, Group, ModelSpec, Placement, RankResources, Tier

MIB = 2**20
LAYERS = tuple(Group(name=f"layers.{at}", numel=MIB, trainable=MIB) for at in range(4))
SPEC = ModelSpec(groups=(*LAYERS, Group(name="", numel=10, trainable=0)))
RESOURCES = RankResources(device_bytes=100 * MIB, host_bytes=200 * MIB)


def table(*tiers: Tier, spec: ModelSpec = SPEC) -> list[str]:
    placement = Placement(dict(zip([group.name for group in spec.groups], tiers, strict=True)))
    return plan_table(spec, RESOURCES, evaluate(spec, RESOURCES, placement)).splitlines()


def test_alike_layers_are_one_line_with_their_sums() -> None:
    lines = table(Tier.GATHERED, Tier.GATHERED, Tier.OFFLOADED, Tier.STREAMED, Tier.GATHERED)
    assert lines[0].split() == ["chunk", "tier", "elements", "device", "host", "moved/step", "why"]
    rows = [line.split()[:9] for line in lines[2:6]]
    # 2 + 4 + 4 + 8 bytes on the device; 2 there and 16 on the host; 18 on the host.
    assert " ".join(rows[0][:8]) == "layers.0 to layers.1 (2) gathered 2,097,152 36.00 MiB"
    assert " ".join(rows[1]) == "layers.2 offloaded 1,048,576 2.00 MiB 16.00 MiB 4.00 MiB"
    assert " ".join(rows[2]) == "layers.3 streamed 1,048,576 0 B 18.00 MiB 6.00 MiB"
    assert " ".join(rows[3][:7]) == "(root) gathered 10 60 B 0 B"
    assert lines[5].endswith("10 frozen")


def test_what_nobody_has_fixed_is_not_called_given() -> None:
    """Each of these layers alone would fit a tier higher, and be faster."""
    tiers = (*[Tier.STREAMED] * 4, Tier.GATHERED)
    assert table(*tiers)[2].endswith("  as given")
    found = _Search(SPEC, RESOURCES, Constraints()).planned(tiers)
    assert plan_table(SPEC, RESOURCES, found).splitlines()[2].endswith("  fastest of those compared")


def test_layers_of_other_tiers_sizes_or_names_are_lines_of_their_own() -> None:
    tiers = [Tier.GATHERED] * 5
    assert len(table(*tiers)) == 2 + 2 + 4
    other = replace(SPEC, groups=(*LAYERS[:2], replace(LAYERS[2], numel=2 * MIB), LAYERS[3], SPEC.groups[4]))
    assert len(table(*tiers, spec=other)) == 2 + 4 + 4
    renamed = replace(SPEC, groups=(replace(LAYERS[0], name="embed"), *SPEC.groups[1:]))
    assert len(table(*tiers, spec=renamed)) == 2 + 3 + 4


def test_the_sums_name_the_peak_the_budgets_and_what_limits_the_step() -> None:
    placement = Placement(dict.fromkeys([group.name for group in SPEC.groups], Tier.OFFLOADED))
    planned = evaluate(SPEC, replace(RESOURCES, host_step=1e6), placement)
    lines = summary(SPEC, RESOURCES, planned).splitlines()
    assert lines[0].startswith("4,194,314 elements in 5 chunks on 1 rank; predicted 4.40")
    assert lines[0].endswith(" s a step, most of it host")
    peak = planned.memory.peak
    assert f"of 100.00 MiB in the backward of {peak.group} (weights 8.00 MiB, " in lines[1]
    assert lines[2].endswith(" of 200.00 MiB")
    assert "ms a step" in summary(SPEC, RESOURCES, evaluate(SPEC, RESOURCES, placement))


def test_columns_stand_under_their_heads() -> None:
    lines = table(Tier.GATHERED, Tier.GATHERED, Tier.OFFLOADED, Tier.STREAMED, Tier.GATHERED)
    end = lines[0].index("host") + len("host")
    assert all(line[end - 1] == "B" and line[end] == " " for line in lines[2:6])
