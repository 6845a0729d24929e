"""The random state of one process, as plain data: Python's, numpy's and torch's generators.

A captured state has dicts, numbers and bytes only, so that typed JSON holds it and torch's
restricted unpickler loads it. This module also owns the policy for another world size. It knows neither
files nor Lightning, and never touches a generator unless it is asked to.
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
    """The state of every global generator of this process.

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
    """Put every global generator into a captured state; the device's only on a device of the same type."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
    np.random.set_state(_unpacked(state["numpy"]))
    torch.set_rng_state(_tensor(state["torch"]))
    device, saved = _device_module(), state.get("device")
    if device is not None and saved is not None and saved["type"] == _name(device):
        device.set_rng_state(_tensor(saved["state"]))


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Put the generators of Python, numpy and torch's CPU back afterwards."""
    state = capture(host_only=True)
    try:
        yield
    finally:
        restore(state)


@contextmanager
def forked() -> Iterator[None]:
    """Draw nothing from the generators of Python, numpy and torch, on any device in use.

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
    """The device with a generator of its own that this process uses; looking must not initialize one."""
    for module in (torch.cuda, torch.xpu):
        if module.is_available() and module.is_initialized():
            return module
    return None


def _name(module: Any) -> str:
    return str(module.__name__.rpartition(".")[2])


def _packed(value: Any) -> Any:
    """Arrays as bytes: typed JSON takes arrays, torch's restricted unpickler does not."""
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

    With the same number of ranks each gets its own state back. With fewer, the states of the ranks that
    are gone are dropped; with more, each new rank is seeded from the run's seed, its rank and the step.

    Args:
        own: The state that this rank captured in the saved run; None if that had no such rank.
        seed: The saved run's seed, of its rank 0.
        rank: This rank.
        size: The number of ranks there are now.
        saved_size: The number of there that were.
        step: Optimizer steps taken.
        strict: Refuse another number of ranks.

    Returns:
        The note for the user; empty if the random state is exactly that of the saved run.

    Raises:
        CheckpointError: `strict`, and the number of ranks differs.
    """
    said = f"the checkpoint holds the random state of {saved_size} ranks, and this run has {size}"
    if strict and size != saved_size:
        raise CheckpointError(
            f"{said}, so randomness cannot go on exactly.",
            remedy=f"Resume with {saved_size} processes, or without strict.",
        )
    if own is not None:
        restore(own)
    else:
        reseed(seed, rank, step)
    if size == saved_size:
        return ""
    if size < saved_size:
        return f"{said}: those of ranks {size} to {saved_size - 1} are dropped."
    return f"{said}: ranks {saved_size} to {size - 1} get new seeds, made from the run's seed and the step."


class RandomState:
    """Stands for the random state of all ranks, in the state that Fabric saves and loads.

    ``fabric.load`` with such an object restores the generators of Python, numpy and torch on the spot;
    without one, nnx leaves them alone. Under an nnx strategy every rank's state is saved; Fabric's other
    strategies save that of rank 0 only, and each other rank is then given a new seed.

    Args:
        strict: Refuse a checkpoint of another number of ranks.

    Example:
        ``fabric.save(path, {"model": model, "optimizer": optimizer, "random": nnx.RandomState()})``
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict

    def state_dict(self) -> State:
        """This rank's random state."""
        rank, size = _rank_and_size()
        return {"rank": rank, "world_size": size, "rng": capture()}

    def load_state_dict(self, state: State) -> None:
        """Restore this rank's random state, or seed this rank from another's.

        Args:
            state: The result of `state_dict` on this rank; where there is none, on rank 0.

        Raises:
            CheckpointError: `strict`, and the number of ranks differs.
        """
        rank, size = _rank_and_size()
        said = resume(
            state["rng"] if state["rank"] == rank else None,
            seed=state["rng"]["seed"],
            rank=rank,
            size=size,
            saved_size=state["world_size"],
            step=0,
            strict=self.strict,
        )
        if said and rank == 0:
            warnings.warn(said, stacklevel=2)


def _rank_and_size() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
