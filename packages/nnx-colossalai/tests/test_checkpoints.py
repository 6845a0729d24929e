"""ColossalAI's sharded checkpoints, made from a reading of its source and not by ColossalAI itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import nnx
import nnx_checkpoint as storage
from nnx_checkpoint.reading.naming import stored_optimizer_states
from nnx_colossalai.checkpoints import ColossalAI
from nnx_core.errors import CheckpointError


def make_model() -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(3, 3))
    model[3].weight = model[2].weight if model[2].weight.shape == (3, 3) else model[3].weight
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [*model[0].parameters(), *model[3].parameters()], "weight_decay": 0.1},
        {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.05},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shards(items: Mapping[Any, Any], count: int) -> list[dict[Any, Any]]:
    keys = [*items]
    size = -(-len(keys) // count)
    return [{key: items[key] for key in keys[i : i + size]} for i in range(0, len(keys), size)]


def write_model(directory: Path, state: Mapping[str, Tensor], *, safe: bool = False, count: int = 3) -> None:
    """`save_sharded_model`: ``pytorch_model-00001.bin`` and so on, and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    base, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    weight_map = {}
    for index, shard in enumerate(shards(state, count)):
        name = f"{base}-{index + 1:05d}{suffix}"
        weight_map |= dict.fromkeys(shard, name)
        if safe:
            save_file({key: value.clone() for key, value in shard.items()}, directory / name)
        else:
            torch.save(shard, directory / name)
    write_index(directory / f"{base}{suffix}.index.json", {"total_size": 0.1}, weight_map)


def write_optimizer(directory: Path, state: Mapping[str, Any], *, count: int = 2, prefix: str = "") -> None:
    """`save_sharded_optimizer`: shards by parameter number, the param groups, and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    groups = f"pytorch_optim_group{prefix}.bin"
    torch.save(state["param_groups"], directory / groups)
    weight_map = {}
    for index, shard in enumerate(shards(state["state"], count)):
        name = f"pytorch_optim{prefix}-{index + 1:05d}.bin"
        weight_map |= dict.fromkeys(map(str, shard), name)
        torch.save(shard, directory / name)
    metadata = {"param_groups": groups, "total_size": 0.2}
    write_index(directory / f"pytorch_optim.bin.index{prefix}.json", metadata, weight_map)


def write_index(file: Path, metadata: Mapping[str, Any], weight_map: Mapping[str, str]) -> None:
    file.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n")


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3))
    return model, optimizer


@pytest.fixture
def saved(trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path) -> Path:
    """As ColossalAI's examples lay it out."""
    path = tmp_path / "epoch-1_step-3"
    write_model(path / "modeling", trained[0].state_dict())
    write_optimizer(path / "optimizer", trained[1].state_dict())
    torch.save({"last_epoch": 3, "base_lrs": [0.01, 0.05]}, path / "lr_scheduler")
    (path / "running_states.json").write_text('{"epoch": 1, "step": 3, "sample_start_index": 12}')
    return path


def same(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def check_model(stored: storage.Checkpoint, model: nn.Module) -> None:
    state = model.state_dict()
    assert {name for name in stored.tensors if name.startswith("model.")} == {f"model.{n}" for n in state}
    for name, value in state.items():
        same(stored.read(f"model.{name}"), value)


# --- what is read ---------------------------------------------------------------------------------


def test_model_optimizer_and_what_lies_beside_them_are_read(
    saved: Path, trained: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    stored = storage.open_checkpoint(saved)
    assert stored.format == "colossalai"
    check_model(stored, trained[0])
    wanted = trained[1].state_dict()
    for number, state in wanted["state"].items():
        for key, value in state.items():
            same(stored.read(f"optim.0.state.{number}.{key}"), value)
    assert stored.objects["optim"][0]["groups"] == wanted["param_groups"]
    assert stored.objects["trainer"] == {
        "lr_schedulers": [{"last_epoch": 3, "base_lrs": [0.01, 0.05]}],
        "colossalai": {"epoch": 1, "step": 3, "sample_start_index": 12},
    }


@pytest.mark.parametrize("safe", [False, True])
def test_everything_may_lie_in_one_directory(
    safe: bool, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    write_model(tmp_path / "all", trained[0].state_dict(), safe=safe, count=1)
    write_optimizer(tmp_path / "all", trained[1].state_dict(), count=1)
    stored = storage.open_checkpoint(tmp_path / "all")
    assert stored.format == "colossalai"
    check_model(stored, trained[0])
    assert len(stored.objects["optim"][0]["groups"]) == 2


def test_a_directory_of_weights_alone_is_read(saved: Path, trained: tuple[nn.Module, Any]) -> None:
    stored = storage.open_checkpoint(saved / "modeling")
    check_model(stored, trained[0])
    assert "optim" not in stored.objects


def test_a_directory_of_the_optimizer_alone_is_read(saved: Path) -> None:
    stored = storage.open_checkpoint(saved / "optimizer")
    assert not any(name.startswith("model.") for name in stored.tensors)
    assert "extra" not in stored.objects and len(stored.objects["optim"]) == 1


def test_files_with_a_prefix_and_steps_that_are_ints_are_read(
    trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    state = trained[1].state_dict()
    for entry in state["state"].values():
        entry["step"] = 3
    del state["state"][2]
    write_optimizer(tmp_path / "optimizer", state, prefix=".second")
    stored = storage.open_checkpoint(tmp_path / "optimizer")
    same(stored.read("optim.0.state.0.step"), torch.tensor(3.0))
    assert "optim.0.state.2.exp_avg" not in stored.tensors


def test_tied_weights_of_one_shard_are_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    write_model(tmp_path / "model", {"a.weight": weight, "b.weight": weight, "c": torch.ones(2)}, count=1)
    stored = storage.open_checkpoint(tmp_path / "model")
    assert stored.aliases == {"model.b.weight": "model.a.weight"}


def resumed(stored: storage.Checkpoint) -> list[float]:
    model = make_model()
    model.load_state_dict({name: stored.read(f"model.{name}") for name in model.state_dict()})
    optimizer = make_optimizer(model)
    (state,) = stored_optimizer_states(stored) or ()
    read = {n: {k: v.stored.read(v.key) for k, v in s.items()} for n, s in state["state"].items()}
    optimizer.load_state_dict({"state": read, "param_groups": state["param_groups"]})
    return train(model, optimizer, range(3, 6))


def test_training_goes_on_as_it_would_have(
    saved: Path, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    storage.convert(saved, tmp_path / "converted")
    converted = storage.open_checkpoint(tmp_path / "converted")
    assert converted.format == "nnx"
    wanted = train(*trained, range(3, 6))
    assert resumed(storage.open_checkpoint(saved)) == wanted
    assert resumed(converted) == wanted


@pytest.mark.parametrize("converted", [True, False])
def test_stock_lightning_resumes_from_a_converted_file_and_with_our_plugin_directly(
    saved: Path, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path, converted: bool
) -> None:
    import lightning as L
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.losses: list[float] = []

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {f"net.{name}": value for name, value in state.items()}

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.net(batch).pow(2).mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.net)

    (saved / "lr_scheduler").unlink()
    if converted:
        storage.convert(saved, tmp_path / "one.ckpt")
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(step)) for step in range(3, 6)]
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        plugins=None if converted else [nnx.CheckpointIO()],
    )
    source = tmp_path / "one.ckpt" if converted else saved
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=source)
    assert module.losses == train(*trained, range(3, 6))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost",
    [
        "modeling/pytorch_model-00002.bin",
        "optimizer/pytorch_optim-00002.bin",
        "optimizer/pytorch_optim_group.bin",
    ],
)
def test_a_missing_file_is_named(lost: str, saved: Path) -> None:
    (saved / lost).unlink()
    with pytest.raises(CheckpointError, match=f"{Path(lost).name}' is missing"):
        storage.open_checkpoint(saved)


def test_a_missing_safetensors_shard_is_named(
    trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    write_model(tmp_path, trained[0].state_dict(), safe=True)
    write_optimizer(tmp_path, trained[1].state_dict())
    (tmp_path / "model-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003\.safetensors' is missing"):
        storage.open_checkpoint(tmp_path)


def edit_index(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["weight_map"].update(other="pytorch_model-00001.bin"), "has no 'other', which .* lists"),
        (lambda b: b["weight_map"].pop("0.weight"), "holds '0.weight', which .* does not list"),
        (lambda b: b["weight_map"].update({"0.weight": "../x.bin"}), "names a file elsewhere"),
        (
            lambda b: b["weight_map"].update({"0.weight": "dtensor/0.weight.*.bin"}),
            r"names shards of distributed tensors.*Gather",
        ),
        (lambda b: b.pop("weight_map"), "differs from the format of ColossalAI: KeyError"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, saved: Path
) -> None:
    edit_index(saved / "modeling" / "pytorch_model.bin.index.json", change)
    with pytest.raises(CheckpointError, match=message):
        storage.open_checkpoint(saved)


def test_an_index_that_is_no_json_is_refused(saved: Path) -> None:
    (saved / "optimizer" / "pytorch_optim.bin.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="differs from the format of ColossalAI: JSONDecodeError"):
        storage.open_checkpoint(saved)


def test_state_of_parameters_that_no_group_holds_is_refused(saved: Path) -> None:
    groups = torch.load(saved / "optimizer" / "pytorch_optim_group.bin")
    groups[1]["params"] = groups[1]["params"][:-1]
    torch.save(groups, saved / "optimizer" / "pytorch_optim_group.bin")
    with pytest.raises(CheckpointError, match=r"state for parameters \[7\]"):
        storage.open_checkpoint(saved)


def test_state_of_an_unknown_kind_is_refused(saved: Path) -> None:
    file = saved / "optimizer" / "pytorch_optim-00001.bin"
    shard = torch.load(file)
    shard[0]["exp_avg"] = [1.0]
    torch.save(shard, file)
    with pytest.raises(CheckpointError, match="state 'exp_avg' of type list"):
        storage.open_checkpoint(saved)


def test_two_checkpoints_in_one_place_are_refused(
    saved: Path, trained: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    write_optimizer(saved / "disc_optimizer", trained[1].state_dict())
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoints: .*disc_optimizer"):
        storage.open_checkpoint(saved)


def test_optimizers_saved_asynchronously_are_refused(saved: Path) -> None:
    index = saved / "optimizer" / "pytorch_optim.bin.index.json"
    (saved / "optimizer" / "optimizer.safetensors.index.json").write_text(index.read_text())
    with pytest.raises(CheckpointError, match="saved with `use_async`"):
        storage.open_checkpoint(saved)


def test_a_truncated_file_is_named(saved: Path) -> None:
    file = saved / "optimizer" / "pytorch_optim-00001.bin"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"pytorch_optim-00001\.bin"):
        storage.open_checkpoint(saved)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "executed"))


@pytest.mark.parametrize(
    "name",
    [
        "modeling/pytorch_model-00001.bin",
        "optimizer/pytorch_optim-00002.bin",
        "optimizer/pytorch_optim_group.bin",
        "lr_scheduler",
    ],
)
def test_a_malicious_file_is_refused_and_not_executed(name: str, saved: Path, tmp_path: Path) -> None:
    torch.save({"evil": Payload(tmp_path / "executed")}, saved / name)
    with pytest.raises(CheckpointError, match=Path(name).name):
        storage.open_checkpoint(saved)
    assert not (tmp_path / "executed").exists()


def test_a_directory_without_an_index_is_not_taken_for_colossalais(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001.bin").touch()
    (tmp_path / "file").touch()
    assert not ColossalAI().guess_can_open(tmp_path)
    assert not ColossalAI().guess_can_open(tmp_path / "file")
    with pytest.raises(CheckpointError, match="no index of a model or an optimizer"):
        ColossalAI().open(tmp_path)
