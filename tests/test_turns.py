"""Which tests README's command takes, a share of the rest, and everything."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import turns
from longest_first import ROOT
from nnx_conformance.runner import select_checks


def items(file: str, names: str, marked: str) -> list[Any]:
    """Tests of one file, some with the mark."""
    return [
        SimpleNamespace(path=file, name=name, get_closest_marker=lambda _, full=name in marked: full or None)
        for name in names
    ]


def test_shares_are_what_is_left_and_each_test_is_in_one_of_them() -> None:
    every = [*items("a", "abcdefgh", "bcdefg"), *items("b", "xyz", "xyz")]
    default = turns.chosen(every, "")
    assert "".join(item.name for item in default) == "ah"
    shares = [turns.chosen(every, f"{number}/3") for number in (1, 2, 3)]
    assert ["".join(item.name for item in share) for share in shares] == ["bcz", "dex", "fgy"]
    assert turns.chosen(every, "full") == every


@pytest.mark.parametrize("matrix", ["some", "0/3", "4/3", "1/0", "1"])
def test_another_value_is_refused(matrix: str) -> None:
    with pytest.raises(pytest.UsageError, match="neither 'full' nor a share such as '2/5'"):
        turns.chosen([], matrix)


def test_the_tables_name_tests_that_exist() -> None:
    for file, tests in turns.CASES.items():
        source = (ROOT / file).read_text()
        assert [name for name in tests if name != "*" and f"def {name}(" not in source] == [], file
    suites = [path.read_text() for path in ROOT.glob("*/*/tests/**/test_conformance.py")]
    assert [name for name in turns.TURNS if not any(f"class {name}(" in source for source in suites)] == []


def test_by_default_every_check_of_the_fast_profile_but_user_patterns_is_tried_somewhere() -> None:
    tried = set()
    for path in ROOT.glob("*/*/tests/test_conformance.py"):
        if path.parts[-3] in ("nnx-deepspeed", "nnx-fairscale"):
            continue  # an environment may lack their engines
        for name, suite in vars(import_path(path)).items():
            if name in turns.TURNS:
                tried |= {check for check in select_checks(suite.only) if turns.TURNS[name].has(check)}
    left = [check.name for check in select_checks() if check.group != "user_patterns" and check not in tried]
    assert left == []


def import_path(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"suite_of_{path.parts[-3]}", path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
