"""The order of the test files: those that take longest first, so that no core is idle at the end.

Workers of pytest-xdist take whole files, one after the other. A file that starts when the others have nothing
left is waited for. The list has what takes more than ten seconds of CPU, roughly in the order of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = (
    "packages/nnx-fsdp/tests/test_conformance.py",
    "packages/nnx-fairscale/tests/test_conformance.py",
    "packages/nnx-deepspeed/tests/test_conformance.py",
    "packages/nnx-nnscaler/tests/acceptance/test_pipelines.py",
    "tests/test_main_job.py",
    "packages/nnx-ray/tests/test_runs.py",
    "tests/test_resume_matrix.py",
    "examples/tiny_backend/tests/test_conformance.py",
    "packages/nnx-colossalai/tests/acceptance/test_historical.py",
    "packages/nnx-colossalai/tests/test_conformance.py",
    "packages/nnx-nnscaler/tests/test_conformance.py",
    "tests/test_planted_faults.py",
    "packages/nnx-colossalai/tests/acceptance/test_tier_mixes.py",
    "packages/nnx-nnscaler/tests/acceptance/test_losses_equal_one_process.py",
    "packages/nnx-nnscaler/tests/acceptance/test_defects_of_the_original.py",
    "packages/nnx-core/tests/lightning/test_launching.py",
    "packages/nnx-ray/tests/test_bad_input.py",
    "packages/nnx-core/tests/lightning/test_launchers.py",
    "packages/nnx-core/tests/autoload/test_zero_import.py",
    "packages/nnx-core/tests/lightning/test_averaging.py",
    "packages/nnx-core/tests/lightning/test_trainer_checkpoints.py",
    "packages/nnx-core/tests/lightning/test_conformance.py",
    "tests/test_docs_code.py",
    "packages/nnx-nnscaler/tests/acceptance/test_parity_of_models.py",
    "packages/nnx-core/tests/lightning/test_trainer.py",
    "packages/nnx-checkpoint/tests/foreign/test_converting.py",
    "packages/nnx-conformance/tests/test_command.py",
    "packages/nnx-lite/tests/test_lite_strategies.py",
    "packages/nnx-lite/tests/test_lite_pitfalls.py",
    "packages/nnx-colossalai/tests/acceptance/test_resume.py",
    "packages/nnx-checkpoint/tests/test_remote.py",
    "packages/nnx-checkpoint/tests/test_kills.py",
    "packages/nnx-checkpoint/tests/test_damage.py",
    "packages/nnx-fsdp/tests/test_strategies.py",
    "tests/test_doctests.py",
    "packages/nnx-core/tests/lightning/test_exact_resume.py",
    "packages/nnx-fsdp/tests/test_parity.py",
    "packages/nnx-nnscaler/tests/acceptance/test_planted_traps.py",
    "packages/nnx-checkpoint/tests/foreign/test_lightning_sharded.py",
    "packages/nnx-colossalai/tests/acceptance/test_bad_input.py",
    "packages/nnx-core/tests/lightning/test_fabric.py",
)
_PLACES = {str(ROOT / name): place for place, name in enumerate(FILES)}


def ordered(items: Sequence[Any]) -> list[Any]:
    """Tests of the listed files first, in the order of the list; the others as they were collected."""
    return sorted(items, key=lambda item: _PLACES.get(str(item.path), len(FILES)))
