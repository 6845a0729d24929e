"""`nnx.load_from_checkpoint`: models and data modules from checkpoints, without a Trainer."""

from __future__ import annotations

import enum
import importlib
import logging
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn

import nnx
import nnx_checkpoint as storage
from nnx_base.shard import shard_of
from nnx_core.errors import CheckpointError, OptionError


class Net(LightningModule):
    """Tied weights, a buffer, hyper-parameters, a hook that renames."""

    def __init__(self, width: int, depth: int = 2, *, dropout: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("count", torch.tensor(0))
        self.seen: dict[str, Any] = {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint


class Lazily(LightningModule):
    """Builds its layers in ``configure_model``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer: nn.Module | None = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(self.hparams["width"], 2)


class Named(LightningModule):
    """Takes all its hyper-parameters as one argument."""

    def __init__(self, conf: Any, note: str = "") -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.conf, self.note = conf, note
        self.layer = nn.Linear(conf["width"], 1)


class Renamed(LightningModule):
    """`Named` with another name for its layer."""

    def __init__(self, conf: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(conf["width"], 1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in list(checkpoint["state_dict"]):
            checkpoint["state_dict"][name.replace("layer", "inner")] = checkpoint["state_dict"].pop(name)


class Data(LightningDataModule):
    """Hyper-parameters and a state."""

    def __init__(self, folder: str, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder, self.size, self.position = folder, size, 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Counter(nn.Module):
    """Loads by itself, under a name it had before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.calls = 0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.calls += 1
        if f"{prefix}old" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Stubborn(nn.Module):
    """Overrides ``load_state_dict`` as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k: v + 1 for k, v in state_dict.items()}, strict, assign)


def save(module: Any, path: Path, data: Any = None) -> Path:
    """Save as `Trainer.save_checkpoint` does, in our format or as Lightning's file by the name."""
    plugins = [] if path.suffix == ".pt" else [nnx.CheckpointIO()]
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=plugins)
    trainer.strategy.connect(module)
    if data is not None:
        trainer._data_connector.attach_datamodule(module, data)
    trainer.save_checkpoint(path, weights_only=True)
    return path


def randomized(module: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def equal(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["a.ckpt", "a.pt"])
def test_the_class_gets_its_hyper_parameters_and_weights(tmp_path: Path, name: str) -> None:
    net = randomized(Net(3, 4))
    net.count += 5
    path = save(net, tmp_path / name)
    loaded = nnx.load_from_checkpoint(Net, path, dropout=0.0)
    assert equal(loaded, net)
    assert dict(loaded.hparams) == {"width": 3, "depth": 4, "dropout": 0.0}
    assert loaded.head.weight is loaded.layers[0].weight
    assert loaded.seen["hyper_parameters"]["dropout"] == 0.0  # hooks see what is in force
    assert loaded.training


def test_weights_are_read_straight_into_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(randomized(Net(3)), tmp_path / "a.ckpt")
    monkeypatch.setattr(storage.Checkpoint, "read", lambda *_: pytest.fail("a tensor was read into a copy"))
    nnx.load_from_checkpoint(Net, path)


def test_both_copies_of_lightning_are_served(tmp_path: Path) -> None:
    mirror = importlib.import_module("pytorch_lightning")

    class Mirrored(mirror.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 1)

    module = randomized(Mirrored(4))
    trainer = mirror.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, plugins=[nnx.CheckpointIO()]
    )
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert equal(nnx.load_from_checkpoint(Mirrored, tmp_path / "a.ckpt"), module)


def test_a_module_that_is_built_in_configure_model_is_built_and_filled(tmp_path: Path) -> None:
    module = Lazily(5)
    module.configure_model()
    path = save(randomized(module), tmp_path / "a.ckpt")
    assert equal(nnx.load_from_checkpoint(Lazily, path), module)


def test_hyper_parameters_under_a_name_are_one_argument(tmp_path: Path) -> None:
    path = save(randomized(Named({"width": 4, "rate": 0.1}, "first")), tmp_path / "a.ckpt")
    loaded = nnx.load_from_checkpoint(Named, path, rate=0.2, note="second")
    assert (loaded.conf["width"], loaded.conf["rate"], loaded.note) == (4, 0.2, "second")
    assert nnx.load_from_checkpoint(Named, path).note == ""


def test_hyper_parameters_of_argparse_come_back(tmp_path: Path) -> None:
    class Parsed(LightningModule):
        def __init__(self, args: Namespace) -> None:
            super().__init__()
            self.save_hyperparameters(args)
            self.layer = nn.Linear(self.hparams["width"], 1)

    module = randomized(Parsed(Namespace(width=3)))
    path = save(module, tmp_path / "a.ckpt")
    assert equal(nnx.load_from_checkpoint(Parsed, path), module)
    assert equal(nnx.load_from_checkpoint(Parsed, path, args=Namespace(width=3)), module)


def test_hooks_may_rename_entries(tmp_path: Path) -> None:
    module = randomized(Named({"width": 4}))
    loaded = nnx.load_from_checkpoint(Renamed, save(module, tmp_path / "a.ckpt"), conf={"width": 4})
    assert torch.equal(loaded.inner.weight, module.layer.weight)


@pytest.mark.parametrize("name", ["a.ckpt", "a.pt"])
def test_a_data_module_gets_its_own_hyper_parameters_and_state(tmp_path: Path, name: str) -> None:
    data = Data("here", size=3)
    data.position = 17
    path = save(Net(2), tmp_path / name, data)
    loaded = nnx.load_from_checkpoint(Data, path, size=4)
    assert (loaded.folder, loaded.size, loaded.position) == ("here", 4, 17)


@pytest.mark.parametrize(
    ("location", "device"),
    [
        (None, "cpu"),
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
        ({"cpu": "meta"}, "meta"),
        ({"cuda:1": "cuda:0"}, "cpu"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: None, "cpu"),
    ],
)
def test_map_location_takes_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: Any, device: str
) -> None:
    path = save(Net(2), tmp_path / "a.ckpt")
    if device == "meta":  # nothing can be read into it, but it is a device that every machine has
        monkeypatch.setattr("nnx_checkpoint.reading.loading.fill_model", lambda *_, **__: None)
    loaded = nnx.load_from_checkpoint(Net, path, map_location=location)
    assert {parameter.device.type for parameter in loaded.parameters()} == {device}


def test_a_plain_module_is_built_from_the_callers_arguments(tmp_path: Path) -> None:
    layer = randomized(nn.Linear(3, 2))
    storage.save(
        tmp_path / "a.ckpt",
        tensors={f"model.{k}": shard_of(v) for k, v in layer.state_dict().items()},
        objects={"trainer": {}},
    )
    assert equal(
        nnx.load_from_checkpoint(nn.Linear, tmp_path / "a.ckpt", in_features=3, out_features=2), layer
    )


def test_parts_that_load_themselves_do(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()
            self.lazy = nn.LazyLinear(2)
            self.plain = nn.Linear(1, 1)

    tensors = {
        "counter.old": torch.tensor([3.0, 4.0]),
        "lazy.weight": torch.ones(2, 5),
        "lazy.bias": torch.ones(2),
        "plain.weight": torch.ones(1, 1),
        "plain.bias": torch.ones(1),
    }
    path = _save(tmp_path, tensors)
    loaded = nnx.load_from_checkpoint(Holder, path)
    assert loaded.counter.weight.tolist() == [3.0, 4.0]
    assert loaded.counter.calls == 1
    assert loaded.lazy.weight.shape == (2, 5)
    assert loaded.plain.weight.item() == 1.0
    with pytest.raises(CheckpointError, match=r"Holder refused its entries.*unexpected"):
        nnx.load_from_checkpoint(Holder, _save(tmp_path, {**tensors, "counter.more": torch.ones(1)}))


def test_a_module_with_its_own_load_state_dict_is_asked(tmp_path: Path) -> None:
    path = _save(tmp_path, {"weight": torch.tensor([1.0, 2.0])})
    assert nnx.load_from_checkpoint(Stubborn, path).weight.tolist() == [2.0, 3.0]


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    storage.save(
        folder / "made.ckpt",
        tensors={f"model.{name}": shard_of(value) for name, value in tensors.items()},
        objects={"trainer": {}},
    )
    return folder / "made.ckpt"


def test_names_that_differ_are_an_error_unless_the_caller_or_the_class_says_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(randomized(Net(3, 4)), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"another model; unexpected in the checkpoint: layers\.3"):
        nnx.load_from_checkpoint(Net, path, depth=3)
    with caplog.at_level(logging.WARNING):
        assert len(nnx.load_from_checkpoint(Net, path, depth=3, strict=False).layers) == 3
    assert "2 names are in the checkpoint and not in the model: layers.3.bias, layers.3.weight" in caplog.text
    with pytest.raises(CheckpointError, match="of another shape"):
        nnx.load_from_checkpoint(Net, path, width=5, strict=False)


def test_strict_must_not_contradict_the_class(tmp_path: Path) -> None:
    class Loose(Net):
        def __init__(self, width: int, depth: int = 2) -> None:
            super().__init__(width, depth)
            self.strict_loading = False

    path = save(Net(2, 3), tmp_path / "a.ckpt")
    assert len(nnx.load_from_checkpoint(Loose, path, depth=2).layers) == 2
    with pytest.raises(OptionError, match=r"strict=True contradicts Loose\.strict_loading=False"):
        nnx.load_from_checkpoint(Loose, path, strict=True)


def test_what_cannot_be_built_says_what_is_missing(tmp_path: Path) -> None:
    class Silent(LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, 1)

    path = save(Silent(2), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds no hyper-parameter 'width'") as caught:
        nnx.load_from_checkpoint(Silent, path)
    assert "nnx.load_from_checkpoint(Silent, path, width=...)" in caught.value.remedy
    assert nnx.load_from_checkpoint(Silent, path, width=2).layer.in_features == 2
    with pytest.raises(CheckpointError, match=r"cannot build Silent with .*TypeError") as caught:
        nnx.load_from_checkpoint(Silent, path, width="wide")
    assert isinstance(caught.value.__cause__, TypeError)


def test_what_is_not_there_or_no_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at") as missing:
        nnx.load_from_checkpoint(Net, tmp_path / "nothing")
    assert missing.value.remedy == "Check the path."
    for wrong in (Net(2), dict, "Net"):
        with pytest.raises(OptionError, match="cannot be loaded from a checkpoint"):
            nnx.load_from_checkpoint(wrong, tmp_path)  # type: ignore[arg-type]


CLI = "lightning.pytorch.cli.instantiate_module"


class Activation(enum.Enum):
    relu = 1
    tanh = 2


@dataclass
class Sizes:
    hidden: int
    shape: tuple[int, int] = (1, 1)


class Configured(LightningModule):
    """A module as LightningCLI builds it: its arguments are typed."""

    def __init__(
        self,
        sizes: Sizes | None = None,
        activation: Activation = Activation.relu,
        folder: Path | None = None,
        encoder: nn.Module | None = None,
        function: Callable[..., Any] | None = None,
        anything: Any = None,
        rates: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


def configured(path: Path, **arguments: Any) -> Path:
    content = {"state_dict": {}, "hyper_parameters": {"_instantiator": CLI, **arguments}}
    torch.save({**content, "pytorch-lightning_version": "2.6.4"}, path)
    return path


def test_a_configuration_of_lightning_cli_is_plain_data_in_the_types_that_the_class_declares(
    tmp_path: Path,
) -> None:
    path = configured(
        tmp_path / "a.ckpt",
        sizes={"hidden": 3, "shape": [2, 4]},
        activation="tanh",
        folder="data",
        anything={"any": ["thing"]},
        rates=[0.1, 1],
    )
    assert nnx.load_from_checkpoint(Configured, path).given == {
        "sizes": Sizes(3, (2, 4)),
        "activation": Activation.tanh,
        "folder": Path("data"),
        "encoder": None,
        "function": None,
        "anything": {"any": ["thing"]},
        "rates": [0.1, 1],
    }


POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "touch ran", "shell": True}}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"anything": POPEN}, ["subprocess.Popen"]),
        ({"anything": {"deep": [POPEN]}}, ["subprocess.Popen"]),
        ({"encoder": {"class_path": "evil_side_effect.Evil"}}, ["evil_side_effect.Evil"]),
        ({"encoder": "Evil"}, ["Evil"]),
        ({"function": "os.system"}, ["os.system"]),
        ({"function": {"class_path": "logging.FileHandler"}}, ["logging.FileHandler"]),
        ({"sizes": POPEN}, ["subprocess.Popen"]),
        ({"_class_path": "not.imported.Class"}, ["not.imported.Class"]),
    ],
)
def test_what_a_configuration_names_is_not_imported_without_trust(
    tmp_path: Path, arguments: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil_side_effect.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    path = configured(tmp_path / "a.ckpt", **arguments)
    for trust in (False, ["torch.nn.ReLU"], ["subprocess"]):
        with pytest.raises(CheckpointError, match=f"names.*{names[0]!r}") as caught:
            nnx.load_from_checkpoint(Configured, path, trust=trust)
        assert f"trust={names!r}" in str(caught.value)
    assert not Path("ran").exists()
    assert not Path("imported").exists()


def test_a_name_inside_of_a_trusted_one_and_yaml_in_a_string_must_be_trusted_too(tmp_path: Path) -> None:
    inner = {"class_path": "torch.nn.Sequential", "dict_kwargs": {"function": "os.system"}}
    hidden = '{"class\\u005fpath": "subprocess.Popen"}'
    for arguments in ({"encoder": inner}, {"anything": hidden}):
        path = configured(tmp_path / "a.ckpt", **arguments)
        with pytest.raises(CheckpointError, match="contain names to import or call"):
            nnx.load_from_checkpoint(Configured, path, trust=["torch.nn.Sequential"])


def test_what_is_trusted_is_built_and_what_the_caller_passes_needs_no_trust(tmp_path: Path) -> None:
    relu = {"class_path": "torch.nn.ReLU", "init_args": {"inplace": True}}
    path = configured(tmp_path / "a.ckpt", encoder=relu, function="math.sqrt")
    for trust in (True, ["torch.nn.ReLU", "math.sqrt"]):
        given = nnx.load_from_checkpoint(Configured, path, trust=trust).given
        assert isinstance(given["encoder"], nn.ReLU)
        assert given["function"] is math.sqrt
    encoder = nn.Tanh()
    given = nnx.load_from_checkpoint(Configured, path, encoder=encoder, function=math.exp).given
    assert given["encoder"] is encoder
    assert given["function"] is math.exp


def test_no_other_instantiator_than_lightnings_is_called(tmp_path: Path) -> None:
    path = configured(tmp_path / "a.ckpt", _instantiator="os.system")
    with pytest.raises(CheckpointError, match=r"its instantiator 'os\.system' is not Lightning's own"):
        nnx.load_from_checkpoint(Configured, path, trust=True)


def test_it_is_a_name_of_the_package() -> None:
    assert "load_from_checkpoint" in nnx.__all__
    assert nnx.load_from_checkpoint.__module__ == "nnx_core.lightning.loading"


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_own_call_says_what_reads_a_directory(tree: str, tmp_path: Path) -> None:
    module = importlib.import_module(tree)
    storage.save(tmp_path / "a.ckpt", {"model.w": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"a\.ckpt' is a directory.*Use `nnx\.load_from_checkpoint"):
        module.LightningModule.load_from_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.parametrize("saved", [["width", 4], "width", 7])
def test_hyper_parameters_that_are_no_mapping_are_refused(tmp_path: Path, saved: Any) -> None:
    torch.save({"state_dict": Net(4).state_dict(), "hyper_parameters": saved}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="no mapping of names"):
        nnx.load_from_checkpoint(Net, tmp_path / "a.ckpt", width=4)
