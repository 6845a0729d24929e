"""Lite's save and load under every strategy: exact, across strategies and world sizes, and with Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from nnx_base.shard import Box, Shard
from nnx_checkpoint import convert
from nnx_conformance.pool import WorkerPool
from nnx_core.backend import Backend, NoOptions
from nnx_core.errors import CheckpointError
from nnx_core.lightning.namespaces import get_namespace
from nnx_lite import Lite
from nnx_lite.state_dicts import ModuleState, fill_module, fill_optimizer

WRITERS = {"ddp": 2, "fsdp_auto": 2, "nnscaler_tp": 2, "colossalai": 2}
READERS = {
    "ddp": (1, ("nnscaler_tp", "colossalai")),
    "fsdp_auto": (3, ("ddp", "nnscaler_tp")),
    "nnscaler_tp": (2, ("fsdp_auto", "ddp")),
    "colossalai": (2, ("nnscaler_tp", "fsdp_auto")),
}
"""For each strategy: the number of processes, and the strategies whose checkpoints they read."""
FORMS = ("objects", "dicts", "raw")


class Net(nn.Module):
    """Two layers of odd sizes, and a buffer that training changes."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.example_input_array = batch(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))).square().mean()


def batch(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [*model.first.parameters()]}, {"params": [*model.last.parameters()], "lr": 0.02}]
    return torch.optim.Adam(groups, lr=0.01)


class Loop(Lite):
    """A loop over a few batches that every rank sees alike, so that any world trains like one process."""

    def start(self, seed: int = 0) -> None:
        model = Net(seed)
        self.model, self.optimizer = self.setup(model, make_optimizer(model))

    def step(self, seed: int) -> float:
        self.optimizer.zero_grad()
        loss = self.model(batch(seed))
        self.backward(loss)
        self.optimizer.step()
        return float(loss.detach())

    def weights(self, path: Path) -> dict[str, Tensor]:
        self.save(self.model.state_dict(), path)
        return {name: value.clone() for name, value in self.load(path).items()}


class Write(Loop):
    def run(self, folder: Path) -> dict[str, Any]:
        self.start()
        for seed in (1, 2):
            self.step(seed)
        self.save({"model": self.model, "optimizer": self.optimizer, "epoch": 3}, folder / "objects")
        dicts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": 3}
        self.save(dicts, folder / "dicts")
        saved = self.weights(folder / "raw")
        self.go_back_in_memory()
        refused = self.refused(folder / "refused")
        loss = self.step(3)
        return {"saved": saved, "loss": loss, "after": self.weights(folder / "after"), "refused": refused}

    def go_back_in_memory(self) -> None:
        """Restore a copy of the state in memory, and check that the run resumes from it."""
        model = copy.deepcopy(self.model.state_dict())
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        losses = []
        for _ in range(2):
            losses += [[self.step(8), self.step(9)]]
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(
                copy.deepcopy(optimizer)
            )  # torch's own goes on in what it is given
        assert losses[0] == losses[1] and losses[0][0] != losses[0][1]

    def refused(self, path: Path) -> list[str]:
        """Return the errors of saves whose content would lose data."""
        copied = {name: value.clone() for name, value in self.model.state_dict().items()}
        wrong = [copied, {"model": self.model, "state_dict": 1}, {"parts": [self.optimizer.state_dict()]}]
        said = []
        for content in wrong:
            try:
                self.save(content, path)
                said.append("")
            except CheckpointError as error:
                said.append(error.message)
        return said


class Read(Loop):
    def run(self, folder: Path, scratch: Path) -> dict[str, Any]:
        self.start(seed=7)
        loaded: dict[str, Any] = {}
        for form in FORMS:
            self.step(5)  # away from what was loaded before
            content = self.load(folder / form)
            if form == "raw":
                self.model.load_state_dict(content)
            else:
                self.model.load_state_dict(content["model"])
                self.optimizer.load_state_dict(content["optimizer"])
                assert content["epoch"] == 3 and set(content) == {"model", "optimizer", "epoch"}
            loaded[form] = self.weights(scratch / f"loaded-{form}")
            if form != "raw":
                loss = self.step(3)
                loaded[f"after-{form}"] = {"loss": loss, **self.weights(scratch / f"after-{form}")}
        state = {"model": self.model, "optimizer": self.optimizer, "epoch": 0}
        rest = self.load(folder / "objects", state)
        assert rest == {} and state["epoch"] == 3
        loaded["in place"] = self.weights(scratch / "in-place")
        return loaded


def make(cls: type[Loop], strategy: Any, devices: int) -> Any:
    return cls(strategy=None if devices == 1 else strategy, devices=devices)


def write(strategy: str, devices: int, folder: Path) -> Any:
    return make(Write, strategy, devices).run(folder)


def read(strategy: str, devices: int, folders: dict[str, Path], scratch: Path) -> Any:
    return {name: make(Read, strategy, devices).run(path, scratch / name) for name, path in folders.items()}


@pytest.fixture(scope="module")
def written(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {}
    for strategy, devices in WRITERS.items():
        folder = tmp_path_factory.mktemp(strategy)
        made[strategy] = (folder, pool.run(write, strategy, devices, folder, world_size=devices)[0])
    return made


@pytest.mark.full
@pytest.mark.parametrize("strategy", READERS)
def test_every_form_of_content_resumes_exactly_under_every_strategy_and_world_size(
    pool: WorkerPool, written: dict[str, Any], tmp_path: Path, strategy: str
) -> None:
    devices, writers = READERS[strategy]
    folders = {name: written[name][0] for name in writers}
    for outcome in pool.run(read, strategy, devices, folders, tmp_path, world_size=devices):
        for writer, loaded in outcome.items():
            expected = written[writer][1]
            for form in (*FORMS, "in place"):
                for name, value in expected["saved"].items():
                    assert torch.equal(loaded[form][name], value), (writer, form, name)
            for form in ("objects", "dicts"):
                after = loaded[f"after-{form}"]
                assert after["loss"] == pytest.approx(expected["loss"], rel=1e-6)
                for name, value in expected["after"].items():
                    torch.testing.assert_close(after[name], value, msg=f"{writer} {form} {name}")


def test_objects_go_to_a_directory_and_plain_content_to_one_file(written: dict[str, Any]) -> None:
    for strategy, (folder, _) in written.items():
        kinds = {form: (folder / form).is_dir() for form in FORMS}
        assert kinds == {"objects": True, "dicts": strategy != "ddp", "raw": strategy != "ddp"}
    plain = torch.load(written["ddp"][0] / "dicts", weights_only=True)
    assert set(plain) == {"model", "optimizer", "epoch"} and "param_groups" in plain["optimizer"]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("form", "key"), [("raw", "state_dict"), ("dicts", "model")])
def test_a_state_dict_goes_through_a_file_and_back(
    written: dict[str, Any], tmp_path: Path, form: str, key: str
) -> None:
    folder, outcome = written["fsdp_auto"]
    convert(folder / form, tmp_path / "one.ckpt", to="lightning")
    weights = torch.load(tmp_path / "one.ckpt", weights_only=False)[key]
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in outcome["saved"].items()
    }
    convert(tmp_path / "one.ckpt", tmp_path / "back.ckpt", to="nnx")
    found = Lite().load(tmp_path / "back.ckpt")
    found = found if form == "raw" else found["model"]
    assert all(torch.equal(found[name], value) for name, value in outcome["saved"].items())


def test_content_that_would_lose_something_is_refused(written: dict[str, Any]) -> None:
    taken = "content['state_dict']: the shared checkpoint uses this key for its own data."
    nested = "content['parts'] holds sharded tensors and is not a state dict."
    for strategy, (_, outcome) in written.items():
        copied, named, listed = outcome["refused"]
        assert named == taken and copied == ""
        assert listed == ("" if strategy == "ddp" else nested)


# --- one process ---------------------------------------------------------------------------------------


class Alone(Loop):
    def run(self, folder: Path, action: Any) -> Any:
        self.start()
        self.step(1)
        return action(self, folder)


def test_models_of_the_same_names_are_told_apart_by_their_keys(tmp_path: Path) -> None:
    def check(lite: Any, folder: Path) -> None:
        critic = Net(3)
        other, sgd = lite.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.5, momentum=0.9))
        lite.backward(other(batch(2)))
        sgd.step()
        lite.save({"g": lite.model, "d": other, "g_opt": lite.optimizer, "d_opt": sgd}, folder / "gan")
        content = lite.load(folder / "gan")
        assert set(content) == {"g", "d", "g_opt", "d_opt"}
        for key, model in (("g", lite.model), ("d", other)):
            assert torch.equal(content[key]["first.weight"], model.first.weight)
        assert "momentum_buffer" in content["d_opt"]["state"]["first.weight"]
        sgd.load_state_dict(content["d_opt"])
        assert sgd.optimizer.state[critic.first.weight]["momentum_buffer"].any()

    Alone().run(tmp_path, check)


def test_the_arguments_of_save_are_taken_in_fabrics_order_too(tmp_path: Path) -> None:
    def check(lite: Any, folder: Path) -> None:
        lite.save(folder / "first.ckpt", {"epoch": 1})
        lite.save({"epoch": 2}, str(folder / "second.ckpt"))
        assert [lite.load(folder / f"{name}.ckpt") for name in ("first", "second")] == [
            {"epoch": 1},
            {"epoch": 2},
        ]

    Alone().run(tmp_path, check)


def test_a_checkpoint_io_of_the_users_own_writes_everything(tmp_path: Path) -> None:
    class Counting(TorchCheckpointIO):  # type: ignore[misc]
        saved = 0

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            self.saved += 1
            super().save_checkpoint(*args, **kwargs)

    io = Counting()

    def check(lite: Any, folder: Path) -> None:
        lite.save({"model": lite.model, "epoch": 1}, folder / "objects")
        lite.save({"epoch": 1}, folder / "plain")
        assert io.saved == 2 and (folder / "objects").is_file()
        state = {"model": lite.model, "epoch": 0}
        assert lite.load(folder / "objects", state) == {} and state["epoch"] == 1

    Alone(plugins=io).run(tmp_path, check)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    def check(lite: Any, folder: Path) -> None:
        lite.save({"model": lite.model}, folder / "model")
        with pytest.raises(CheckpointError, match="has nothing under the key 'optimizer'"):
            lite.load(folder / "model", {"model": lite.model, "optimizer": lite.optimizer})
        assert lite.load(folder / "model", {"optimizer": lite.optimizer}, strict=False) == {}
        with pytest.raises(CheckpointError, match="nowhere"):
            lite.load(folder / "nowhere")
        stray = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        with pytest.raises(CheckpointError, match="SGD holds no parameter of a model that was set up"):
            lite.save({"model": lite.model, "optimizer": stray}, folder / "stray")

    Alone().run(tmp_path, check)


# --- parts of tensors in memory ------------------------------------------------------------------------


def part(start: int, data: Tensor) -> Shard:
    return Shard((4,), data.dtype, (Box((start,), (2,)),), (data,))


def test_a_state_dict_knows_which_part_a_copied_or_changed_value_is() -> None:
    live, own = torch.ones(2), part(2, torch.full((2,), 5.0))
    state = ModuleState({"w": live, "extra": 1}, {"w": own, "extra": 1})
    assert state.described() == {"w": own, "extra": 1}
    copied = copy.deepcopy(state)
    copied["w"].mul_(3)
    described = copied.described()["w"]
    assert described.boxes == own.boxes and described.data[0].tolist() == [3, 3] and live.tolist() == [1, 1]
    copied["w"] = torch.zeros(4)
    assert copied.described()["w"].is_whole
    copied["w"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"^w is \(3,\) in the state dict and \(4,\) in the model\."):
        copied.described()


def test_a_state_dict_is_put_back_only_where_it_fits() -> None:
    target = part(0, torch.zeros(2))
    fill_module({"w": target}, {"w": part(0, torch.ones(2))}, strict=True)
    assert target.data[0].tolist() == [1, 1]
    fill_module({"w": target}, {"w": torch.arange(4.0), "v": 1}, strict=False)
    assert target.data[0].tolist() == [0, 1]
    for source, message in (
        ({"w": part(2, torch.ones(2))}, "w is sharded in another way in the state dict than in the model."),
        ({"w": torch.ones(3)}, "w is (3,) in the state dict and (4,) in the model."),
        ({"v": torch.ones(4)}, "the state dict is of another model; missing: ['w'], unexpected: ['v']."),
    ):
        with pytest.raises(CheckpointError) as caught:
            fill_module({"w": target}, source, strict=True)
        assert caught.value.message == message and caught.value.remedy
    state = {"state": {"w": {"exp_avg": part(0, torch.ones(2))}}}
    with pytest.raises(CheckpointError, match="the optimizer has no exp_avg of w yet to copy into"):
        fill_optimizer({"state": {}}, state)


class Halves(Backend[Any]):
    """An engine that keeps the first half of every parameter, as a plain tensor."""

    def parallelize(self, module: nn.Module, sample: Any) -> dict[Any, Any]:
        for parameter in module.parameters():
            parameter.data = parameter.data[: len(parameter) // 2].clone()
        return {}

    def unparallelize(self, module: nn.Module) -> dict[Any, Any]:
        return {}

    def shard(self, tensor: Tensor, *, parameter: Any = None) -> Shard:
        whole = (2 * len(tensor), *tensor.shape[1:])
        box = Box((0,) * tensor.dim(), tuple(tensor.shape))
        return Shard(whole, tensor.dtype, (box,), (tensor.detach(),))


class KeepHalves(Lite):
    def run(self, path: Path) -> None:
        model = self.setup(nn.Linear(3, 4))
        kept = copy.deepcopy(model.state_dict())
        plain = {name: value.clone() for name, value in model.state_dict().items()}
        for content in (plain, {"model": plain}):
            with pytest.raises(CheckpointError) as caught:
                self.save(content, path)
            assert "weight of shape (2, 3) is this rank's shard of (4, 3), with no offset." in str(
                caught.value
            )
        assert not path.exists()
        nn.init.zeros_(model.weight)
        model.load_state_dict(kept)
        assert model.weight.equal(kept["weight"])


def test_a_dict_of_parts_that_say_nothing_is_not_saved_as_if_they_were_whole(tmp_path: Path) -> None:
    strategy = get_namespace("lightning.fabric").strategy_class()(Halves(NoOptions()), name="halves")
    KeepHalves(strategy=strategy).run(tmp_path / "halves")
