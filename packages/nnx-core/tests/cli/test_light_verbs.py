"""The verbs that must answer at once, in fresh processes as a user starts them."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

VERBS = [["list"], ["list", "--all", "--json"], ["show", "fsdp_auto"], ["search", "fsdp"], ["doctor"]]
CHOICE = [
    "choose",
    "--engine",
    "no",
    "--failures",
    "no",
    "--fit",
    "all",
    "--links",
    "fast",
    "--layers",
    "blocks",
]

WITHOUT_TORCH = """
import sys
from nnx_checkpoint.cli.command import main
sys.argv = ["nnx", *sys.argv[1:]]
try:
    main()
finally:
    verbs = {"nnx_checkpoint.cli.files", "nnx_checkpoint.cli.inspection", "nnx_checkpoint.cli.verification"}
    heavy = {"torch", "lightning", "pytorch_lightning", "numpy", *verbs} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("verb", [*VERBS, CHOICE], ids=" ".join)
def test_the_verb_never_imports_torch(run_python, verb):
    done = run_python(WITHOUT_TORCH, *verb)
    assert "fsdp_auto" in done.stdout


@pytest.mark.full
def test_python_dash_m_nnx_is_the_same_command(run_python, tmp_path):
    outputs = [
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path).stdout
        for command in (
            [sys.executable, "-m", "nnx", "list"],
            [str(Path(sysconfig.get_path("scripts")) / "nnx"), "list"],
        )
    ]
    assert outputs[0] == outputs[1]
