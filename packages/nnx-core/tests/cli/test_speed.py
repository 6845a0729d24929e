"""The verbs that must answer at once, in fresh processes as a user starts them."""

import resource
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

VERBS = [["list"], ["list", "--all", "--json"], ["show", "fsdp_auto"], ["search", "fsdp"], ["doctor"]]

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


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_verb_never_imports_torch(run_python, verb):
    done = run_python(WITHOUT_TORCH, *verb)
    assert "fsdp_auto" in done.stdout


@pytest.mark.parametrize("verb", [["list"], ["search", "slow", "links"]], ids=" ".join)
def test_listing_and_searching_take_less_than_half_a_second(verb):
    command = shutil.which("nnx", path=sysconfig.get_path("scripts"))
    assert command, "the console script is not installed"
    seconds = []
    while len(seconds) < 10 and min(seconds, default=1.0) >= 0.5:
        # Processor time, which is what it takes where other work does not share the machine.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([command, *verb], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5, seconds


def test_python_dash_m_nnx_is_the_same_command(run_python, tmp_path):
    outputs = [
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path).stdout
        for command in (
            [sys.executable, "-m", "nnx", "list"],
            [str(Path(sysconfig.get_path("scripts")) / "nnx"), "list"],
        )
    ]
    assert outputs[0] == outputs[1]
