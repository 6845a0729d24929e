"""nnScaler's files, made after its source (`fixtures/like_nnscaler.py`), not by nnScaler itself."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nnx_checkpoint as storage
from nnx_checkpoint.reading.naming import stored_optimizer_states
from nnx_core.errors import CheckpointError
from nnx_nnscaler.checkpoints import NnScaler


def script() -> ModuleType:
    path = Path(__file__).parent / "fixtures" / "like_nnscaler.py"
    spec = importlib.util.spec_from_file_location("like_nnscaler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["like_nnscaler"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


LIKE = script()
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"plan": "dp"},
    "data parallel": {"plan": "dp", "units": 2},
    "data parallel, deduped": {"plan": "dp", "units": 3, "deduped": True},
    "ZeRO on 2": {"plan": "dp", "units": 2, "zero": True},
    "ZeRO on 3": {"plan": "dp", "units": 3, "zero": True},
    "ZeRO in 2 groups": {"plan": "dp", "units": 4, "zero": True, "groups": 2},
    "ZeRO in 2 groups, deduped": {"plan": "dp", "units": 4, "zero": True, "groups": 2, "deduped": True},
    "tensor parallel": {"plan": "tp"},
    "tensor parallel, deduped": {"plan": "tp", "units": 2, "deduped": True},
    "tensor parallel and ZeRO": {"plan": "tp", "units": 2, "zero": True},
    "tensor parallel and ZeRO on 3": {"plan": "tp", "units": 3, "zero": True, "deduped": True},
    "repeated at other places of the buckets": {"plan": "mixed", "units": 2, "zero": True},
    "pipeline": {"plan": "pp"},
    "pipeline and ZeRO": {"plan": "pp", "units": 2, "zero": True},
}


def same(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(plan: str, **options: Any) -> Path:
        LIKE.write_directory(tmp_path / "saved", plan, **options)
        return tmp_path / "saved"

    return write


def edit(file: Path, change: Callable[[Any], None]) -> None:
    loaded = torch.load(file, weights_only=False)
    change(loaded)
    torch.save(loaded, file)


def plan_of(loaded: Any) -> Any:
    return loaded["state_dict"]["CUBE_EXTRA_STATE"]


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[*LAYOUTS])
def test_every_layout_gives_the_complete_state_under_original_names(
    layout: dict[str, Any], written: Callable[..., Path]
) -> None:
    stored = storage.open_checkpoint(written(**layout))
    model, states = LIKE.full_state()
    assert stored.format == "nnscaler"
    for name, value in model.items():
        same(stored.read(f"model.{name}"), value)
    for name, state in states.items():
        for key, value in state.items():
            same(stored.read(f"optim.0.state.{name}.{key}"), value)
    assert stored.aliases == {"model.head.weight": "model.embed.weight"}
    same(stored.read("model.metric.total"), torch.tensor(5.0))
    assert len([name for name in stored.tensors if name.startswith("optim.")]) == 9
    assert stored.world_size == len(LIKE.PLANS[layout["plan"]]) * layout.get("units", 1)


def test_the_param_group_and_lightnings_own_entries_are_kept(written: Callable[..., Path]) -> None:
    stored = storage.open_checkpoint(written("tp", units=2, zero=True))
    (optimizer,) = stored.objects["optim"]
    assert optimizer["groups"] == [
        {
            "lr": 0.01,
            "betas": (0.9, 0.999),
            "weight_decay": 0.1,
            "params": ["embed.weight", "inner.weight", "inner.bias", "frozen"],
        }
    ]
    trainer = stored.objects["trainer"]
    assert trainer["global_step"] == 4 and trainer["hyper_parameters"] == {"width": 4}
    assert trainer["lr_schedulers"] == [{"last_epoch": 4, "base_lrs": [0.01]}]
    assert trainer["callbacks"]["Best"]["score"].item() == 0.25
    assert not {"state_dict", "optimizer_states", "nnscaler-extra-state"} & set(trainer)


def test_only_the_files_that_a_deduped_checkpoint_needs_are_read(written: Callable[..., Path]) -> None:
    path = written("dp", units=3, deduped=True)
    for rank in (1, 2):
        (path / f"{rank}.pt").unlink()
    same(storage.open_checkpoint(path).read("model.inner.bias"), LIKE.full_state()[0]["inner.bias"])


def test_tied_weights_are_stored_under_the_name_that_the_optimizer_knows(
    written: Callable[..., Path],
) -> None:
    path = written("dp")

    def rename(loaded: Any) -> None:
        for area in plan_of(loaded)["param_area_map"].values():
            if area["orig_name"] == "embed.weight":
                area["orig_name"] = "head.weight"

    edit(path / "0.pt", rename)
    stored = storage.open_checkpoint(path)
    assert stored.aliases == {"model.head.weight": "model.embed.weight"}
    same(stored.read("optim.0.state.embed.weight.exp_avg"), LIKE.full_state()[1]["embed.weight"]["exp_avg"])


def test_a_checkpoint_without_optimizer_is_read(written: Callable[..., Path]) -> None:
    path = written("tp")
    for file in path.glob("*.pt"):
        edit(file, lambda loaded: loaded.pop("optimizer_states"))
    stored = storage.open_checkpoint(path)
    assert "optim" not in stored.objects and len(stored.tensors) == 7


def test_state_that_is_no_tensor_and_parameters_that_were_never_used_are_kept_as_they_are(
    written: Callable[..., Path],
) -> None:
    path = written("dp")

    def change(loaded: Any) -> None:
        state = loaded["optimizer_states"][0]["state"]
        state[0] |= {"step": 4, "mode": "x"}
        del state[1]

    edit(path / "0.pt", change)
    stored = storage.open_checkpoint(path)
    same(stored.read("optim.0.state.embed.weight.step"), torch.tensor(4.0))
    assert stored.objects["optim"][0]["values"] == {"embed.weight": {"mode": "x"}}
    assert "optim.0.state.inner.weight.exp_avg" not in stored.tensors


def test_a_merged_file_is_read(tmp_path: Path) -> None:
    LIKE.write_merged(tmp_path / "merged.ckpt")
    stored = storage.open_checkpoint(tmp_path / "merged.ckpt")
    model, states = LIKE.full_state()
    assert stored.format == "nnscaler"
    assert stored.aliases == {"model.head.weight": "model.embed.weight"}
    for name, value in model.items():
        same(stored.read(f"model.{name}"), value)
    same(stored.read("model.metric.total"), torch.tensor(5.0))
    same(stored.read("optim.0.state.1.exp_avg"), states["inner.weight"]["exp_avg"])
    (optimizer,) = stored_optimizer_states(stored) or ()
    assert optimizer["param_groups"][0]["params"] == [0, 1, 2, 3] and set(optimizer["state"]) == {0, 1, 2}


@pytest.mark.parametrize("layout", ["ZeRO on 3", "tensor parallel and ZeRO", "pipeline"])
def test_a_converted_checkpoint_holds_the_same(
    layout: str, written: Callable[..., Path], tmp_path: Path
) -> None:
    path = written(**LAYOUTS[layout])
    storage.convert(path, tmp_path / "converted")
    source, target = storage.open_checkpoint(path), storage.open_checkpoint(tmp_path / "converted")
    assert target.format == "nnx" and set(target.tensors) == set(source.tensors)
    assert target.aliases == source.aliases and target.objects["optim"] == source.objects["optim"]
    for name in source.tensors:
        same(target.read(name), source.read(name))


def stepped(model: dict[str, Tensor], states: dict[str, Any]) -> Tensor:
    """The parameters after one more step of AdamW."""
    names = [name for name in LIKE.SHAPES if name not in (*LIKE.BUFFERS, *LIKE.FROZEN)]
    parameters = [torch.nn.Parameter(model[name].clone()) for name in names]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    numbered = {number: states[name] for number, name in enumerate(names)}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def test_training_goes_on_in_plain_torch_as_it_would_have(written: Callable[..., Path]) -> None:
    stored = storage.open_checkpoint(written("tp", units=2, zero=True))
    model = LIKE.full_state()[0]
    (state,) = stored_optimizer_states(stored) or ()
    read = {p: {k: v.stored.read(v.key) for k, v in s.items()} for p, s in state["state"].items()}
    found = stepped({name: stored.read(f"model.{name}") for name in model}, read)
    same(found, stepped(*LIKE.full_state()))
    assert not torch.equal(found, torch.cat([model[name].flatten() for name in read]))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3])
def test_a_missing_file_of_a_rank_is_named(rank: int, written: Callable[..., Path]) -> None:
    path = written("tp", units=2, zero=True)
    (path / f"{rank}.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"{rank}\.pt' is missing"):
        storage.open_checkpoint(path)


def test_files_of_two_saves_are_not_mixed(written: Callable[..., Path]) -> None:
    path = written("tp")
    edit(path / "1.pt", lambda loaded: loaded.update(global_step=6))
    with pytest.raises(CheckpointError, match=r"different steps, \{0: 4, 1: 6\}.*interrupted"):
        storage.open_checkpoint(path)


def test_a_truncated_file_is_named(written: Callable[..., Path]) -> None:
    path = written("tp")
    os.truncate(path / "1.pt", (path / "1.pt").stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"1\.pt"):
        storage.open_checkpoint(path)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "executed"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_malicious_file_is_refused_and_not_executed(
    rank: int, written: Callable[..., Path], tmp_path: Path
) -> None:
    path = written("tp")
    edit(path / f"{rank}.pt", lambda loaded: loaded.update(evil=Payload(tmp_path / "executed")))
    (tmp_path / "executed").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=rf"{rank}\.pt"):
        storage.open_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_a_malicious_merged_file_is_refused_and_not_executed(tmp_path: Path) -> None:
    LIKE.write_merged(tmp_path / "merged.ckpt")
    edit(tmp_path / "merged.ckpt", lambda loaded: loaded.update(evil=Payload(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match=r"merged\.ckpt"):
        storage.open_checkpoint(tmp_path / "merged.ckpt")
    assert not (tmp_path / "executed").exists()


def test_objects_of_the_user_need_trust_and_are_restored_with_it(written: Callable[..., Path]) -> None:
    path = written("tp", units=2, zero=True)
    schedule = storage.TensorEntry("x", (), "float32", ())
    for file in path.glob("*.pt"):
        edit(file, lambda loaded: loaded.update(schedule=schedule))
    with pytest.raises(CheckpointError, match="weights_only=False"):
        storage.open_checkpoint(path)
    stored = storage.open_checkpoint(path, weights_only=False)
    assert stored.objects["trainer"]["schedule"] == schedule
    same(stored.read("optim.0.state.inner.weight.exp_avg"), LIKE.full_state()[1]["inner.weight"]["exp_avg"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: plan_of(s)["param_area_map"]["inner_bias_13"].update(val_chunks=2), "one of 2 summands"),
        (lambda s: plan_of(s)["compute_config"].update(use_zero=3), "use_zero=3"),
        (
            lambda s: s["state_dict"].update({"sub.CUBE_EXTRA_STATE": {}}),
            r"parallel modules at \['', 'sub.'\]",
        ),
        (lambda s: s["state_dict"].pop("CUBE_EXTRA_STATE"), r"parallel modules at \[\]"),
        (lambda s: s.pop("state_dict"), "lacks 'nnscaler-extra-state' or 'state_dict'"),
        (lambda s: s["optimizer_states"][0]["param_groups"].append({}), "several param groups"),
        (lambda s: plan_of(s).pop("param_area_map"), "differs from the format of nnScaler: KeyError"),
        (lambda s: s["state_dict"].update(inner_bias_13=torch.zeros(2)), "2 elements, expected at least 5"),
        (
            lambda s: plan_of(s)["param_area_map"]["inner_weight_12"].update(
                slicers=(slice(0, 5), slice(0, 1))
            ),
            "do not make up tensor 'model.inner.weight'",
        ),
    ],
)
def test_files_that_cannot_be_true_are_refused(
    change: Callable[[Any], None], message: str, written: Callable[..., Path]
) -> None:
    path = written("tp")
    edit(path / "0.pt", change)
    with pytest.raises(CheckpointError, match=message):
        NnScaler().open(path)


def test_one_ranks_file_is_not_taken_for_the_whole(written: Callable[..., Path]) -> None:
    path = written("tp")
    with pytest.raises(CheckpointError, match=r"one rank's shard of a checkpoint of type 'sharded'.*Open"):
        storage.open_checkpoint(path / "0.pt")


def test_other_files_are_not_taken_for_nnscalers(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "0.pt")
    (tmp_path / "text.pt").write_text("nnscaler-extra-state")
    assert not NnScaler().guess_can_open(tmp_path)
    assert not NnScaler().guess_can_open(tmp_path / "0.pt")
    assert not NnScaler().guess_can_open(tmp_path / "text.pt")
    assert not NnScaler().guess_can_open(tmp_path / "nothing")
