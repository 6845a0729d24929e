"""The example of a third-party plugin is complete: it is found, trains, and its checkpoint travels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import tiny_backend_jobs as jobs

TINY = Path(__file__).parents[1] / "examples/tiny_backend"


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(TINY / "src")
    monkeypatch.syspath_prepend(TINY.parent)


def test_it_is_found_by_its_entry_point_without_importing_torch(tmp_path):
    # What `pip install` would leave, without pip.
    metadata = tmp_path / "nnx_tiny-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nnx-tiny\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[nnx]\ntiny = nnx_tiny.plugin\n")
    assert 'tiny = "nnx_tiny.plugin"' in (TINY / "pyproject.toml").read_text()
    script = (
        "import sys; from nnx.cli import main\n"
        "sys.argv = ['nnx', 'show', 'tiny', '--json']\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    path = os.pathsep.join([str(TINY / "src"), str(tmp_path)])
    command = [sys.executable, "-c", script]
    finished = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    shown = json.dumps(json.loads(finished.stdout))
    assert "nnx_tiny.backend:TinyBackend" in shown
    assert "bucket_megabytes" in shown


def test_it_trains_as_one_process_does_and_fsdp_reads_its_checkpoint(pool, tmp_path):
    alone = pool.run(jobs.train, "tiny", tmp_path / "alone", world_size=1)[0]
    ranks = pool.run(jobs.train, "tiny", tmp_path / "both", world_size=2)
    assert len(alone["train"]) == 2 * jobs.STEPS
    assert len(set(alone["train"])) == 2 * jobs.STEPS
    for rank in ranks:
        assert rank["train"] == pytest.approx(alone["train"], abs=1e-5)
    resumed = pool.run(jobs.train, "fsdp_auto", tmp_path, tmp_path / "both/last.ckpt", world_size=2)
    for rank in resumed:
        assert rank["val"] == pytest.approx(ranks[0]["val"], abs=1e-6)


def test_it_refuses_an_option_out_of_range(pool):
    assert pool.run(jobs.refused_option, world_size=1) == [
        "bucket_megabytes=0 is not a positive size. Pass, say, 25."
    ]
