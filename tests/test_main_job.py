"""The main use case end to end: three real trainings and their comparison.

By default its runs are those of a pool. A test marked `full` runs the command, as a user would.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from rich.console import Console

from jobs.main_job import run_gpt

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(600)
STEPS = 4


def train_gpt(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "examples/train_gpt.py", f"--out={out}", *arguments]
    # A width of its own, so that no cell of the table is folded when the test has a narrow terminal.
    environment = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """The job's directory and the losses of its runs by world size: the first trains, the others resume."""
    out = tmp_path_factory.mktemp("train_gpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        from gpt.report import read_losses

        losses = {}
        for devices in (2, 1, 3):
            options = [f"--out={out / str(devices)}", f"--devices={devices}", f"--steps={STEPS}"]
            if losses:
                options.append(f"--resume={out / '2' / 'checkpoints' / f'step-{STEPS // 2}.ckpt'}")
            pool.run(run_gpt, options, world_size=devices)
            losses[devices] = read_losses(out / str(devices) / "losses" / "metrics.csv")
    return out, losses


@pytest.mark.full
def test_the_main_job_ends_well(tmp_path):
    finished = train_gpt(tmp_path, f"--steps={STEPS}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "The resumed losses equal the uninterrupted ones" in finished.stdout
    assert (tmp_path / "losses.png").is_file()


def test_its_resumed_runs_have_the_losses_of_the_uninterrupted_one(runs, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_gpt

    _, losses = runs
    assert train_gpt.RESUMED_ON == (1, 3)
    resumed = {f"resumed on {devices}": losses[devices] for devices in train_gpt.RESUMED_ON}
    assert train_gpt.judge(Console(), losses[2], resumed, tolerance=1e-4) == 0
    assert all([*run.train] == [*range(STEPS // 2 + 1, STEPS + 1)] for run in resumed.values())


def test_its_table_compares_every_step_after_the_resume(runs, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from gpt.report import comparison_table

    _, losses = runs
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table(losses[2], {"resumed on 1": losses[1], "resumed on 3": losses[3]}))
    rows = re.findall(
        r"^│ +(\d+) │ +([\d.]+) │ +([\d.]+) │ +(\S+) │ +([\d.]+) │", console.file.getvalue(), re.MULTILINE
    )
    assert [int(row[0]) for row in rows] == list(range(STEPS // 2 + 1, STEPS + 1))
    for _, uninterrupted, on_one, _, on_three in rows:
        assert float(on_one) == pytest.approx(float(uninterrupted), abs=1e-4)
        assert float(on_three) == pytest.approx(float(uninterrupted), abs=1e-4)


def test_its_curves_are_drawn(runs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from gpt.report import draw

    _, losses = runs
    draw(tmp_path / "losses.png", losses[2], {"resumed on 1": losses[1]}, reference_name="uninterrupted")
    picture = (tmp_path / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000


def test_it_saves_a_directory_in_the_middle_and_at_the_end(runs):
    out, _ = runs
    saved = sorted(out.glob("2/checkpoints/*.ckpt"))
    assert [path.name for path in saved] == [f"step-{STEPS // 2}.ckpt", f"step-{STEPS}.ckpt"]
    assert all((path / "manifest.json").is_file() for path in saved)


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (9e-5, 0), (1e-3, 1), (float("nan"), 1)])
@pytest.mark.parametrize("which", ["train", "val"])
def test_it_fails_when_a_loss_differs_by_more_than_the_tolerance(which, shift, code, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_gpt
    from gpt.report import Losses

    losses = {"train": {1: 5.0, 2: 4.0, 3: 3.0}, "val": {3: 3.5}}
    shifted = losses | {which: {3: losses[which][3] + shift}}
    resumed = {"resumed on 1": Losses(**losses), "resumed on 3": Losses(**shifted)}
    assert train_gpt.judge(Console(), Losses(**losses), resumed, tolerance=1e-4) == code


def test_it_compares_nothing_with_a_run_that_took_no_steps(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from gpt.report import Losses, largest_difference

    with pytest.raises(ValueError, match="the resumed run has 0 steps"):
        largest_difference(Losses({1: 5.0}, {}), Losses({}, {}))


def test_every_global_batch_is_the_same_at_any_world_size(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from gpt.data import GlobalBatches

    def served(world: int, skip: int = 0) -> list[list[int]]:
        shares = [
            GlobalBatches(1000, batches=4, global_batch=12, seed=7, num_replicas=world, rank=rank)
            for rank in range(world)
        ]
        for share in shares:
            share.skip(skip)
        return [[*chain(*parts)] for parts in zip(*shares, strict=True)]

    assert len(served(1)) == 4
    assert served(1) == served(2) == served(3)
    assert served(3, skip=2) == served(1)[2:]


def test_a_batch_that_cannot_be_shared_equally_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from gpt.data import GlobalBatches

    with pytest.raises(ValueError, match=r"12 windows cannot be shared equally by 5 processes\. Choose"):
        GlobalBatches(1000, batches=1, global_batch=12, seed=7, num_replicas=5)


def test_it_refuses_a_training_without_a_middle(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_gpt

    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--steps=1"])
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main()
    assert "1 steps have no middle to save in; give at least 2" in capsys.readouterr().err


@pytest.mark.full
def test_it_says_which_run_failed(tmp_path):
    finished = train_gpt(tmp_path, "--steps=2", "--strategy=no_such_strategy")
    assert finished.returncode == 1
    assert "uninterrupted failed with exit code 1; its error stands above." in finished.stdout
    assert "no_such_strategy" in finished.stderr


@pytest.mark.full  # `test_docs_code.py` runs it on the ranks of a pool
def test_the_script_of_the_readme_trains_saves_and_resumes(tmp_path):
    text = (ROOT / "README.md").read_text()
    script = next(
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Trainer(" in block
    )
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fsdp_auto: 2 ranks on 1 node, cpu over gloo; global batch 16 (2 ranks x 8)" in done.stderr
    assert "nnscaler_zero: 2 ranks on 1 node" in done.stderr
    assert (tmp_path / "last.ckpt" / "manifest.json").is_file()
