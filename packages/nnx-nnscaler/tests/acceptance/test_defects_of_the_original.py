"""The defects that were reproduced in Microsoft's integration are absent here.

The order is that of `shared/facts/nnscaler.md` §5. Tests that are not about programs share compiled ones.
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from jobs.nnscaler_defect_jobs import (
    Strategy,
    evaluate_only,
    files_of,
    fit_and_evaluate,
    losses_of,
    overflow_on_one_rank,
)
from nnx_conformance.pool import JobError, WorkerPool

ALONE: Strategy = ("auto", {})
NAMES = ("nnscaler", "nnscaler_deduped", "nnscaler_dp", "nnscaler_tp", "nnscaler_zero")
EVERY = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Return options of a strategy that compiles new programs."""
    return {"gen_savedir": str(tmp_path / "gen")}


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return options of strategies that reuse the programs of earlier tests, for equal modules and plans."""
    return {"gen_savedir": str(tmp_path_factory.mktemp("gen"))}


@cache
def alone(pool: WorkerPool, **settings: Any) -> dict[str, Any]:
    """Return the result of one plain process."""
    return pool.run(_losses, ALONE, 1, settings, world_size=1)[0]


@cache
def evaluated_alone(pool: WorkerPool, job: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the report of a job in one plain process."""
    return pool.run(job, ALONE, 1, world_size=1)[0]


def together(pool: WorkerPool, strategy: Strategy, devices: int = 2, **settings: Any) -> list[dict[str, Any]]:
    """Return the result of each rank."""
    return pool.run(_losses, strategy, devices, settings, world_size=devices)


def _losses(strategy: Strategy, devices: int, settings: dict[str, Any]) -> dict[str, Any]:
    return losses_of(strategy, devices, **settings)


@pytest.mark.quick(every=5)
@EVERY
def test_validate_after_fit_uses_the_trained_weights_and_a_second_fit_goes_on(
    pool: WorkerPool, sharing: dict[str, Any], name: str
) -> None:
    expected = evaluated_alone(pool, fit_and_evaluate)
    assert expected["after"] == expected["end"] and len(expected["losses"]) == 8
    for seen in pool.run(fit_and_evaluate, (name, sharing), 2, world_size=2):
        assert seen["after"] == seen["end"]
        assert seen["end"] == pytest.approx(expected["end"], abs=1e-6)
        assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-6)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("change", [{"seed": 2}, {"model": "Louder"}])
def test_programs_are_not_reused_for_other_code_nor_with_other_weights(
    pool: WorkerPool, options: dict[str, Any], change: dict[str, Any]
) -> None:
    for settings in ({}, change, {}):
        expected = alone(pool, **settings)["losses"]
        for seen in together(pool, ("nnscaler", options), **settings):
            assert seen["losses"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_programs_are_not_reused_for_another_policy(pool: WorkerPool, options: dict[str, Any]) -> None:
    directory = options["gen_savedir"]
    for policy in ("data", "tp", "data"):
        together(pool, ("nnscaler", {**options, "policy": policy}))
    programs = [text for path, text in files_of(directory).items() if path.endswith("forward.py")]
    assert len(programs) >= 2
    assert len(set(programs)) == len(programs)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", ["nnscaler_dp", "nnscaler_tp", "nnscaler_zero"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    pool: WorkerPool, sharing: dict[str, Any], name: str
) -> None:
    for scales, steps in pool.run(overflow_on_one_rank, (name, sharing), 2, world_size=2):
        assert scales == [8.0, 4.0, 4.0, 4.0]
        assert set(steps) == {3.0}


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        (("nnscaler_tp", 2), ("nnscaler_dp", 2)),
        (("nnscaler_dp", 2), ("nnscaler_tp", 1)),
        (("nnscaler", 2), ("nnscaler_zero", 4)),
        (("ddp", 2), ("nnscaler_tp", 2)),
        (("nnscaler_deduped", 2), ("ddp", 2)),
    ],
)
def test_another_plan_world_or_strategy_resumes_without_a_merge(
    pool: WorkerPool,
    sharing: dict[str, Any],
    tmp_path: Path,
    saved_by: tuple[str, int],
    resumed_by: tuple[str, int],
) -> None:
    def strategy(name: str) -> Strategy:
        return (name, sharing if name.startswith("nnscaler") else {})

    path = str(tmp_path / "last.ckpt")
    saved = together(pool, strategy(saved_by[0]), saved_by[1], save=path, max_epochs=1)
    resumed = together(pool, strategy(resumed_by[0]), resumed_by[1], resume=path, max_epochs=2)
    expected = alone(pool, max_epochs=2)["losses"]
    assert saved[0]["losses"] == pytest.approx(expected[:4], abs=1e-6)
    for seen in resumed:
        assert seen["losses"] == pytest.approx(expected[4:], abs=1e-5)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", ["nnscaler_deduped", "nnscaler_dp", "nnscaler_tp", "nnscaler_zero"])
def test_deduped_stores_each_element_once(
    pool: WorkerPool, sharing: dict[str, Any], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "last.ckpt"
    together(pool, (name, sharing), save=str(path))
    tensors = nnx_checkpoint.open_checkpoint(path).tensors
    ideal = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in tensors.values())
    stored = sum(p.box.numel * entry.dtype.itemsize for entry in tensors.values() for p in entry.pieces)
    assert stored == ideal


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", ["nnscaler_deduped", "nnscaler_tp"])
def test_saving_weights_only_saves_no_optimizer(
    pool: WorkerPool, sharing: dict[str, Any], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "weights.ckpt"
    together(pool, (name, sharing), save=str(path), save_weights_only=True)
    names = list(nnx_checkpoint.open_checkpoint(path).tensors)
    assert names and not [each for each in names if each.startswith("optim")]


@pytest.mark.full
def test_sgd_resumes_and_merges(pool: WorkerPool, sharing: dict[str, Any], tmp_path: Path) -> None:
    from nnx_nnscaler import NnScalerStrategy

    path, merged = tmp_path / "last.ckpt", tmp_path / "merged.ckpt"
    settings = {"optimizer": "sgd"}
    saved = together(pool, ("nnscaler_tp", sharing), save=str(path), **settings)
    expected = alone(pool, max_epochs=2, **settings)["losses"]
    for seen in together(pool, ("nnscaler_zero", sharing), resume=str(path), max_epochs=2, **settings):
        assert seen["losses"] == pytest.approx(expected[4:], abs=1e-5)
    NnScalerStrategy.merge_checkpoint([path], merged)
    loaded = torch.load(merged, weights_only=True)
    assert {k: v.tolist() for k, v in loaded["state_dict"].items()} == {
        k: v.tolist() for k, v in saved[0]["weights"].items()
    }
    assert "momentum_buffer" in loaded["optimizer_states"][0]["state"][0]


@pytest.mark.quick(every=7)
@EVERY
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_two_param_groups_train_and_are_clipped(
    pool: WorkerPool, sharing: dict[str, Any], name: str, algorithm: str
) -> None:
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    expected = alone(pool, **settings)["losses"]
    assert expected != pytest.approx(alone(pool)["losses"], abs=1e-5), "nothing was clipped"
    for seen in together(pool, (name, sharing), **settings):
        assert seen["losses"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.quick(every=5)
@EVERY
def test_names_stay_and_layers_can_be_used_outside_the_forward(
    pool: WorkerPool, sharing: dict[str, Any], name: str
) -> None:
    expected = alone(pool, model="Reaching")
    for seen in together(pool, (name, sharing), model="Reaching"):
        assert seen["names"] == ["first.weight", "first.bias", "second.weight", "second.bias"]
        assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        for key, value in expected["weights"].items():
            torch.testing.assert_close(seen["weights"][key], value, atol=1e-5, rtol=0)


@pytest.mark.quick(every=5)
@EVERY
def test_validation_takes_the_eval_branch(pool: WorkerPool, sharing: dict[str, Any], name: str) -> None:
    expected = alone(pool, model="Moody")
    assert expected["validated"][0] > 10 * expected["losses"][-1]
    for seen in together(pool, (name, sharing), model="Moody"):
        assert seen["validated"] == pytest.approx(expected["validated"], rel=1e-5)


@pytest.mark.quick(every=7)
@EVERY
@pytest.mark.parametrize("last", [4, 2])
def test_a_smaller_last_batch_works(pool: WorkerPool, sharing: dict[str, Any], name: str, last: int) -> None:
    settings = {"samples": 16 + last}
    expected = alone(pool, **settings)["losses"]
    assert len(expected) == 3
    for seen in together(pool, (name, sharing), **settings):
        assert seen["losses"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("name", ["nnscaler", "nnscaler_tp"])
def test_a_last_batch_that_no_unit_can_split_works(
    pool: WorkerPool, sharing: dict[str, Any], name: str
) -> None:
    """15 samples: the last batch has 7, which two ranks of a unit cannot share."""
    expected = alone(pool, samples=15)["losses"]
    for seen in together(pool, (name, sharing), samples=15):
        assert seen["losses"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.full  # scripts of other strategies do so in every run
def test_a_plain_script_starts_its_own_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            from lightning.pytorch import Trainer
            from lightning.pytorch.demos.boring_classes import BoringModel

            class Model(BoringModel):
                def on_train_end(self):
                    open(f"{self.global_rank}.txt", "w").write(str(self.trainer.world_size))

            if __name__ == "__main__":
                Trainer(strategy="nnscaler", accelerator="cpu", devices=2, max_steps=2, limit_val_batches=1,
                        logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(Model())
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["2", "2"]


@pytest.mark.quick(every=5)
@EVERY
def test_validate_and_predict_need_no_training_loader(
    pool: WorkerPool, sharing: dict[str, Any], name: str
) -> None:
    expected = evaluated_alone(pool, evaluate_only)
    for seen in pool.run(evaluate_only, (name, sharing), 2, world_size=2):
        assert seen["validated"] == pytest.approx(expected["validated"], abs=1e-6)
        rows = 8 if name in ("nnscaler", "nnscaler_deduped", "nnscaler_tp") else 4
        assert seen["shapes"] == [(rows, 8)] * 2


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "16-mixed", "64-true"])
@pytest.mark.parametrize("name", ["nnscaler_tp", "nnscaler_zero"])
def test_the_precision_flag_works_on_cpu(
    pool: WorkerPool, sharing: dict[str, Any], name: str, precision: str
) -> None:
    expected = alone(pool, precision=precision)["losses"]
    for seen in together(pool, (name, sharing), precision=precision):
        assert seen["losses"] == pytest.approx(expected, rel=2e-2)


@pytest.mark.quick(every=5)
@EVERY
def test_gen_savedir_holds_no_weights_and_no_pickles(
    pool: WorkerPool, options: dict[str, Any], name: str
) -> None:
    together(pool, (name, options))
    files = files_of(options["gen_savedir"])
    assert {path.rpartition(".")[2] for path in files} <= {"py", "json", "txt", "lock"}
    assert bool(files) == (name in ("nnscaler", "nnscaler_deduped", "nnscaler_tp"))
    assert not any(text.startswith(b"\x80") or b"PK\x03\x04" in text for text in files.values())


def test_a_program_that_somebody_changed_is_refused_and_reuse_says_what_then(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    expected = alone(pool)["losses"]
    together(pool, ("nnscaler", options))
    for program in Path(options["gen_savedir"]).rglob("forward.py"):
        program.write_text(program.read_text() + "\nraise SystemExit('run')\n")
    with pytest.raises(JobError, match=r"forward\.py"):
        together(pool, ("nnscaler", options))
    for reuse in ("moo", "match", "override"):
        for seen in together(pool, ("nnscaler", {**options, "reuse": reuse})):
            assert seen["losses"] == pytest.approx(expected, abs=1e-6)


def test_the_cause_of_a_failed_compilation_reaches_every_rank(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    with pytest.raises(JobError) as caught:
        together(pool, ("nnscaler", {**options, "memory_limit": 100}))
    assert sorted(caught.value.failures) == [0, 1]
    for failure in caught.value.failures.values():
        assert "What helps: more ranks for each unit (plan_ngpus, now 2)" in failure


def test_what_cannot_be_traced_trains_whole_and_its_line_is_named(
    pool: WorkerPool, options: dict[str, Any]
) -> None:
    expected = alone(pool, model="Branching")["losses"]
    for seen in together(pool, ("nnscaler", options), model="Branching"):
        assert seen["losses"] == pytest.approx(expected, abs=1e-6)
    output = "".join(pool.output)
    assert "nnscaler_defect_jobs.py" in output
    assert "x.sum() > -1e9" in output
