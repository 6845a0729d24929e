"""Plans as files: they round-trip, user edits take effect, and misfits are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nnx_colossalai.plan.document import PlanDocument, plan_key
from nnx_colossalai.plan.planner import Planned, plan
from nnx_colossalai.plan.spec import Group, ModelSpec, Placement, RankResources, Tier
from nnx_core.errors import PlanError

GROUPS = tuple(Group(name=f"layers.{at}", numel=1000, trainable=1000) for at in range(4))
SPEC = ModelSpec(groups=(*GROUPS, Group(name="", numel=10, trainable=10)))
RESOURCES = RankResources(device_bytes=50_000, host_bytes=100_000)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan(SPEC, RESOURCES)


@pytest.fixture
def file(tmp_path: Path, planned: Planned) -> Path:
    path = tmp_path / "plans" / "plan.json"
    PlanDocument.of(SPEC, RESOURCES, planned).save(path)
    return path


def test_a_plan_is_read_as_it_was_written(file: Path, planned: Planned) -> None:
    found = PlanDocument.load(file)
    assert found == PlanDocument.of(SPEC, RESOURCES, planned)
    assert found.placement(SPEC) == planned.placement
    assert len(set(planned.placement.tiers.values())) > 1
    assert [path.name for path in file.parent.iterdir()] == ["plan.json"]


def test_the_file_says_sizes_predictions_and_reasons_in_one_line_for_each_chunk(
    file: Path, planned: Planned
) -> None:
    text = file.read_text()
    body = json.loads(text)
    assert body["predicted"]["device_bytes"] == planned.memory.device
    assert body["predicted"]["seconds"] == planned.seconds
    assert body["hardware"]["host_bytes"] == 100_000
    assert body["model"]["world_size"] == 1
    lines = [line for line in text.splitlines() if '"tier"' in line]
    assert [json.loads(line.rstrip(","))["name"] for line in lines] == [group.name for group in SPEC.groups]
    offloaded = next(chunk for chunk in body["chunks"] if chunk["tier"] == "offloaded")
    assert (offloaded["device_bytes"], offloaded["host_bytes"]) == (2000, 16_000)
    assert all(chunk["why"] for chunk in body["chunks"])


def test_tiers_that_were_edited_count(file: Path) -> None:
    file.write_text(file.read_text().replace('"offloaded"', '"streamed"'))
    tiers = PlanDocument.load(file).placement(SPEC).tiers
    assert Tier.STREAMED in tiers.values() and Tier.OFFLOADED not in tiers.values()


def test_names_and_tiers_alone_are_a_plan_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    chunks = [{"name": group.name, "tier": "sharded"} for group in reversed(SPEC.groups)]
    path.write_text(json.dumps({"format": "nnx-colossalai plan", "version": 1, "chunks": chunks}))
    found = PlanDocument.load(path).placement(SPEC)
    assert list(found.tiers) == [group.name for group in SPEC.groups]
    assert set(found.tiers.values()) == {Tier.SHARDED}


def test_a_plan_of_another_world_size_is_accepted_although_its_sizes_differ(file: Path) -> None:
    groups = tuple(replace(group, numel=1008) for group in SPEC.groups)
    PlanDocument.load(file).placement(replace(SPEC, groups=groups, world_size=8))


def edited(file: Path, change) -> Path:
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["chunks"].pop(1), r"is for another model: it lacks 'layers\.1'\. Plan again"),
        (
            lambda b: b["chunks"].append({"name": "head", "tier": "sharded"}),
            r"another model: the model has no 'head'\.",
        ),
        (
            lambda b: b["chunks"][0].update(name="blocks.0"),
            r"it lacks 'layers\.0'; the model has no 'blocks\.0'\.",
        ),
        (lambda b: b["chunks"][2].update(numel=7), r"other sizes are in 'layers\.2'\."),
        (
            lambda b: [chunk.update(name=f"x{at}") for at, chunk in enumerate(b["chunks"] * 1)],
            r"it lacks 'layers\.0', .*; the model has no 'x0', 'x1', 'x2', 'x3', 'x4'\.",
        ),
        (
            lambda b: b["chunks"].extend({"name": f"y{at}", "tier": "sharded"} for at in range(7)),
            r"has no 'y0', 'y1', 'y2', 'y3', 'y4' and 2 more\.",
        ),
    ],
)
def test_a_plan_of_another_model_says_which_chunks_differ(file: Path, change, message: str) -> None:
    found = PlanDocument.load(edited(file, change))
    with pytest.raises(PlanError, match=message):
        found.placement(SPEC, path=str(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: b["chunks"][1].update(tier="gpu"),
            r"puts chunk 'layers\.1' into the tier 'gpu'\. Use one of gathered, sharded, offloaded, streamed",
        ),
        (lambda b: b["chunks"][1].pop("tier"), r"puts chunk 'layers\.1' into the tier None"),
        (lambda b: b["chunks"][1].pop("name"), r"chunk 1 of the plan .* has no name"),
        (lambda b: b["chunks"].insert(0, "layers.0"), r"chunk 0 of the plan .* has no name: 'layers\.0'"),
        (lambda b: b["chunks"].append(b["chunks"][0]), r"has two chunks named 'layers\.0'"),
        (lambda b: b.update(version=2), r"has version 2, expected 1"),
        (lambda b: b.update(format="other"), r"is no plan of nnx-colossalai"),
        (lambda b: b.update(chunks={}), r"has no list of chunks"),
        (lambda b: b.pop("chunks"), r"has no list of chunks"),
    ],
)
def test_what_cannot_be_understood_is_named(file: Path, change, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        PlanDocument.load(edited(file, change))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no plan of nnx-colossalai"),
        ("", "is no JSON"),
        (b"\xff\xfe\x00", "read"),
    ],
)
def test_files_that_are_no_plans_are_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(PlanError, match=message):
        PlanDocument.load(path)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path, planned: Planned) -> None:
    message = r"none\.json' cannot be read: No such file or directory\. Check the path"
    with pytest.raises(PlanError, match=message):
        PlanDocument.load(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"cannot be written: .*\. Choose another path\."):
        PlanDocument.of(SPEC, RESOURCES, planned).save(tmp_path / "file" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="cannot be written"):
        PlanDocument.of(SPEC, RESOURCES, planned).save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_the_key_changes_with_whatever_ranks_must_agree_on(planned: Planned) -> None:
    other_tiers = {**planned.placement.tiers, "": Tier.STREAMED}
    frozen = replace(SPEC, groups=(*SPEC.groups[:-1], replace(SPEC.groups[-1], trainable=0)))
    keys = [
        plan_key(SPEC, planned.placement),
        plan_key(SPEC, Placement(other_tiers)),
        plan_key(frozen, planned.placement),
        plan_key(replace(SPEC, world_size=2), planned.placement),
        plan_key(replace(SPEC, working_bytes=4), planned.placement),
    ]
    assert len(set(keys)) == len(keys)
    slower = replace(SPEC, groups=tuple(replace(group, compute_seconds=1.0) for group in SPEC.groups))
    assert plan_key(slower, planned.placement) == keys[0]  # ranks may measure otherwise
