"""Data parallelism imports neither tracer, planner nor code generator, which take a quarter of a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
import nnx_nnscaler.backend
heavy = ("trace", "rules", "cost", "plan.", "codegen", "programs", "compilation", "compiler")
found = {name for name in sys.modules if name.startswith(tuple(f"nnx_nnscaler.{part}" for part in heavy))}
print(*found - {"nnx_nnscaler.ir.program_plan"})  # which is data, and holds placements
"""


@pytest.mark.full
def test_the_backend_imports_nothing_that_plans() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
