"""Checkpoints whose structure was changed and signed again: refused, or read as their files say.

These are the same 300 cases every time; `nox -s fuzz -- 10000` tries others. See `tests/fuzz`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.edits import Case, Edit
from fuzz.judging import Judge
from fuzz.running import survey
from fuzz.samples import FORMATS

CASES = {"nnx": 60}


@pytest.mark.parametrize("format", FORMATS)
def test_a_changed_checkpoint_is_refused_or_read_as_its_files_say(format: str) -> None:
    if format == "fairscale":
        pytest.importorskip("nnx_fairscale", reason="nnx-fairscale is not installed")
    figures = survey(format, CASES.get(format, 30))
    assert figures.counts["wrong"] == 0, str(figures)
    assert figures.counts["refused"] > 0
    assert figures.counts["right"] + figures.counts["forged"] > 0


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    with Judge("safetensors", tmp_path) as judge:
        yield judge


def test_the_judge_sees_what_it_should(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault is planted in nnx, in the process that judges."""
    from nnx.checkpoint.foreign import safetensors_files
    from nnx.errors import CheckpointError

    longer = Case(0, (Edit("append", 0, where=7),))
    assert judge.judge(Case(0, ())).kind == "right"
    assert judge.judge(longer).kind == "refused"
    original = safetensors_files.read_header

    def broken(path: Path) -> object:
        try:
            return original(path)
        except CheckpointError as error:
            raise KeyError("planted") from error

    def hungry(path: Path) -> object:
        bytearray(200 << 20)
        return original(path)

    def deadly(path: Path) -> object:
        os._exit(3)

    for fault, expected in ((broken, "KeyError"), (hungry, "opening took 200"), (deadly, "with code 3")):
        monkeypatch.setattr(safetensors_files, "read_header", fault)
        judge.stop()
        assert expected in judge.judge(longer).why
