"""Calls of torch.distributed that give a warning in a run with shared data."""

from __future__ import annotations

import re
from pathlib import Path

from nnx_core.agree.direct_calls import FUNCTIONS

_SOURCES = Path(__file__).parents[2]


def test_code_that_runs_in_such_a_run_imports_the_functions_by_name() -> None:
    call = re.compile(rf"\bdist\.({'|'.join(FUNCTIONS)})\(")
    for package in ("nnx-checkpoint", "nnx-core", "nnx-nnscaler"):
        for file in (_SOURCES / package / "src").rglob("*.py"):
            assert not call.search(file.read_text(encoding="utf-8")), file
