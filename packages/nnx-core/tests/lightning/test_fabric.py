"""The Fabric adapter on real processes: loops, methods and checkpoints equal those of one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nnx_conformance import Subject
from nnx_conformance import training as conformance
from nnx_conformance.pool import WorkerPool
from nnx_conformance.subject import REFERENCE
from nnx_test_helpers.fabric_jobs import (
    accumulate,
    adversarial,
    build_empty,
    call_fabric_collectives,
    call_methods,
    filter_and_raw,
    load,
    load_trainers,
    modules_of_backward,
    resume_flat_masters,
    resume_in_trainer,
    save,
    setup_apart,
    setup_together,
)
from nnx_test_helpers.lightning_jobs import OPTIONS
from nnx_test_helpers.resume_jobs import run_cell
from nnx_test_helpers.training import Run


@pytest.mark.full
def test_setup_with_an_optimizer_built_before_trains_like_one_process(pool: WorkerPool) -> None:
    expected = pool.run(setup_together, 1, world_size=1)[0]
    for devices in (2, 3):
        for report in pool.run(setup_together, devices, world_size=devices):
            assert report["losses"] == pytest.approx(expected["losses"], abs=1e-5)
            assert report["lr"] == expected["lr"] == pytest.approx(0.02 / 4)
            assert report["sharded"] == 23 and report["holds"] and report["names"]


def test_setup_of_module_and_optimizer_one_after_the_other_trains_like_one_process(pool: WorkerPool) -> None:
    expected = pool.run(setup_apart, 1, world_size=1)[0]
    for losses in pool.run(setup_apart, 2, world_size=2):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.full  # the checks `fabric_accumulation` and `fabric_clipping_by_norm` try it
def test_accumulation_and_clipping_equal_one_process_and_return_the_norm(pool: WorkerPool) -> None:
    expected = pool.run(accumulate, 1, world_size=1)[0]
    for devices in (2, 3):
        for report in pool.run(accumulate, devices, world_size=devices):
            assert report["losses"] == pytest.approx(expected["losses"], abs=1e-5)
            assert report["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert expected["norms"][0] > 0.2 and expected["norms"][1] == pytest.approx(0.1, rel=1e-4)
    assert expected["norms"][-1] == pytest.approx(0.01)


def test_the_engine_is_told_the_users_module_at_each_backward_also_where_fabric_names_none(
    pool: WorkerPool,
) -> None:
    assert pool.run(modules_of_backward, 2, world_size=2) == [[[0], [0, 1], [1]]] * 2


def test_an_engine_whose_optimizers_hold_parameters_of_its_own_saves_and_resumes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    loop, subject = conformance.Loop(), Subject("jobs.engines:FlatMasters")
    expected = pool.run(conformance.train, REFERENCE, loop, world_size=1)[0]
    for seen in pool.run(resume_flat_masters, subject, loop, str(tmp_path / "flat.ckpt"), world_size=2):
        assert seen.losses == pytest.approx(expected.losses, abs=1e-5)


@pytest.mark.full
def test_two_models_with_an_optimizer_each_are_sharded_trained_saved_and_resumed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "gan.ckpt")
    expected = pool.run(adversarial, 1, str(tmp_path / "one.ckpt"), False, 4, world_size=1)[0]
    for report in pool.run(adversarial, 2, path, False, world_size=2):
        assert report["sharded"] == {"generator": True, "critic": True}
        assert report["losses"] == pytest.approx(expected["losses"][:4], abs=1e-5)
    for devices in (2, 3):
        for report in pool.run(adversarial, devices, path, True, world_size=devices):
            assert report["losses"] == pytest.approx(expected["losses"][4:], abs=1e-5)
            assert report["step"] == 4


def test_training_step_and_marked_methods_run_through_the_engine(pool: WorkerPool) -> None:
    expected = pool.run(call_methods, 1, world_size=1)[0]
    for report in pool.run(call_methods, 2, world_size=2):
        assert report["losses"] == pytest.approx(expected["losses"], abs=1e-5)


def test_a_model_made_empty_gets_equal_real_weights_everywhere(pool: WorkerPool) -> None:
    reports = pool.run(build_empty, 2, world_size=2)
    for report in reports:
        assert report["meta"] == {"meta"} and report["real"] == {"cpu"}
        assert report["improves"]
        assert len(report["norms"]) == 2 and all(norm > 1.0 for norm in report["norms"].values())
    assert len({report["digest"] for report in reports}) == 1


def test_collectives_through_fabric(pool: WorkerPool) -> None:
    for results in pool.run(call_fabric_collectives, world_size=3):
        assert (results["mean"], results["sum"], results["int sum"]) == ([2.0, 10.0], [6.0, 30.0], 6)
        assert results["fabric gather"] == [0, 1, 2]
        assert results["fabric broadcast"] == [2]
        assert results["fabric reduce"] == 1.0
        assert (results["all"], results["any"], results.get("pair", 1.5)) == (False, True, 1.5)


# --- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("devices", [2, 3])
def test_a_run_resumes_at_another_world_size_with_the_users_own_objects(
    pool: WorkerPool, tmp_path: Path, devices: int
) -> None:
    path = str(tmp_path / "state.ckpt")
    whole = pool.run(save, 1, str(tmp_path / "whole.ckpt"), 6, world_size=1)[0].losses
    saved = pool.run(save, 2, path, world_size=2)[0]
    assert saved.losses == pytest.approx(whole[:3], abs=1e-5)
    for seen, objects in pool.run(load, devices, path, world_size=devices):
        assert (seen.weights, seen.optimizer) == (saved.weights, saved.optimizer)
        assert seen.losses == pytest.approx(whole[3:], abs=1e-5)
        assert objects["step"] == 3 and objects["rest"] == ["config"]
        config: Any = objects["config"]
        assert (config["name"], config["sizes"], config["table"].tolist()) == ("x", (1, 2), [0, 1, 2])


@pytest.mark.full
def test_trainers_checkpoint_resumes_in_fabric_and_fabrics_in_trainer(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "trainer.ckpt")
    whole = pool.run(save, 1, str(tmp_path / "whole.ckpt"), 6, 1.0, world_size=1)[0].losses
    saved = pool.run(run_cell, Run(options=OPTIONS, steps=6, save=path, save_at=3), 3, world_size=2)[0]
    for seen in pool.run(load_trainers, 3, path, world_size=3):
        assert seen.weights == saved.weights
        assert seen.losses == pytest.approx(saved.losses[3:], abs=1e-5)
    other = str(tmp_path / "fabric.ckpt")
    pool.run(save, 2, other, 3, 1.0, world_size=2)
    for losses in pool.run(resume_in_trainer, Run(options=OPTIONS, steps=3, devices=3), other, world_size=3):
        assert losses == pytest.approx(whole[3:], abs=1e-5)


@pytest.mark.full
def test_filters_strictness_and_raw_state_dicts(pool: WorkerPool, tmp_path: Path) -> None:
    paths = str(tmp_path / "filtered.ckpt"), str(tmp_path / "raw.pt")
    for report in pool.run(filter_and_raw, 2, *paths, world_size=2):
        assert "model.embed.weight" in report["names"]
        assert not [name for name in report["names"] if "frozen" in name]
        assert "missing in the checkpoint: frozen.weight, frozen.bias" in report["all of it"]
        assert report["without the frozen layer"] is True
        assert "has nothing under the key 'other'" in report["key True"] or "frozen" in report["key True"]
        assert report["key False"] == "loaded"
        assert "has nothing under the key 'critic'" in report["another model's key"]
        assert report["raw"]
