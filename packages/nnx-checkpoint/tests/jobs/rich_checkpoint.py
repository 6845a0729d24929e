"""A small checkpoint with every kind of content, and a comparison of two such checkpoints."""

from __future__ import annotations

import argparse
import collections
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor

import nnx_checkpoint
from nnx_base.shard import shard_of


def rich_tensors() -> dict[str, Tensor]:
    """Every kind of tensor, and the states of two optimizers."""
    torch.manual_seed(3)
    return {
        "model.net.weight": torch.randn(300, 40),
        "model.net.half": torch.randn(5).bfloat16(),
        "model.net.scalar": torch.tensor(3),
        "model.net.empty": torch.zeros(0, 4),
        "model.net.complex": torch.randn(3, dtype=torch.complex64),
        "model.net.wide": torch.randn(2, 2, dtype=torch.complex128),
        "model.mask": torch.tensor([True, False]),
        "model.unsigned": torch.arange(4).to(torch.uint16),
        "model.eight": torch.randn(4).to(torch.float8_e4m3fn),
        "optim.0.state.net.weight.exp_avg": torch.randn(300, 40),
        "optim.0.state.net.weight.step": torch.tensor(7.0),
        "optim.1.state.net.half.momentum_buffer": torch.randn(5),
    }


def rich_objects() -> dict[str, Any]:
    """Return a Trainer's state with every type that has an encoding."""
    values = {
        "attributes": AttributeDict(x=1, inner=AttributeDict(y=[1])),
        "namespace": argparse.Namespace(a=1, t=torch.ones(2)),
        "default": collections.defaultdict(list, {"q": [1]}),
        "deque": collections.deque([1, 2], maxlen=3),
        "ordered": collections.OrderedDict(a=1),
        "scalar": np.float32(1.5),
        "array": np.arange(3),
        "sets": ({1, 2}, frozenset([1])),
        "numbers": (2**1000, float("inf"), 1j, True, None),
        "bytes": (b"abc", bytearray(b"d")),
        "torch": (torch.Size([1, 2]), torch.float16, torch.device("cpu")),
        "path": pathlib.Path("/a/b"),
        "keys": {1: "a", (2, "x"): "b", "$": "c"},
    }
    trainer = {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "lr_schedulers": [{"last_epoch": 1}],
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"EMA": {"average": torch.randn(3)}},
        "hyper_parameters": values,
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["net.weight"]}, {"lr": 0.2, "params": []}]
    return {
        "trainer": trainer,
        "extra": {"net._extra_state": {"count": 1}},
        "optim": [
            {"groups": groups, "values": {"net.weight": {"count": 5}}},
            {"groups": [{"lr": 1.0, "initial_lr": 2.0, "params": ["net.half"]}], "values": {}},
        ],
    }


def save_rich(path: Path) -> nnx_checkpoint.Checkpoint:
    """Write it in our own format, and open it."""
    nnx_checkpoint.save(
        path,
        tensors={name: shard_of(tensor) for name, tensor in rich_tensors().items()},
        objects=rich_objects(),
        rank_objects={"rng": torch.arange(5), "python": (3, (1, 2), None)},
        aliases={"model.tied": "model.net.weight"},
        provenance={"strategy": "some"},
    )
    return nnx_checkpoint.open_checkpoint(path)


def differences(one: nnx_checkpoint.Checkpoint, other: nnx_checkpoint.Checkpoint) -> list[str]:
    """Return the names at which two checkpoints differ in any bit, type or name."""
    found = [f"tensor {name}" for name in set(one.tensors) ^ set(other.tensors)]
    for name in set(one.tensors) & set(other.tensors):
        if not _same(one.read(name), other.read(name)):
            found.append(f"tensor {name}")
    for what in ("aliases", "objects", "world_size", "provenance"):
        if not _same(getattr(one, what), getattr(other, what)):
            found.append(what)
    for rank in range(one.world_size):
        if not _same(one.rank_objects(rank), other.rank_objects(rank)):
            found.append(f"rank {rank}")
    return found


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bytes(_raw(one)) == bytes(_raw(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, argparse.Namespace):
        return _same(vars(one), vars(other))
    return repr(one) == repr(other)


def _raw(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
