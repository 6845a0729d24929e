"""The patch that docs/upstream offers to Lightning, applied to a copy of the installed version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PATCH = Path(__file__).parents[1] / "docs" / "upstream" / "lightning-strategies.patch"
NAMES = """
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP

def of_trainer(registry):
    from lightning.pytorch.strategies.ddp import DDPStrategy
    registry.register("mine", DDPStrategy, description="of a package")

def of_fabric(registry):
    registry.register("mine", FabricDDP)

def broken(registry):
    raise ImportError("no engine here")
"""
ENTRY_POINTS = """
[lightning.pytorch.strategies]
aa_broken = names_of_a_package:broken
mine = names_of_a_package:of_trainer
[lightning.fabric.strategies]
mine = names_of_a_package:of_fabric
"""
USE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from lightning.pytorch import Trainer
from lightning.fabric import Fabric
assert any("aa_broken" in str(w.message) and "no engine here" in str(w.message) for w in caught)
strategy = Trainer(strategy="mine", accelerator="cpu", devices=1, logger=False).strategy
print(type(strategy).__module__, type(Fabric(strategy="mine", accelerator="cpu").strategy).__module__)
"""


@pytest.mark.full
def test_with_the_patch_lightning_knows_the_names_of_an_installed_package(tmp_path: Path) -> None:
    spec = find_spec("lightning")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "lightning")
    subprocess.run(["git", "apply", "-p2", PATCH], cwd=tmp_path, check=True)
    (tmp_path / "names_of_a_package.py").write_text(NAMES)
    metadata = tmp_path / "names_of_a_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: names-of-a-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NNX_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["lightning.pytorch.strategies.ddp", "lightning.fabric.strategies.ddp"]
