"""Checkpoints with a changed structure and right signatures are refused, or read as their files say.

These are the same 300 cases every time; `nox -s fuzz -- 10000` runs others. See `tests/fuzz`.
"""

from __future__ import annotations

import pytest

from fuzz.running import survey
from fuzz.samples import FORMATS

CASES = {"nnx": 60}


@pytest.mark.quick(every=10)
@pytest.mark.parametrize("format", FORMATS)
def test_a_changed_checkpoint_is_refused_or_read_as_its_files_say(format: str) -> None:
    if format == "fairscale":
        pytest.importorskip("nnx_fairscale", reason="nnx-fairscale is not installed")
    figures = survey(format, CASES.get(format, 30))
    assert figures.counts["wrong"] == 0, str(figures)
    assert figures.counts["refused"] > 0
    assert figures.counts["right"] + figures.counts["forged"] > 0
