"""nnx writes Lightning's single-file checkpoints, which stock Lightning resumes."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nnx_checkpoint
from jobs.rich_checkpoint import differences, save_rich
from nnx_base.shard import shard_of
from nnx_checkpoint.foreign.lightning_file import LightningFile
from nnx_checkpoint.foreign.torch_archive import ZipLayout
from nnx_checkpoint.reading.naming import stored_optimizer_states
from nnx_core.errors import CheckpointError


class Small(LightningModule):
    """Tied, frozen and two param groups."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.first = nn.Linear(width, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(width, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.last(self.tied(self.first(batch[0]))).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.first.parameters(), "lr": 0.1}, {"params": self.last.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(32.0).view(8, 4) / 10), batch_size=2)


def fit(epochs: int, module: Small, **more: Any) -> Trainer:
    gc.collect()  # a Trainer of an earlier test whose CheckpointIO lives would add nnx's callbacks
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", devices=1, enable_model_summary=False, **quiet)
    trainer.fit(module, **more)
    return trainer


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A file that stock Lightning wrote after one epoch, and the losses of two."""
    path = tmp_path_factory.mktemp("stock") / "stock.ckpt"
    module = Small()
    fit(1, module).save_checkpoint(path)
    straight = Small()
    fit(2, straight)
    return path, straight.losses


def test_what_is_written_resumes_in_stock_lightning_as_if_never_interrupted(
    stock: tuple[Path, list[float]], tmp_path: Path
) -> None:
    path, losses = stock
    nnx_checkpoint.convert(path, tmp_path / "again.ckpt")
    module = Small()
    trainer = fit(2, module, ckpt_path=tmp_path / "again.ckpt")
    assert module.losses == losses[4:]
    assert module.first.weight is module.tied.weight
    group = trainer.optimizers[0].param_groups[0]
    assert "param_names" not in group  # a later `add_param_group` without names would be refused
    trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_load_from_checkpoint_and_weights_only_loading_accept_it(
    stock: tuple[Path, list[float]], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.ckpt"
    nnx_checkpoint.convert(stock[0], copy)
    module = Small.load_from_checkpoint(copy)
    before, after = (torch.load(file, weights_only=True) for file in (stock[0], copy))
    assert before.keys() == after.keys() - {"nnx"}
    for name, tensor in before["state_dict"].items():
        assert torch.equal(module.state_dict()[name], tensor)
    assert after["optimizer_states"][0]["param_groups"] == before["optimizer_states"][0]["param_groups"]
    shared = after["state_dict"]
    assert shared["first.weight"].data_ptr() == shared["tied.weight"].data_ptr()


def test_everything_comes_back_bit_by_bit(tmp_path: Path) -> None:
    source = save_rich(tmp_path / "source")
    nnx_checkpoint.convert(tmp_path / "source", tmp_path / "one.ckpt")
    nnx_checkpoint.convert(tmp_path / "one.ckpt", tmp_path / "two.ckpt")
    for name in ("one.ckpt", "two.ckpt"):
        assert differences(source, nnx_checkpoint.open_checkpoint(tmp_path / name)) == []


def test_other_zip_tools_find_the_checksums_right(tmp_path: Path) -> None:
    save_rich(tmp_path / "source")
    nnx_checkpoint.merge(tmp_path / "source", tmp_path / "one.ckpt")
    assert zipfile.ZipFile(tmp_path / "one.ckpt").testzip() is None
    script = "import sys, zipfile; sys.exit(zipfile.main(['-t', sys.argv[1]]))"
    subprocess.run([sys.executable, "-c", script, tmp_path / "one.ckpt"], check=True, timeout=60)
    raw = bytearray((tmp_path / "one.ckpt").read_bytes())
    start = raw.index(nnx_checkpoint.open_checkpoint(tmp_path / "one.ckpt").read("model.net.weight").numpy())
    raw[start] ^= 1
    (tmp_path / "bad.ckpt").write_bytes(raw)
    assert zipfile.ZipFile(tmp_path / "bad.ckpt").testzip() is not None


def test_tensors_of_any_name_and_objects_of_any_key_are_kept(tmp_path: Path) -> None:
    nnx_checkpoint.save(
        tmp_path / "a",
        tensors={"w": shard_of(torch.arange(6.0))},
        objects={"trainer": {}, "mine": {"x": torch.ones(2)}},
        aliases={"v": "w"},
    )
    nnx_checkpoint.convert(tmp_path / "a", tmp_path / "a.ckpt")
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    assert differences(nnx_checkpoint.open_checkpoint(tmp_path / "a"), opened) == []


@pytest.mark.parametrize("modules", [["net"], ["net", "critic"]])
def test_what_fabric_saved_is_found_under_the_users_keys(tmp_path: Path, modules: list[str]) -> None:
    prefixes = {key: "" if len(modules) == 1 else f"{key}." for key in modules}
    tensors = {f"model.{prefix}w": torch.full((2,), float(i)) for i, prefix in enumerate(prefixes.values())}
    first = f"{next(iter(prefixes.values()))}w"
    tensors[f"optim.0.state.{first}.m"] = torch.ones(2)
    trainer = {"nnx-fabric-keys": {"modules": modules, "optimizers": ["adam"]}, "step": 5}
    optim = [{"groups": [{"lr": 0.1, "params": [first]}], "values": {}}]
    nnx_checkpoint.save(
        tmp_path / "a",
        tensors={name: shard_of(tensor) for name, tensor in tensors.items()},
        objects={"trainer": trainer, "optim": optim, "extra": {}},
    )
    nnx_checkpoint.convert(tmp_path / "a", tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.keys() == {*modules, "adam", "step", "nnx"}
    assert loaded[modules[-1]]["w"].tolist() == [len(modules) - 1.0] * 2
    assert loaded["adam"]["state"][0]["m"].tolist() == [1, 1]
    opened = nnx_checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    assert differences(nnx_checkpoint.open_checkpoint(tmp_path / "a"), opened) == []


def test_weights_alone_leave_out_training_state_and_load(
    stock: tuple[Path, list[float]], tmp_path: Path
) -> None:
    nnx_checkpoint.convert(stock[0], tmp_path / "w.ckpt", save_weights_only=True)
    loaded = torch.load(tmp_path / "w.ckpt", weights_only=True)
    assert not loaded.keys() & {"optimizer_states", "lr_schedulers", "callbacks"}
    assert Small.load_from_checkpoint(tmp_path / "w.ckpt").hparams == {"width": 4}


def test_an_enum_that_is_not_known_here_is_refused(tmp_path: Path) -> None:
    member = nnx_checkpoint.EnumName("some.module:Color", "RED")
    checkpoint = save_rich(tmp_path / "a")
    checkpoint.tree = lambda rank, tensor: {"trainer": {"x": member}} if rank is None else None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"RED of the enum some\.module:Color.*Import some\.module"):
        LightningFile().write(checkpoint, tmp_path / "a.ckpt")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a"}


def test_an_object_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    checkpoint = save_rich(tmp_path / "a")
    checkpoint.tree = lambda rank, tensor: {"trainer": {"x": lambda: 0}} if rank is None else None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"cannot be pickled.*save_weights_only=True"):
        LightningFile().write(checkpoint, tmp_path / "a.ckpt")


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    save_rich(tmp_path / "a")
    with pytest.raises(CheckpointError, match="format 'lightning' has no option 'speed'"):
        nnx_checkpoint.convert(tmp_path / "a", tmp_path / "a.ckpt", speed=3)


@pytest.mark.full
def test_large_records_and_many_of_them_use_the_wide_fields_of_zip() -> None:
    big = ZipLayout([("x/data/0", 5 << 32), ("x/version", 2)])
    assert big.size > 5 << 32
    parts: list[bytes] = []
    many = ZipLayout([(f"x/data/{i}", 1) for i in range(70000)])
    many.write(lambda part: parts.append(bytes(part)), ([memoryview(b"a")] for _ in range(70000)))
    raw = b"".join(parts)
    assert len(raw) == many.size
    archive = zipfile.ZipFile(io.BytesIO(raw))
    assert len(archive.namelist()) == 70000
    assert archive.testzip() is None


@pytest.mark.full
def test_a_record_of_more_than_4_gib_is_found_by_torch_and_by_zip_tools(tmp_path: Path) -> None:
    """The file is sparse: only its ends are written."""
    size = (4 << 30) + 8
    head = io.BytesIO()
    torch.save({}, head)  # what torch wants besides
    records = {info.filename: zipfile.ZipFile(head).read(info) for info in zipfile.ZipFile(head).infolist()}
    layout = ZipLayout(
        [*((name, len(data)) for name, data in records.items()), ("archive/data/0", size), ("archive/z", 1)]
    )
    with (tmp_path / "big.pt").open("wb") as file:

        def append(part: memoryview) -> None:
            if len(part) == 1 << 30:
                file.seek(len(part), 1)
            else:
                file.write(part)

        hole = memoryview(bytes(1 << 30))
        data = [[memoryview(d)] for d in records.values()]
        layout.write(append, [*data, [hole, hole, hole, hole, memoryview(b"12345678")], [memoryview(b"z")]])
    assert (tmp_path / "big.pt").stat().st_size == layout.size
    archive = zipfile.ZipFile(tmp_path / "big.pt")
    assert archive.getinfo("archive/data/0").file_size == size
    assert archive.read("archive/z") == b"z"
    reader = torch._C.PyTorchFileReader(str(tmp_path / "big.pt"))
    offset = reader.get_record_offset("data/0")
    with (tmp_path / "big.pt").open("rb") as file:
        file.seek(offset + (4 << 30))
        assert file.read(8) == b"12345678"
    assert reader.get_record("z") == b"z"


def test_a_stock_file_has_logical_names_and_numbered_optimizers(stock: tuple[Path, list[float]]) -> None:
    opened = nnx_checkpoint.open_checkpoint(stock[0])
    assert opened.format == "lightning"
    assert {"model.first.weight", "model.last.bias", "optim.0.state.0.exp_avg"} <= set(opened.tensors)
    assert opened.aliases == {"model.tied.weight": "model.first.weight"}
    states = stored_optimizer_states(opened)
    assert states is not None
    assert [group["params"] for group in states[0]["param_groups"]] == [[0], [1, 2]]
    trainer = opened.objects["trainer"]
    assert trainer["global_step"] == 4
    assert trainer["lr_schedulers"][0]["last_epoch"] == 1
    loaded = torch.load(stock[0], weights_only=True)
    for name, tensor in loaded["state_dict"].items():
        assert torch.equal(opened.read(f"model.{name}"), tensor)
