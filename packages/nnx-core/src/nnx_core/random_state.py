"""The random state of one process, as plain data: Python's, numpy's and torch's generators.

A captured state consists of dicts, numbers and bytes, so typed JSON can store it and torch's restricted
unpickler can load it. This module also owns the policy for another world size. It depends neither on files
nor on Lightning.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nnx_core.errors import CheckpointError

__all__ = ["RandomState", "capture", "forked", "host_state_kept", "restore", "resume"]

State = dict[str, Any]


def capture(*, host_only: bool = False) -> State:
    """Return the state of every global generator of this process.

    Args:
        host_only: Leave out the current device's generator.

    Example:
        >>> before = capture()
        >>> first = random.random(), float(torch.rand(()))
        >>> restore(before)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    version, words, gauss = random.getstate()
    state: State = {
        "python": (version, np.array(words, np.uint32).tobytes(), gauss),
        "numpy": _packed(np.random.get_state(legacy=False)),
        "torch": _bytes(torch.get_rng_state()),
        "seed": torch.initial_seed(),
    }
    device = None if host_only else _device_module()
    if device is not None:
        state["device"] = {"type": _name(device), "state": _bytes(device.get_rng_state())}
    return state


def restore(state: State) -> None:
    """Restore every global generator; the device's only on a device of the same type."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
    np.random.set_state(_unpacked(state["numpy"]))
    torch.set_rng_state(_tensor(state["torch"]))
    device, saved = _device_module(), state.get("device")
    if device is not None and saved is not None and saved["type"] == _name(device):
        device.set_rng_state(_tensor(saved["state"]))


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch's CPU at the end of a context."""
    state = capture(host_only=True)
    try:
        yield
    finally:
        restore(state)


@contextmanager
def forked() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch at the end of a context, on all devices in use.

    Example:
        >>> before = capture()["python"]
        >>> with forked():
        ...     _ = random.random()
        >>> capture()["python"] == before
        True
    """
    python, arrays = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def reseed(base: int, rank: int, step: int) -> None:
    """Seed every global generator from a run's seed, a rank and a step."""
    digest = hashlib.blake2b(f"{base}:{rank}:{step}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1  # torch takes 63 bits on every device
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _device_module() -> Any:
    """Return the module of the initialized device with a generator, without initializing one; or None."""
    for module in (torch.cuda, torch.xpu):
        if module.is_available() and module.is_initialized():
            return module
    return None


def _name(module: Any) -> str:
    return str(module.__name__.rpartition(".")[2])


def _packed(value: Any) -> Any:
    """Convert arrays to bytes, because torch's restricted unpickler takes no arrays."""
    if isinstance(value, dict):
        return {key: _packed(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "bytes": value.tobytes()}
    return value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"dtype", "bytes"}:
        return np.frombuffer(value["bytes"], np.dtype(value["dtype"]))
    return {key: _unpacked(item) for key, item in value.items()}


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def resume(
    own: State | None, *, seed: int, rank: int, size: int, saved_size: int, step: int, strict: bool
) -> str:
    """Restore this rank's random state from a run of any world size.

    With the same number of ranks each restores its own state. With fewer ranks, the other states are dropped.
    With more ranks, each new rank is seeded from the run's seed, its rank and the step.

    Args:
        own: The saved state of this rank; None if the saved run had no such rank.
        seed: The seed of the saved run, on its rank zero.
        rank: This rank.
        size: The number of ranks of this run.
        saved_size: The number of ranks of the saved run.
        step: The number of optimizer steps.
        strict: Refuse another number of ranks.

    Returns:
        The note for the user; empty if the random state is exactly that of the saved run.

    Raises:
        CheckpointError: `strict`, and the number of ranks differs.
    """
    sizes = f"the checkpoint holds the random state of {saved_size} ranks, and this run has {size}"
    if strict and size != saved_size:
        raise CheckpointError(
            f"{sizes}, so random numbers cannot resume exactly.",
            remedy=f"Resume with {saved_size} processes, or without strict.",
        )
    if own is not None:
        restore(own)
    else:
        reseed(seed, rank, step)
    if size == saved_size:
        return ""
    if size < saved_size:
        return f"{sizes}: those of ranks {size} to {saved_size - 1} are dropped."
    return f"{sizes}: ranks {saved_size} to {size - 1} get new seeds, made from the run's seed and the step."


class RandomState:
    """The random state of all ranks, as an entry of the state that Fabric saves and loads.

    ``fabric.load`` with such an object restores the generators of Python, numpy and torch; without one, nnx
    does not change them. Strategies of nnx save every rank's state. Fabric's other strategies save only rank
    zero's, and the other ranks get new seeds.

    Args:
        strict: Refuse a checkpoint of another number of ranks.

    Example:
        ``fabric.save(path, {"model": model, "optimizer": optimizer, "random": nnx.RandomState()})``
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict

    def state_dict(self) -> State:
        """Return this rank's random state."""
        rank, size = _rank_and_size()
        return {"rank": rank, "world_size": size, "rng": capture()}

    def load_state_dict(self, state: State) -> None:
        """Restore this rank's random state, or seed this rank from another's.

        Args:
            state: The result of `state_dict` on this rank, or on rank zero if this rank is new.

        Raises:
            CheckpointError: `strict`, and the number of ranks differs.
        """
        rank, size = _rank_and_size()
        note = resume(
            state["rng"] if state["rank"] == rank else None,
            seed=state["rng"]["seed"],
            rank=rank,
            size=size,
            saved_size=state["world_size"],
            step=0,
            strict=self.strict,
        )
        if note and rank == 0:
            warnings.warn(note, stacklevel=2)


def _rank_and_size() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
