"""DeepSpeed's directories: every file in `fixtures/deepspeed` was written by DeepSpeed 0.19.8 itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import nnx.checkpoint as storage
from nnx.canonical import stored_optimizer_states
from nnx.checkpoint.files import FileReader
from nnx.checkpoint.foreign.deepspeed import DeepSpeed
from nnx.checkpoint.foreign.torch_file import FileTensor, Inert, load_torch_file
from nnx.errors import CheckpointError

FIXTURES = Path(__file__).parent / "fixtures"
HOME = FIXTURES / "deepspeed"
ALL = sorted(path.name for path in HOME.iterdir())
ZERO = [name for name in ALL if not name.startswith("zero0")]
PLAIN = [name for name in ALL if "lightning" not in name]
GROUPS = [["embed.weight", "inner.weight"], ["inner.bias", "last.weight", "last.bias"]]


def script() -> ModuleType:
    """The script that made the fixtures: it has the model and the data."""
    spec = importlib.util.spec_from_file_location("make_deepspeed", FIXTURES / "make_deepspeed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = script()


def expected(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / "deepspeed_expected" / f"{name}.safetensors")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        return Path(shutil.copytree(HOME / name, tmp_path / name))

    return made


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change what is in a file of torch.save; DeepSpeed's own objects are left out of it, or are numbers."""

    def real(value: Any) -> Any:
        if isinstance(value, FileTensor):
            return value.read()
        if isinstance(value, Inert):
            return value.arguments[0] if value.arguments else None
        if isinstance(value, dict):
            return {key: real(item) for key, item in value.items()}
        if isinstance(value, list):
            return [real(item) for item in value]
        return value

    state = real(load_torch_file(path, inert=("deepspeed.",)))
    change(state)
    torch.save(state, path)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZERO)
def test_masters_and_moments_are_those_that_deepspeed_itself_gathers(name: str) -> None:
    stored = storage.open_checkpoint(HOME / name)
    assert stored.format == "deepspeed"
    wanted = {k: v for k, v in expected(name).items() if not k.startswith(("next.", "losses"))}
    assert len(wanted) >= 10
    for key, value in wanted.items():
        logical = key if key.startswith("model.") else key.replace("optim.", "optim.0.state.", 1)
        torch.testing.assert_close(stored.read(logical), value, rtol=0, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_buffers_frozen_and_tied_parameters_are_there(name: str) -> None:
    stored = storage.open_checkpoint(HOME / name)
    prefix = "model.net." if "lightning" in name else "model."
    assert stored.aliases == {f"{prefix}tied.weight": f"{prefix}embed.weight"}
    assert stored.read(f"{prefix}scale").tolist() == [2.0, 0.5, 1.5]
    assert stored.read(f"{prefix}count").item() == 3
    torch.manual_seed(3)
    frozen = MADE.make_model().frozen.weight.detach()
    found = stored.read(f"{prefix}frozen.weight")
    torch.testing.assert_close(found, frozen.to(found.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", ZERO)
def test_param_groups_keep_their_parameters_and_hyper_parameters(name: str) -> None:
    stored = storage.open_checkpoint(HOME / name)
    (optimizer,) = stored.objects["optim"]
    prefix = "net." if "lightning" in name else ""
    assert [group["params"] for group in optimizer["groups"]] == [
        [f"{prefix}{parameter}" for parameter in group] for group in GROUPS
    ]
    if "elastic" not in name:
        assert [group["weight_decay"] for group in optimizer["groups"]] == [0.1, 0.0]
        assert [group["initial_lr"] for group in optimizer["groups"]] == (
            [0.1, 0.05] if "sgd" in name else [0.01, 0.05]
        )


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_caller_and_the_engine_saved_is_kept(name: str) -> None:
    stored = storage.open_checkpoint(HOME / name)
    steps = 6 if "two_tags" in name else 3
    trainer = stored.objects["trainer"]
    assert trainer["note"] == {"epoch": steps // 3 - 1, "names": ["a", "b"]}
    assert trainer["global_step"] == steps and trainer["deepspeed"]["global_steps"] == steps
    assert trainer["lr_schedulers"][0]["last_epoch"] == steps
    assert stored.provenance["zero_stage"] == (2 if name.startswith("zero2") else int(name[4]))
    assert stored.world_size == (3 if "world3" in name else 2)


def continued(name: str) -> dict[str, Tensor]:
    """One more step under plain torch, on the same data, in one process."""
    stored = storage.open_checkpoint(HOME / name)
    model: nn.Module = MADE.make_model()
    model.load_state_dict({key: stored.read(f"model.{key}") for key in model.state_dict()})
    case = MADE.CASES[name]
    optimizer = MADE.optimizer_of(model, case)
    (state,) = stored_optimizer_states(stored) or ()
    numbers = {name: i for i, name in enumerate(n for group in GROUPS for n in group)}
    optimizer.load_state_dict(
        {
            "state": {
                numbers.get(parameter, parameter): {k: v.stored.read(v.key) for k, v in values.items()}
                for parameter, values in state["state"].items()
            },
            "param_groups": [
                {**group, "params": [numbers.get(parameter, parameter) for parameter in group["params"]]}
                for group in state["param_groups"]
            ],
        }
    )
    world, step = case["world"], 3 * case.get("tags", 1)
    losses = [model(MADE.batch_of(step, rank)).pow(2).mean() for rank in range(world)]
    (sum(losses) / world).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize(
    "name", [name for name in PLAIN if not any(part in name for part in ("bf16", "elastic", "universal"))]
)
def test_the_next_step_in_plain_torch_is_deepspeeds_own_next_step(name: str) -> None:
    wanted = expected(name)
    for key, value in continued(name).items():
        torch.testing.assert_close(value, wanted[f"next.model.{key}"], rtol=0, atol=1e-6)
        assert not torch.equal(value, wanted[f"model.{key}"])


@pytest.mark.parametrize("name", [name for name in ZERO if "lightning" in name])
def test_trainer_resumes_and_has_the_losses_that_deepspeed_went_on_with(name: str, tmp_path: Path) -> None:
    import lightning as L
    from torch.utils.data import DataLoader

    import nnx

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = MADE.make_model()
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.net(batch).pow(2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = MADE.optimizer_of(self.net, {})
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    data = torch.randn(16, 5, generator=torch.Generator().manual_seed(9))
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        plugins=[nnx.CheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=HOME / name)
    wanted = expected(name)
    assert trainer.global_step == 8
    torch.testing.assert_close(torch.tensor(module.losses), wanted["losses"][4:], rtol=0, atol=1e-6)
    for key, value in module.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(value.detach(), wanted[f"next.model.{key}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["zero2_world2_lightning", "zero3_world3_bf16_subgroups", "zero0_world2"])
def test_a_converted_checkpoint_holds_the_same(name: str, tmp_path: Path) -> None:
    source = storage.open_checkpoint(HOME / name)
    storage.convert(HOME / name, tmp_path / "converted")
    target = storage.open_checkpoint(tmp_path / "converted")
    assert target.format == "nnx"
    assert set(target.tensors) == set(source.tensors) and target.aliases == source.aliases
    for key in source.tensors:
        torch.testing.assert_close(target.read(key), source.read(key), rtol=0, atol=0)
    assert target.objects["optim"] == source.objects["optim"]
    assert target.objects["trainer"].keys() == source.objects["trainer"].keys()


def test_the_weights_of_the_model_itself_can_be_had_where_they_are_saved() -> None:
    stored = DeepSpeed().open(HOME / "zero2_world2_bf16", weights="model")
    masters = storage.open_checkpoint(HOME / "zero2_world2_bf16")
    weight = stored.read("model.inner.weight")
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, masters.read("model.inner.weight").bfloat16())
    assert stored.aliases == masters.aliases
    with pytest.raises(CheckpointError, match=r"ZeRO stage 3.*weights='master'"):
        DeepSpeed().open(HOME / "zero3_world2_fp32", weights="model")
    with pytest.raises(CheckpointError, match="'other' is neither"):
        DeepSpeed().open(HOME / "zero2_world2_bf16", weights="other")  # type: ignore[arg-type]


def test_reading_a_row_reads_its_bytes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = storage.open_checkpoint(HOME / "zero1_world3_fp32")
    sizes: list[int] = []
    read_into = FileReader.read_into

    def counted(self: FileReader, start: int, into: memoryview) -> None:
        sizes.append(len(into))
        read_into(self, start, into)

    monkeypatch.setattr(FileReader, "read_into", counted)
    row = stored.read("model.inner.weight", storage.opened.Box((3, 0), (1, 7)))
    assert row.shape == (1, 7) and sum(sizes) == 28


def test_steps_counted_by_deepspeeds_own_optimizers_become_tensors(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_offload")

    def count(state: Any) -> None:
        for entry in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["step"] = 3

    for file in path.rglob("*optim_states.pt"):
        edit(file, count)
    step = storage.open_checkpoint(path).read("optim.0.state.inner.bias.step")
    assert step.dtype == torch.float32 and step.item() == 3.0


def test_the_names_of_lightnings_old_wrapper_are_removed(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_sgd")

    def wrap(state: Any) -> None:
        def wrapped(names: dict[str, Any]) -> dict[str, Any]:
            return {f"_forward_module.{name}": value for name, value in names.items()}

        state["module"] = wrapped(state["module"])
        state["param_shapes"] = [wrapped(group) for group in state["param_shapes"]]
        state["shared_params"] = {"_forward_module.tied.weight": "_forward_module.embed.weight"}

    edit(next(path.rglob("mp_rank_00_model_states.pt")), wrap)
    stored, plain = storage.open_checkpoint(path), storage.open_checkpoint(HOME / "zero2_world2_sgd")
    assert set(stored.tensors) == set(plain.tensors) and stored.aliases == plain.aliases
    assert stored.objects["optim"] == plain.objects["optim"]


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


def test_a_file_left_by_a_save_of_more_ranks_is_refused(copy: Callable[[str], Path]) -> None:
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
    pattern: str, copy: Callable[[str], Path], tmp_path: Path
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


def test_objects_of_the_caller_need_trust_and_are_restored_with_it(copy: Callable[[str], Path]) -> None:
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


def test_experts_with_groups_of_their_own_are_refused(copy: Callable[[str], Path]) -> None:
    path = copy("zero2_world2_sgd")
    for file in path.rglob("*optim_states.pt"):
        edit(file, lambda state: state["optimizer_state_dict"].update(partition_count=[2, 1]))
    with pytest.raises(CheckpointError, match="experts have groups of their own"):
        storage.open_checkpoint(path)


def test_state_that_does_not_follow_the_flat_parameters_is_refused(copy: Callable[[str], Path]) -> None:
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
        (lambda s: s.pop("partition_count"), "not as DeepSpeed writes it: KeyError"),
        (lambda s: s.update(zero_stage="?"), "not as DeepSpeed writes it: ValueError"),
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
    change: Callable[[Any], None], message: str, copy: Callable[[str], Path]
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
