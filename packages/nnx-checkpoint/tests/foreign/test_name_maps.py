"""Maps of names are data: rules go both ways, and what they leave or double is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nnx_checkpoint.foreign import name_maps
from nnx_checkpoint.foreign.name_maps import NameMap, name_map, registered_map
from nnx_core.errors import CheckpointError


def of(*rules: Any) -> NameMap:
    return NameMap.of(list(rules), "here")


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ([["net.**", "**"]], {"net.a.b": "a.b"}),
        ([["a.*.x.*.w", "b.*.y.*.v"]], {"a.0.x.12.w": "b.0.y.12.v"}),
        ([["a.w", "b.w"], ["a.**", "c.**"]], {"a.w": "b.w", "a.v.z": "c.v.z"}),
        ([["**.gamma", "**.weight"], ["drop.*", None], ["**", "**"]], {"n.gamma": "n.weight", "x": "x"}),
        ([["a+b.*", "(c).*"]], {"a+b.1": "(c).1"}),
    ],
)
def test_rules_go_both_ways(rules: list[Any], names: dict[str, str]) -> None:
    assert of(*rules).to_directory([*names, *(["drop.1"] if len(rules) == 3 else [])]) == names
    assert of(*rules).to_module(names.values()) == {stored: name for name, stored in names.items()}


def test_a_star_is_one_part_of_a_name() -> None:
    with pytest.raises(CheckpointError, match=r"map of names here has no rule for 'a\.b\.w'"):
        of(["a.*", "*"]).to_directory(["a.b.w"])


@pytest.mark.parametrize(
    ("rules", "names", "message"),
    [
        ([["a", "x"], ["b", "x"]], ["a", "b"], r"gives 'x' to two tensors, 'a' and 'b'.*\[\"b\", null\]"),
        (
            [["a.**", "**"], ["**", "b.**"]],
            ["a.b.c", "x"],
            r"cannot be undone: 'x' becomes 'b\.x'.*'a\.b\.x'",
        ),
        ([["a", "b"]], ["a", *"cdefghij"], r"has no rule for 'c', 'd', .* and 2 more"),
    ],
)
def test_names_that_are_left_or_doubled_are_refused(rules: Any, names: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        of(*rules).to_directory(names)


def test_left_names_of_a_directory_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no rule for 'b'.*with \[null, \"b\"\]"):
        of(["a", "a"]).to_module(["a", "b"])


@pytest.mark.parametrize(
    "rules",
    [[], "**", [["a"]], [["a", 3]], [[None, None]], [["", "a"]], [["a.*", "a.**"]], [["a.*", "a"]], 3],
)
def test_malformed_rules_are_refused(rules: Any) -> None:
    with pytest.raises(CheckpointError, match="here is malformed"):
        NameMap.of(rules, "here")


def test_a_plugin_brings_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nnx_checkpoint.name_maps]\nacme = acme_names:maps\n")
    rules = {"acme": [["net.**", "**"]], "gpt2": [["x", "y"]]}
    (tmp_path / "acme_names.py").write_text(f"def maps():\n    return {rules!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name_maps._providers.cache_clear()
    try:
        assert name_map("acme").to_directory(["net.w"]) == {"net.w": "w"}
        found = registered_map("gpt2")
        assert found is not None and found.to_module(["w"]) == {"w": "w"}  # ours is not replaced
    finally:
        name_maps._providers.cache_clear()
