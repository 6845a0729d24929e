"""DeepSpeed's directories: selection of a save, and missing, damaged, malicious or unsupported files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint as storage
from nnx_core.errors import CheckpointError
from nnx_deepspeed.checkpoints import DeepSpeed

HOME = Path(__file__).parent / "fixtures" / "deepspeed"
Edit = Callable[[Path, Callable[[Any], None]], None]


# --- which tag ------------------------------------------------------------------------------------


def test_one_of_several_saves_is_chosen_by_latest_by_tag_or_by_path(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_two_tags")
    assert storage.open_checkpoint(path).provenance["tag"] == "global_step6"
    assert DeepSpeed().open(path, tag="global_step3").objects["trainer"]["global_step"] == 3
    assert storage.open_checkpoint(path / "global_step3").objects["trainer"]["global_step"] == 3
    (path / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"2 DeepSpeed checkpoints \(global_step3, global_step6\)"):
        storage.open_checkpoint(path)
    shutil.rmtree(path / "global_step3")
    assert storage.open_checkpoint(path).provenance["tag"] == "global_step6"


def test_a_latest_file_that_names_no_save_is_refused(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_two_tags")
    (path / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="no DeepSpeed checkpoint of tag 'global_step9'"):
        storage.open_checkpoint(path)


def test_other_directories_are_not_taken_for_deepspeeds(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("x")
    (tmp_path / "sub").mkdir()
    assert not DeepSpeed().guess_can_open(tmp_path)
    assert not DeepSpeed().guess_can_open(tmp_path / "latest")
    assert not DeepSpeed().guess_can_open(tmp_path / "nothing")


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("zero1_world3_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero1_world3_fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("zero1_world3_fp32", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("zero2_world2_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3_world2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3_world2_fp32", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("zero3_world2_fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_of_a_rank_is_named(name: str, lost: str, copy: Callable[[str], Path]) -> None:
    path = copy(name)
    next(path.rglob(lost)).unlink()
    with pytest.raises(CheckpointError, match=rf"{lost}' is missing|{lost}' are missing"):
        DeepSpeed().open(path)


def test_all_optimizer_files_missing_are_named(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_sgd")
    for file in path.rglob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_0.*zero_pp_rank_1.*are missing"):
        storage.open_checkpoint(path)


def test_files_of_two_saves_are_not_mixed(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_two_tags")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(path / "global_step3" / name, path / "global_step6" / name)
    with pytest.raises(CheckpointError, match=r"have taken \[6.0, 3.0\] steps; a save was interrupted"):
        storage.open_checkpoint(path)


def test_a_file_left_by_a_save_of_more_ranks_is_refused(copy: Callable[[str], Path], edit: Edit) -> None:
    path = copy("zero2_world2_sgd")
    stale = HOME / "zero1_world3_fp32" / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(stale, path / "global_step3")
    for file in path.rglob("*rank_[01]*optim_states.pt"):
        edit(file, lambda state: None)
    with pytest.raises(CheckpointError, match=r"missing|of another save"):
        storage.open_checkpoint(path)


def test_two_files_of_one_rank_are_refused(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_bf16") / "global_step3"
    shutil.copy(
        path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        path / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(CheckpointError, match="two optimizer files of rank 1"):
        storage.open_checkpoint(path)


@pytest.mark.parametrize("pattern", ["*model_states.pt", "*rank_1*optim_states.pt"])
def test_a_truncated_file_is_named(pattern: str, copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_sgd")
    file = next(path.rglob(pattern))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=file.name):
        storage.open_checkpoint(path)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "executed"))


@pytest.mark.parametrize("pattern", ["*model_states.pt", "*rank_1*optim_states.pt"])
def test_a_malicious_file_is_refused_and_not_executed(
    pattern: str, copy: Callable[[str], Path], tmp_path: Path, edit: Edit
) -> None:
    path = copy("zero2_world2_sgd")
    file = next(path.rglob(pattern))
    edit(file, lambda state: state.update(evil=Payload(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match=file.name):
        storage.open_checkpoint(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("pattern", ["zero/optimizer_state.pt", "zero/inner.weight/exp_avg.pt"])
def test_a_malicious_file_of_a_universal_checkpoint_is_not_executed(
    pattern: str, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copy("zero2_world2_bf16_universal")
    torch.save({"param": Payload(tmp_path / "executed")}, next(path.rglob(pattern)))
    with pytest.raises(CheckpointError, match=Path(pattern).name):
        storage.open_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_objects_of_the_caller_need_trust_and_are_restored_with_it(
    copy: Callable[[str], Path], edit: Edit
) -> None:
    path = copy("zero3_world2_fp32")
    for file in path.rglob("*model_states.pt"):
        edit(file, lambda state: state.update(schedule=storage.TensorEntry("x", (), "float32", ())))
    with pytest.raises(CheckpointError, match="weights_only=False"):
        storage.open_checkpoint(path)
    trusted, plain = storage.open_checkpoint(path, weights_only=False), HOME / "zero3_world2_fp32"
    assert trusted.objects["trainer"]["schedule"].name == "x"
    safe = storage.open_checkpoint(plain)
    for key in safe.tensors:
        torch.testing.assert_close(trusted.read(key), safe.read(key), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_00-model_00-model_states.pt",
        "expert_0_mp_rank_00_model_states.pt",
        "layer_0_expert_0_mp_rank_00_model_states.pt",
    ],
)
def test_models_split_in_other_ways_are_refused(name: str, copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_sgd")
    (path / "global_step3" / name).touch()
    with pytest.raises(CheckpointError, match=f"{name}' belongs to a model that was split"):
        storage.open_checkpoint(path)


def test_tensors_that_were_offloaded_to_nvme_are_refused(copy: Callable[[str], Path]) -> None:
    path = copy("zero3_world2_fp32")
    (path / "global_step3" / "offloaded_tensors").mkdir()
    with pytest.raises(CheckpointError, match="offloaded to NVMe"):
        storage.open_checkpoint(path)


def test_experts_with_groups_of_their_own_are_refused(copy: Callable[[str], Path], edit: Edit) -> None:
    path = copy("zero2_world2_sgd")
    for file in path.rglob("*optim_states.pt"):
        edit(file, lambda state: state["optimizer_state_dict"].update(partition_count=[2, 1]))
    with pytest.raises(CheckpointError, match="experts have groups of their own"):
        storage.open_checkpoint(path)


def test_state_that_does_not_follow_the_flat_parameters_is_refused(
    copy: Callable[[str], Path], edit: Edit
) -> None:
    path = copy("zero2_world2_sgd")

    def factor(state: Any) -> None:
        for entry in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["row_var"] = torch.zeros(3)

    for file in path.rglob("*optim_states.pt"):
        edit(file, factor)
    with pytest.raises(CheckpointError, match=r"'row_var'.*shape \(3,\)"):
        storage.open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(group_paddings=[1, 1]), "partitions of group 0 have sizes"),
        (lambda s: s.update(single_partition_of_fp32_groups=[]), "with 2 flat groups"),
        (lambda s: s.pop("partition_count"), "differs from the format of DeepSpeed: KeyError"),
        (lambda s: s.update(zero_stage="?"), "differs from the format of DeepSpeed: ValueError"),
        (
            lambda s: s.update(
                single_partition_of_fp32_groups=[t[:2] for t in s["single_partition_of_fp32_groups"]],
                group_paddings=[40, 4],
            ),
            "elements, expected at least",
        ),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    change: Callable[[Any], None], message: str, copy: Callable[[str], Path], edit: Edit
) -> None:
    path = copy("zero2_world2_sgd")
    edit(next(path.rglob("*rank_0_*optim_states.pt")), lambda state: change(state["optimizer_state_dict"]))
    with pytest.raises(CheckpointError, match=message):
        storage.open_checkpoint(path)


def test_a_model_file_without_a_model_is_refused(copy: Callable[[str], Path]) -> None:
    path = copy("zero0_world2")
    torch.save({"other": 1}, path / "global_step3" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="has no entry 'module'"):
        storage.open_checkpoint(path)


def test_a_universal_parameter_of_another_shape_is_refused(copy: Callable[[str], Path]) -> None:
    path = copy("zero3_world2_fp32_universal")
    torch.save(torch.zeros(5), next(path.rglob("zero/inner.weight/fp32.pt")))
    with pytest.raises(CheckpointError, match=r"'inner.weight' has not its shape \(7, 7\)"):
        storage.open_checkpoint(path)
