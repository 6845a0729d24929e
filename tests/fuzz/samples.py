"""Small checkpoints of every format, for the fuzzer to change."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import nnx_checkpoint
from nnx_base.shard import shard_of

__all__ = ["FORMATS", "make_samples"]

PACKAGES = Path(__file__).resolve().parents[2] / "packages"


def make_samples(format: str, place: Path) -> list[Path]:
    """Write the samples of a format; each is a directory, in which a checkpoint of one file is ``file``."""
    place.mkdir()
    return FORMATS[format](place)


def tensors() -> dict[str, Tensor]:
    """Every element has a value of its own, so that it shows where it was read."""
    torch.manual_seed(3)
    return {
        "model.a": torch.arange(12.0).view(3, 4) + 100,
        "model.b.weight": torch.arange(12.0).view(4, 3) + 200,
        "model.b.bias": torch.arange(3.0) + 300,
        "model.half": torch.arange(6.0).add(400).bfloat16(),
        "model.count": torch.tensor(7),
        "model.mask": torch.tensor([True, False, True]),
        "model.wave": torch.complex(torch.arange(3.0), torch.arange(3.0) + 500),
        "model.none": torch.zeros(0, 4),
        "optim.0.state.a.exp_avg": torch.arange(12.0).view(3, 4) + 600,
        "optim.0.state.a.step": torch.tensor(9.0),
    }


def objects() -> dict[str, Any]:
    """Return a Trainer's state."""
    trainer = {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "callbacks": {"EMA": {"average": torch.arange(3.0) + 700}},
        "hyper_parameters": {"width": 4, "names": ("a", 2), "limits": {1: float("inf")}},
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a"]}]
    return {"trainer": trainer, "extra": {}, "optim": [{"groups": groups, "values": {}}]}


def _own(place: Path) -> Path:
    nnx_checkpoint.save(
        place,
        tensors={name: shard_of(tensor) for name, tensor in tensors().items()},
        objects=objects(),
        rank_objects={"rng": torch.arange(5), "python": (3, (1, 2), None)},
        aliases={"model.tied": "model.a"},
        provenance={"strategy": "some"},
    )
    return place


def _native(place: Path) -> list[Path]:
    golden = shutil.copytree(PACKAGES / "nnx-checkpoint/tests/golden/v1.2.ckpt", place / "v1.2.ckpt")
    return [Path(golden), _own(place / "own.ckpt")]


def _converted(place: Path, to: str, name: str, target: str = "", **options: Any) -> Path:
    source = place / "source.ckpt"
    if not source.exists():
        _own(source)
    (place / name).mkdir()
    path = place / name / (target or "directory")
    nnx_checkpoint.convert(source, path, to=to, **options)
    return path.parent if target else path


def _lightning(place: Path) -> list[Path]:
    model = torch.nn.Linear(3, 2)
    model.register_buffer("strided", torch.arange(24.0).view(2, 3, 4).transpose(0, 2))
    model.register_buffer("wide", torch.arange(3.0).view(3, 1).expand(3, 4))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "callbacks": {"EMA": {"average": torch.ones(2)}},
        "hyper_parameters": {"path": Path("/a"), "width": 3},
    }
    (place / "plain").mkdir()
    torch.save(state, place / "plain" / "file.ckpt")
    return [_converted(place, "lightning", "own", "file.ckpt"), place / "plain"]


def _safetensors(place: Path) -> list[Path]:
    one = _converted(place, "safetensors", "one", "file.safetensors")
    return [one, _converted(place, "safetensors", "many", max_shard_size=150)]


def _dcp(place: Path) -> list[Path]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    state = {
        name.partition(".")[2]: tensor for name, tensor in tensors().items() if name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(place / "torch", overwrite=False)
        dcp.save({"model": state, "steps": [1, {"n": 5}]}, storage_writer=writer, no_dist=True)
    return [_converted(place, "dcp", "own"), place / "torch"]


def _lightning_sharded(place: Path) -> list[Path]:
    return [
        _converted(place, "lightning_sharded", name, strategy=name) for name in ("model_parallel", "fsdp")
    ]


def _deepspeed(place: Path) -> list[Path]:
    names = (
        "zero2_world2_bf16",
        "zero3_world2_fp32",
        "zero2_world2_bf16_universal",
        "zero3_world2_lightning",
    )
    return [
        Path(shutil.copytree(PACKAGES / "nnx-deepspeed/tests/fixtures/deepspeed" / name, place / name))
        for name in names
    ]


def _colossalai(place: Path) -> list[Path]:
    """Write a checkpoint as `save_sharded_model` and `save_sharded_optimizer` do."""
    path = place / "saved"
    (path / "modeling").mkdir(parents=True)
    (path / "optimizer").mkdir()
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(3.0) + 50}
    moments = {number: {"step": 3, "exp_avg": value + 100} for number, value in enumerate(state.values())}
    names = {}
    for number, (name, value) in enumerate(state.items()):
        names[name] = f"pytorch_model-{number:05d}.bin"
        torch.save({name: value}, path / "modeling" / names[name])
    _write_index(path / "modeling/pytorch_model.bin.index.json", {"total_size": 0.1}, names)
    torch.save([{"lr": 0.1, "params": [0, 1]}], path / "optimizer/pytorch_optim_group.bin")
    torch.save(moments, path / "optimizer/pytorch_optim-00001.bin")
    metadata = {"param_groups": "pytorch_optim_group.bin", "total_size": 0.2}
    index = dict.fromkeys(map(str, moments), "pytorch_optim-00001.bin")
    _write_index(path / "optimizer/pytorch_optim.bin.index.json", metadata, index)
    (path / "running_states.json").write_text('{"epoch": 1, "step": 3}')
    return [path]


def _write_index(file: Path, metadata: Mapping[str, Any], names: Mapping[str, str]) -> None:
    file.write_text(json.dumps({"metadata": metadata, "weight_map": names}, indent=2) + "\n")


def _script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def _nnscaler(place: Path) -> list[Path]:
    like = _script(PACKAGES / "nnx-nnscaler/tests/fixtures/like_nnscaler.py")
    like.write_directory(place / "tp", "tp", units=2, zero=True)
    like.write_directory(place / "mixed", "mixed", units=2, zero=True)
    (place / "merged").mkdir()
    like.write_merged(place / "merged" / "file.pt")
    return [place / "tp", place / "mixed", place / "merged"]


def _fairscale(place: Path) -> list[Path]:
    """Save ``local_state_dict()`` and ``local_metadata_dict()`` of two ranks."""
    flat = torch.arange(24.0) + 10  # weight 4x3, bias 4, gain 7, one element of padding
    layout = {"names": ["weight", "bias", "gain"], "shapes": [(4, 3), (4,), (7,)], "numels": [12, 4, 7]}
    (place / "saved").mkdir()
    for rank in range(2):
        own = {**layout, "padding": rank}
        units = [
            {"fsdp_path": "net", "params": {"flat_param_0": own}, "shared_param_info": [("bias", "again")]}
        ]
        part = flat[rank * 12 : rank * 12 + 12].clone()
        state = {
            "weights": {"net.flat_param_0": part, "scale": torch.tensor([5.0])},
            "metadata": {
                "param_metadata": units,
                "buffer_names": ["scale"],
                "no_broadcast_optim_state": False,
            },
        }
        torch.save(state, place / "saved" / f"shard-{rank}.pt")
    return [place / "saved"]


FORMATS: dict[str, Callable[[Path], list[Path]]] = {
    "nnx": _native,
    "lightning": _lightning,
    "safetensors": _safetensors,
    "dcp": _dcp,
    "lightning_sharded": _lightning_sharded,
    "deepspeed": _deepspeed,
    "colossalai": _colossalai,
    "nnscaler": _nnscaler,
    "fairscale": _fairscale,
}
"""The writer of each format's samples."""
