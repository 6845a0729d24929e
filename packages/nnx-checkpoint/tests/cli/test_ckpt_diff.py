"""Tests of ``nnx ckpt diff`` and of the comparison behind it."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import nnx_checkpoint as storage
from nnx_base.shard import shard_of
from nnx_checkpoint.cli.command import app
from nnx_checkpoint.conversion.comparison import compare, difference_of
from nnx_checkpoint.foreign.contents import Contents

TENSORS = {
    "model.w": torch.arange(12.0).view(3, 4),
    "model.b": torch.arange(4),
    "optim.0.state.w.exp_avg": torch.ones(3, 4),
}
OBJECTS = {
    "trainer": {"epoch": 1, "best": torch.tensor([0.5, 0.25]), "list": [1, {"deep": (1, 2)}]},
    "optim": [{"groups": [{"params": ["w", "b"], "lr": 0.1}], "values": {"w": {"step": 3}}}],
}


def save(
    path: Path,
    tensors: dict[str, torch.Tensor] = TENSORS,
    objects: Any = OBJECTS,
    aliases: dict[str, str] | None = None,
    **more: Any,
) -> Path:
    described = {name: shard_of(value) for name, value in tensors.items()}
    storage.save(path, tensors=described, objects=objects, aliases=aliases, **more)
    return path


def differences(tmp_path: Path, **changed: Any) -> Any:
    left, right = save(tmp_path / "a"), save(tmp_path / "b", **changed)
    return compare(storage.open_checkpoint(left), storage.open_checkpoint(right))


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_the_same_contents_are_the_same_wherever_they_come_from(tmp_path: Path) -> None:
    left, right = save(tmp_path / "a"), save(tmp_path / "b", provenance={"strategy": "other"})
    assert run(left, right) == (0, "Equal; 4 tensors compared bitwise (136 B).\n")
    code, output = run(left, right, "--no-values", "--json")
    assert code == 0
    assert json.loads(output) == {
        "left": str(left),
        "right": str(right),
        "same": True,
        **{key: [] for key in ("only_left", "only_right", "shapes", "dtypes", "ties", "objects", "values")},
        "values_compared": False,
        "tensors_compared": 0,
        "bytes_compared": 0,
    }
    assert run(left, right, "--no-values")[1] == "Equal; values were not compared.\n"


def test_every_kind_of_difference_is_reported(tmp_path: Path) -> None:
    changed = {
        "model.w": torch.arange(12.0).view(3, 4) + torch.tensor([0, 0, 0.5, 0]),
        "model.b": torch.arange(5.0),
        "model.new": torch.zeros(()),
    }
    left = save(tmp_path / "a")
    right = save(tmp_path / "b", changed, {"trainer": {"epoch": 2}})
    code, output = run(left, right)
    assert code == 1
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for expected in (
        f"only in {left}:",
        "optim.0.state.w.exp_avg",
        f"only in {right}:",
        "model.new",
        "model.b 4 5",
        "model.b int64 float32",
        "trainer.epoch 1 2",
        "weights 1 0.5",
        "model.w 3 of 12 0.5",
        "Different: 2 names on one side only, 2 shapes or element types, 4 objects, "
        "1 tensors by value; 1 tensors compared bitwise (48 B).",
    ):
        assert expected in lines, expected
    code, output = run(left, right, "--json")
    content = json.loads(output)
    assert (code, content["same"]) == (1, False)
    assert content["only_left"] == ["optim.0.state.w.exp_avg"]
    assert content["shapes"] == [{"name": "model.b", "left": [4], "right": [5]}]
    assert content["dtypes"] == [{"name": "model.b", "left": "int64", "right": "float32"}]
    assert content["values"] == [{"name": "model.w", "elements": 3, "numel": 12, "largest": 0.5}]
    assert {"place": "trainer.epoch", "left": "1", "right": "2"} in content["objects"]


def test_only_weights_leaves_the_rest_out(tmp_path: Path) -> None:
    left = save(tmp_path / "a")
    right = save(
        tmp_path / "b", {k: v for k, v in TENSORS.items() if k.startswith("model.")}, {"trainer": {}}
    )
    assert run(left, right)[0] == 1
    assert run(left, right, "--only-weights") == (0, "Equal; 2 tensors compared bitwise (80 B).\n")


def test_many_differences_are_cut_off_with_a_hint(tmp_path: Path) -> None:
    left = save(tmp_path / "a", {f"model.{i:02}": torch.zeros(1) for i in range(30)}, {})
    right = save(tmp_path / "b", {f"model.{i:02}": torch.ones(1) for i in range(30)}, {})
    result = CliRunner().invoke(app, ["diff", str(left), str(right)])
    assert result.stdout.count("1 of 1") == 20
    assert "... and 10 more; --json lists all of them." in result.stderr


@pytest.mark.parametrize(
    ("change", "place", "left", "right"),
    [
        ({"epoch": True}, "trainer.epoch", "1", "True"),
        ({"list": [1, {"deep": [1, 2]}]}, "trainer.list.1.deep", "(1, 2)", "[1, 2]"),
        ({"list": [1]}, "trainer.list", "[1, {'deep': (1, 2)}]", "[1]"),
        ({"more": None}, "trainer.more", "", "None"),
        ({"epoch": "1"}, "trainer.epoch", "1", "'1'"),
        ({"epoch": float("nan")}, "trainer.epoch", "1", "nan"),
        ({"best": 3}, "trainer.best", "tensor objects.trainer.best", "3"),
    ],
)
def test_objects_are_compared_place_by_place(
    tmp_path: Path, change: dict[str, Any], place: str, left: str, right: str
) -> None:
    found = differences(tmp_path, objects={**OBJECTS, "trainer": {**OBJECTS["trainer"], **change}})
    (one,) = found.objects
    assert (one.place, one.left, one.right) == (place, left, right)


def test_equal_objects_need_not_be_of_one_class(tmp_path: Path) -> None:
    from collections import OrderedDict

    values = {"a": OrderedDict(b=1), "n": float("nan"), "x": np.ones(3), "s": np.float32(0.5), "i": 1}
    same = {"a": {"b": 1}, "n": float("nan"), "x": np.ones(3), "s": 0.5, "i": 1.0}
    left, right = (save(tmp_path / n, {}, {"trainer": v}) for n, v in (("a", values), ("b", same)))
    assert run(left, right)[0] == 0
    other = save(tmp_path / "c", {}, {"trainer": {**same, "x": np.ones(3, np.float32)}})
    assert run(left, other)[0] == 1


def test_tensors_inside_objects_are_compared_by_value(tmp_path: Path) -> None:
    trainer = {**OBJECTS["trainer"], "best": torch.tensor([0.5, 0.75])}
    found = differences(tmp_path, objects={**OBJECTS, "trainer": trainer})
    assert [(v.name, v.elements, v.largest) for v in found.values] == [("objects.trainer.best", 1, 0.5)]
    assert not found.objects


def test_what_ranks_saved_for_themselves_counts(tmp_path: Path) -> None:
    found = differences(tmp_path, rank_objects={"seed": 1})
    assert [(o.place, o.left, o.right) for o in found.objects] == [("rank.0", "None", "{'seed': 1}")]


def test_ties_that_were_cut_are_reported_and_their_values_compared(tmp_path: Path) -> None:
    w = TENSORS["model.w"]
    left = save(tmp_path / "a", {"model.w": w}, {}, {"model.tied": "model.w"})
    right = save(tmp_path / "b", {"model.w": w, "model.tied": w + 1}, {})
    code, output = run(left, right, "--json")
    content = json.loads(output)
    assert code == 1
    assert content["ties"] == ["model.w", "model.tied"]
    assert content["values"] == [{"name": "model.tied", "elements": 12, "numel": 12, "largest": 1.0}]
    assert not (content["only_left"] or content["only_right"])
    assert run(left, left)[0] == 0


def test_parameters_that_one_side_numbers_are_matched_by_position(tmp_path: Path) -> None:
    left = storage.open_checkpoint(save(tmp_path / "a"))
    numbered = Contents(tmp_path / "b", "lightning")
    for name in ("model.w", "model.b"):
        numbered.add(name, TENSORS[name])
    numbered.add_optimizer(
        {
            "state": {0: {"exp_avg": torch.ones(3, 4), "step": 3}},
            "param_groups": [{"params": [0, 1], "lr": 0.1}],
        }
    )
    numbered.set_trainer(OBJECTS["trainer"])
    assert compare(left, numbered.opened()).same
    assert compare(numbered.opened(), left).same


def test_large_tensors_are_compared_in_little_memory(tmp_path: Path) -> None:
    big = torch.zeros(64 << 20, dtype=torch.uint8)
    left = save(tmp_path / "a", {"model.big": big}, {})
    big[-1] = 7
    right = save(tmp_path / "b", {"model.big": big}, {})
    del big
    seen: list[tuple[int, int]] = []
    opened = storage.open_checkpoint(left), storage.open_checkpoint(right)
    tracemalloc.start()  # numpy's memory; torch's are the slabs, four of eight megabytes
    found = compare(*opened, progress=lambda done, total: seen.append((done, total)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(v.elements, v.largest) for v in found.values] == [(1, 7.0)]
    assert seen[-1] == (64 << 20, 64 << 20)
    assert peak < 32 << 20


def bits(values: Any, dtype: torch.dtype) -> memoryview:
    tensor = torch.tensor(values) if dtype is torch.bool else torch.tensor(values, dtype=dtype)
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


@pytest.mark.parametrize(
    ("dtype", "left", "right", "elements", "largest"),
    [
        (torch.float32, [1.0, 2.0, 3.0], [1.0, 2.5, 3.0], 1, 0.5),
        (torch.float32, [0.0], [-0.0], 1, 0.0),
        (torch.float32, [math.nan, 1.0], [math.nan, 1.0], 0, 0.0),
        (torch.float32, [math.nan, 1.0], [1.0, 3.0], 2, math.nan),
        (torch.float32, [math.inf], [math.inf], 0, 0.0),
        (torch.float64, [math.inf], [-math.inf], 1, math.inf),
        (torch.bfloat16, [1.0, 2.0], [1.0, 4.0], 1, 2.0),
        (torch.float8_e4m3fn, [1.0, 2.0], [0.5, 2.0], 1, 0.5),
        (torch.complex64, [1 + 1j], [1 - 1j], 1, 2.0),
        (torch.complex128, [1 + 1j], [1 + 1j], 0, 0.0),
        (torch.complex128, [1 + 1j, 0], [1 + 4j, 4], 2, 4.0),
        (torch.int64, [2**62, 1], [2**62 + 1, 1], 1, 1.0),
        (torch.int64, [2**63 - 1], [-(2**63)], 1, float(2**64 - 1)),
        (torch.uint64, [2**64 - 1], [0], 1, float(2**64 - 1)),
        (torch.int8, [-128], [127], 1, 255.0),
        (torch.uint8, [0, 255], [255, 255], 1, 255.0),
        (torch.bool, [True, False], [False, False], 1, 1.0),
    ],
)
def test_distances_are_right_for_every_element_type(
    dtype: torch.dtype, left: Any, right: Any, elements: int, largest: float
) -> None:
    found = difference_of(bits(left, dtype), bits(right, dtype), dtype)
    assert found.elements == elements
    assert found.largest == largest or (math.isnan(found.largest) and math.isnan(largest))
    back = difference_of(bits(right, dtype), bits(left, dtype), dtype)
    assert back == found or math.isnan(largest)


def test_two_kinds_of_nan_differ_in_their_bits_only() -> None:
    nans = [torch.tensor([0x7FC00000 + payload], dtype=torch.int32) for payload in (0, 1)]
    left, right = (memoryview(nan.numpy()).cast("B") for nan in nans)
    found = difference_of(left, right, torch.float32)
    assert (found.elements, found.largest) == (1, 0.0)
