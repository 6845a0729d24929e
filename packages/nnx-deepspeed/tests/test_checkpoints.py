"""DeepSpeed's directories: every file in `fixtures/deepspeed` was written by DeepSpeed 0.19.8 itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import nnx_checkpoint as storage
from jobs.deepspeed_native_jobs import FIXTURES, script
from nnx_base.box import Box
from nnx_checkpoint.reading.naming import stored_optimizer_states
from nnx_checkpoint.storage.files import FileReader
from nnx_core.errors import CheckpointError
from nnx_deepspeed.checkpoints import DeepSpeed

HOME = FIXTURES / "deepspeed"
Edit = Callable[[Path, Callable[[Any], None]], None]
ALL = sorted(path.name for path in HOME.iterdir())
ZERO = [name for name in ALL if not name.startswith("zero0")]
PLAIN = [name for name in ALL if "lightning" not in name]
GROUPS = [["embed.weight", "inner.weight"], ["inner.bias", "last.weight", "last.bias"]]


MADE = script()


def expected(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / "deepspeed_expected" / f"{name}.safetensors")


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", ZERO)
def test_masters_and_moments_are_those_that_deepspeed_itself_gathers(name: str) -> None:
    stored = storage.open_checkpoint(HOME / name)
    assert stored.format == "deepspeed"
    wanted = {k: v for k, v in expected(name).items() if not k.startswith(("next.", "losses"))}
    assert len(wanted) >= 10
    for key, value in wanted.items():
        logical = key if key.startswith("model.") else key.replace("optim.", "optim.0.state.", 1)
        torch.testing.assert_close(stored.read(logical), value, rtol=0, atol=0)


@pytest.mark.quick(every=3)
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
    row = stored.read("model.inner.weight", Box((3, 0), (1, 7)))
    assert row.shape == (1, 7) and sum(sizes) == 28


def test_steps_counted_by_deepspeeds_own_optimizers_become_tensors(
    copy: Callable[[str], Path], edit: Edit
) -> None:
    path = copy("zero2_world2_offload")

    def count(state: Any) -> None:
        for entry in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["step"] = 3

    for file in path.rglob("*optim_states.pt"):
        edit(file, count)
    step = storage.open_checkpoint(path).read("optim.0.state.inner.bias.step")
    assert step.dtype == torch.float32 and step.item() == 3.0


def test_the_names_of_lightnings_old_wrapper_are_removed(copy: Callable[[str], Path], edit: Edit) -> None:
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


WITHOUT_ENGINE = """
import sys

sys.modules["deepspeed"] = None
from nnx_checkpoint.cli.command import main

sys.argv = ["nnx", "ckpt", "convert", *sys.argv[1:]]
try:
    main()
finally:
    loaded = [name for name in ("deepspeed", "lightning", "pytorch_lightning") if sys.modules.get(name)]
    assert not loaded, loaded
"""


@pytest.mark.full
def test_the_command_converts_without_deepspeed_and_without_lightning(
    tmp_path: Path,
) -> None:
    arguments = [str(HOME / "zero2_world2_bf16"), str(tmp_path / "converted")]
    subprocess.run([sys.executable, "-c", WITHOUT_ENGINE, *arguments], check=True, timeout=120)
    converted = storage.open_checkpoint(tmp_path / "converted")
    assert storage.compare(storage.open_checkpoint(HOME / "zero2_world2_bf16"), converted).same
