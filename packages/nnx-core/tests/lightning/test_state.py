"""Training state under parameter names, in one process: describing, naming, allocating, restoring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnx_checkpoint as storage
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.reading.filling import fill_model
from nnx_checkpoint.reading.naming import (
    LazyStateDict,
    StoredName,
    collect,
    numbered_optimizer_state,
    positional_optimizer_state,
    stored_optimizer_states,
)
from nnx_checkpoint.reading.state import describe_model, describe_optimizer, repoint_optimizer
from nnx_core.backend import Backend, Sample
from nnx_core.errors import CheckpointError
from nnx_core.lightning.checkpoint import CheckpointIO


class Whole(Backend[None]):
    """The smallest engine: everything stays as it is."""

    def parallelize(self, module: nn.Module, sample: Sample) -> dict[nn.Parameter, nn.Parameter]:
        return {}

    def unparallelize(self, module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        return {}


WHOLE = Whole(None)


class Model(nn.Module):
    """A tied pair, a buffer, a buffer that is not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.extra: Any = "extra"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def trained() -> tuple[Model, torch.optim.Optimizer]:
    """A model and an optimizer after a step."""
    torch.manual_seed(0)
    model = Model()
    groups = [{"params": model.first.parameters()}, {"params": [model.second.bias], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups)
    model.second(model.first(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    return model, optimizer


def save(model: Model, optimizer: torch.optim.Optimizer, path: Path) -> storage.Checkpoint:
    """Through the backend, as the strategies do."""
    state = WHOLE.state(model, [optimizer])
    tied = {alias: state.model.tensors[name] for alias, name in state.model.aliases.items()}
    named = {**state.model.tensors, **tied, **state.model.extra}
    CheckpointIO().save_sharded(collect(named, state.optimizers, {"epoch": 3}), path, provenance={})
    return storage.open_checkpoint(path)


def test_a_model_is_described_by_handles_under_its_own_names() -> None:
    model, _ = trained()
    state = describe_model(model, shard_of)
    assert list(state.tensors) == ["seen", "first.weight", "first.bias", "second.bias"]
    assert state.aliases == {"second.weight": "first.weight"}
    assert state.extra == {"_extra_state": "extra"}
    state.tensors["first.bias"].data[0].fill_(7.0)
    assert model.first.bias.tolist() == [7.0] * 3


def test_an_optimizer_is_described_by_parameter_name_in_every_group() -> None:
    model, optimizer = trained()
    state = describe_optimizer(model, optimizer, WHOLE.shard)
    assert [group["params"] for group in state["param_groups"]] == [
        ["first.weight", "first.bias"],
        ["second.bias"],
    ]
    assert [group["lr"] for group in state["param_groups"]] == [0.001, 0.5]
    assert sorted(state["state"]["second.bias"]) == ["exp_avg", "exp_avg_sq", "step"]
    assert isinstance(state["state"]["first.weight"]["exp_avg"], Shard)


def test_a_parameter_that_is_not_the_modules_has_no_name() -> None:
    model, optimizer = trained()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 2))]})
    with pytest.raises(CheckpointError, match=r"Adam holds in param group 2 a parameter of shape \(4, 2\)"):
        describe_optimizer(model, optimizer, WHOLE.shard)


def test_numbers_and_names_of_an_optimizer_state_are_each_others_inverse() -> None:
    model, optimizer = trained()
    state = describe_optimizer(model, optimizer, WHOLE.shard)
    numbered = numbered_optimizer_state(state, keep_names=True)
    assert [group["params"] for group in numbered["param_groups"]] == [[0, 1], [2]]
    assert numbered["param_groups"][1]["param_names"] == ["second.bias"]
    names = ["first.weight", "first.bias", "second.bias"]
    assert positional_optimizer_state(numbered, names) == state
    assert "param_names" not in numbered_optimizer_state(state)["param_groups"][0]
    state["state"]["of all"] = {"count": 3}
    assert numbered_optimizer_state(state)["state"]["of all"] == {"count": 3}


@pytest.mark.parametrize(
    ("name", "shape", "group", "expected"),
    [
        ("exp_avg", (4, 2), {}, (torch.float32, (4, 2), (1, 4))),
        ("row", (4,), {}, (torch.float32, (4,), (1,))),
        ("count", (), {}, (torch.float32, (), ())),
        ("step", (), {"capturable": True}, (torch.float32, (), ())),
    ],
)
def test_state_tensors_are_allocated_like_their_parameter(
    name: str, shape: tuple[int, ...], group: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    parameter = nn.Parameter(torch.ones(2, 4).T)  # as in memory formats such as channels-last
    tensor = WHOLE.new_optimizer_state(parameter, name, shape=shape, dtype=torch.float32, group=group)
    assert (tensor.dtype, tuple(tensor.shape), tensor.stride()) == expected
    assert not tensor.any() and not tensor.requires_grad


def test_an_optimizer_is_repointed_with_its_state_and_its_group_objects() -> None:
    model, optimizer = trained()
    groups = list(optimizer.param_groups)
    state = dict(optimizer.state)
    replaced = {p: nn.Parameter(p.detach().clone()) for p in model.first.parameters()}
    repoint_optimizer(optimizer, replaced)
    assert all(now is before for now, before in zip(optimizer.param_groups, groups, strict=True))
    assert groups[0]["params"] == list(replaced.values()) and groups[1]["params"] == [model.second.bias]
    for old, new in replaced.items():
        assert optimizer.state[new] is state[old] and old not in optimizer.state
    assert len(optimizer.state) == 3


def test_a_repointed_lbfgs_steps_the_new_parameters() -> None:
    old = nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.LBFGS([old], lr=1.0)  # it keeps another name for its group's list
    new = nn.Parameter(old.detach().clone())
    repoint_optimizer(optimizer, {old: new})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = new.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert old.item() == 3.0
    assert abs(new.item()) < 1e-3


def test_a_lazy_state_dict_reads_only_what_is_looked_at(tmp_path: Path, monkeypatch: Any) -> None:
    model, optimizer = trained()
    stored = save(model, optimizer, tmp_path / "x")
    read: list[str] = []
    original = storage.Checkpoint.read
    monkeypatch.setattr(
        storage.Checkpoint, "read", lambda self, name, *box: read.append(name) or original(self, name, *box)
    )
    lazy = LazyStateDict(stored)
    names = {"first.weight", "first.bias", "second.weight", "second.bias", "seen", "_extra_state"}
    assert set(lazy) == names and len(lazy) == 6
    assert "first.bias" in lazy and "cache" not in lazy
    assert lazy.shape("second.weight") == (3, 3) and lazy.shape("_extra_state") is None
    del lazy["seen"]
    lazy |= {"first.bias": torch.ones(3)}
    assert read == [] and lazy.untouched("first.bias") is None
    assert torch.equal(lazy["second.weight"], model.first.weight)
    assert read == ["model.second.weight"] and lazy.untouched("second.bias") == "model.second.bias"
    lazy["renamed"] = lazy.pop("second.bias")
    assert set(lazy) == names - {"seen", "second.bias"} | {"renamed"}
    with pytest.raises(KeyError):
        del lazy["seen"]


def test_filling_takes_what_a_hook_put_in_and_reads_the_rest(tmp_path: Path) -> None:
    model, optimizer = trained()
    lazy = LazyStateDict(save(model, optimizer, tmp_path / "x"))
    lazy["first.bias"] = torch.full((3,), 5.0)
    lazy["_extra_state"] = {"other": 1}
    other = Model()
    fill_model(other, describe_model(other, shard_of), lazy, strict=True)
    assert other.first.bias.tolist() == [5.0] * 3
    assert torch.equal(other.second.bias, model.second.bias)
    assert torch.equal(other.first.weight, model.first.weight)
    assert other.extra == {"other": 1}


def test_a_dtype_that_cannot_be_cast_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    stored = save(model, optimizer, tmp_path / "x")
    other = Model()
    other.seen = torch.tensor(3.0)
    with pytest.raises(CheckpointError, match=r"model.seen is torch.int64 in the checkpoint and"):
        fill_model(other, describe_model(other, shard_of), LazyStateDict(stored), strict=True)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "expected"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),  # the state follows its parameter
        (torch.float32, torch.float64, torch.float64),  # an optimizer that keeps its own precision
        (torch.bfloat16, torch.float64, torch.float64),
    ],
)
def test_optimizer_state_keeps_its_dtype_unless_it_shared_the_parameters(
    tmp_path: Path, dtype: torch.dtype, state_dtype: torch.dtype, expected: torch.dtype
) -> None:
    model, optimizer = trained()
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].to(state_dtype)
    stored = save(model, optimizer, tmp_path / "x")
    states = stored_optimizer_states(stored)
    assert states is not None
    assert isinstance(states[0]["state"]["first.bias"]["step"], StoredName)
    other, another = trained()
    other.to(dtype)
    WHOLE.load_optimizer_state(other, another, states[0])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        restored: dict[str, Tensor] = another.state[theirs]
        assert restored["exp_avg"].dtype == expected
        assert restored["step"].dtype == torch.float32 and restored["step"].item() == 1.0
        assert torch.equal(restored["exp_avg"], optimizer.state[mine]["exp_avg"].to(expected))


def test_another_grouping_of_parameters_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    states = stored_optimizer_states(save(model, optimizer, tmp_path / "x"))
    assert states is not None
    swapped = torch.optim.Adam(
        [{"params": [model.first.weight]}, {"params": [model.first.bias, model.second.bias]}]
    )
    with pytest.raises(CheckpointError, match=r"param group 0 of Adam holds other .* in first.bias"):
        WHOLE.load_optimizer_state(model, swapped, states[0])


def test_a_group_gets_its_hyperparameters_back_and_may_be_in_another_order(
    tmp_path: Path,
) -> None:
    model, optimizer = trained()
    states = stored_optimizer_states(save(model, optimizer, tmp_path / "x"))
    assert states is not None
    other = torch.optim.Adam(
        [{"params": [model.first.bias, model.first.weight]}, {"params": [model.second.bias]}], lr=9.0
    )
    WHOLE.load_optimizer_state(model, other, states[0])
    assert [group["lr"] for group in other.param_groups] == [0.001, 0.5]
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
