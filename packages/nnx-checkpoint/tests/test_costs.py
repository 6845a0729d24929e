"""No cost grows faster than the input: many boxes, keys with one hash, deeply nested keys."""

from __future__ import annotations

import collections
import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nnx_checkpoint
from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.format.codec import Encoder, decode
from nnx_checkpoint.format.rankfile_header import Entry, _header

PRIME = (1 << 61) - 1
MASK = (1 << 64) - 1


def torch_file(path: Path, pickled: bytes) -> Path:
    """A file of ``torch.save`` with another pickle."""
    torch.save({"w": torch.ones(1)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else data)
    return path


def spent(work: Callable[[], Any]) -> float:
    """Seconds of processor time."""
    began = time.process_time()
    work()
    return time.process_time() - began


def tuples_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of small integers, made after the source of ``tuplehash``."""
    first, second, fifth = 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(second, -1, 1 << 64)

    def after_one(value: int) -> int:
        lanes = (fifth + value * second) & MASK
        return ((lanes << 31 | lanes >> 33) * first) & MASK

    found: list[tuple[int, int]] = []
    number = 0
    while len(found) < count:
        number += 1
        other = (-after_one(number) * inverse) & MASK
        other -= (1 << 64) * (other >> 63)
        if abs(other) < PRIME:
            found.append((number, other))
    return found


KEYS: dict[str, Callable[[int], list[Any]]] = {
    "integers": lambda count: [i * PRIME + 1 for i in range(count)],
    "tuples": lambda count: list(tuples_of_one_hash(count)),
    "nested": lambda count: [((i * PRIME + 1,), "a") for i in range(count)],
    "complex": lambda count: [complex(-1000003 * i, i) for i in range(1, count + 1)],
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("container", [set, dict.fromkeys])
def test_keys_of_one_hash_are_refused_in_both_files(
    tmp_path: Path, kind: str, container: Callable[[list[Any]], Any]
) -> None:
    keys = KEYS[kind](4000)
    assert len({hash(key) for key in keys}) == 1
    pickled = pickle.dumps({"state_dict": {}, "x": Marked(keys, container)}, protocol=2)
    path = torch_file(tmp_path / "a.ckpt", pickled)

    def refused() -> None:
        with pytest.raises(CheckpointError, match="64 keys have one hash"):
            nnx_checkpoint.open_checkpoint(path)

    assert spent(refused) < 2
    tag = "set" if container is set else "dict"
    encoded = [Encoder("objects").encode(key) for key in keys]
    text = {"$": tag, "items": encoded if container is set else [[key, 0] for key in encoded]}

    def malformed() -> None:
        with pytest.raises(CheckpointError, match="64 keys have one hash"):
            decode(json.loads(json.dumps(text)), tensor=str, opaque=str)

    assert spent(malformed) < 2


class Marked:
    """A dict or a set of keys that Python need not make to pickle it."""

    def __init__(self, keys: list[Any], container: Callable[[list[Any]], Any]) -> None:
        self.keys, self.container = keys, container

    def __reduce__(self) -> tuple[Any, ...]:
        if self.container is set:
            return (set, (self.keys,))
        return (collections.OrderedDict, (), None, None, ((key, 0) for key in self.keys))


def test_ordinary_keys_are_read(tmp_path: Path) -> None:
    keys = [
        *(Path(str(i)) for i in range(300)),
        *range(3000),
        *(float(i) / 3 for i in range(3000)),
        *((i, str(i)) for i in range(3000)),
        None,
        True,
    ]
    tree = {
        "dict": dict.fromkeys(keys, 1),
        "set": set(keys),
        "generators": dict.fromkeys(range(3000), 1 << 127),
    }
    torch.save({"state_dict": {"w": torch.ones(1)}, **tree}, tmp_path / "a.ckpt")
    assert nnx_checkpoint.open_checkpoint(tmp_path / "a.ckpt").objects["trainer"]["dict"] == tree["dict"]
    encoded = json.loads(json.dumps(Encoder("objects").encode(tree)))
    assert decode(encoded, tensor=str, opaque=str) == tree


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dict", "set"])
def test_a_key_that_is_nested_without_end_does_not_end_the_process(tmp_path: Path, kind: str) -> None:
    deep = b")" + b"\x85" * 300_000
    inside = b"}" + deep + b"K\x01s" if kind == "dict" else b"c__builtin__\nset\n]" + deep + b"a\x85R"
    path = torch_file(tmp_path / "a.ckpt", b"\x80\x02}X\x01\x00\x00\x00a" + inside + b"s.")
    child = os.fork()
    if child == 0:
        try:
            nnx_checkpoint.open_checkpoint(path)
        except CheckpointError as error:
            os._exit(0 if "nested too deeply" in str(error) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_one_heavy_key_again_and_again_is_refused(tmp_path: Path) -> None:
    heavy = b"(" + b"K\x01" * 50_000 + b"tq\x01"
    path = torch_file(tmp_path / "a.ckpt", b"\x80\x02}" + heavy + b"K\x01s(" + b"h\x01K\x01" * 20_000 + b"u.")

    def refused() -> None:
        with pytest.raises(CheckpointError, match="too long to hash and compare"):
            nnx_checkpoint.open_checkpoint(path)

    assert spent(refused) < 2


def strips(count: int) -> tuple[Box, ...]:
    return tuple(Box((row, 0), (1, 4)) for row in range(count))


@pytest.mark.full
def test_a_tensor_in_many_boxes_costs_as_much_as_many_tensors(tmp_path: Path) -> None:
    count = 8000
    tensor, boxes = torch.randn(count, 4), sorted(strips(count), key=lambda box: box.offset[0] % 2)
    views = tuple(tensor[box.slices] for box in boxes)
    one = {"w": Shard((count, 4), torch.float32, tuple(boxes), views)}
    many = {f"w{row}": shard_of(tensor[row : row + 1]) for row in range(count)}
    seconds = []
    for name, tensors in (("many", many), ("one", one)):
        seconds.append(
            spent(lambda: nnx_checkpoint.save(tmp_path / name, tensors=tensors, objects={}))  # noqa: B023
            + spent(lambda: nnx_checkpoint.verify(tmp_path / name))  # noqa: B023
        )
    assert torch.equal(nnx_checkpoint.open_checkpoint(tmp_path / "one").read("w"), tensor)
    assert seconds[1] < 4 * seconds[0] + 1


def test_further_boxes_have_the_keys_that_they_had() -> None:
    whole, half = Box((0,), (2,)), Box((0,), (1,))
    names = ["w", "w", "w#1", "w", "__metadata__", "w#1", "__metadata__"]
    header = _header([Entry(name, (2,), "uint8", half if i else whole) for i, name in enumerate(names)])
    assert list(json.loads(header[8:]))[1:] == [
        "w", "w#2", "w#1", "w#3", "__metadata__#1", "w#1#1", "__metadata__#2",
    ]  # fmt: skip


class Call:
    """A call in a pickle that no training program writes."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


HUGE = torch.zeros(1).expand(1 << 40)
CONTAINERS = (set, frozenset, list, tuple, dict, bytearray, collections.OrderedDict, collections.Counter)


@pytest.mark.parametrize("container", [*CONTAINERS, collections.deque, torch.Size])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_huge_tensor_is_not_iterated_to_make_a_container(
    tmp_path: Path, container: Callable[..., Any], zipped: bool
) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"x": Call(container, HUGE)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="makes a container from a value that is not a list"):
        nnx_checkpoint.open_checkpoint(path)


def test_a_huge_tensor_is_not_iterated_as_a_default_or_a_state(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"x": Call(collections.defaultdict, None, HUGE)}, path)
    with pytest.raises(CheckpointError, match="makes a container from a value that is not a list"):
        nnx_checkpoint.open_checkpoint(path)

    class WithState:
        def __reduce__(self) -> tuple[Any, ...]:
            return collections.OrderedDict, (), HUGE

    torch.save({"x": WithState()}, path)
    with pytest.raises(CheckpointError, match="restores an object from a value that is not a dict"):
        nnx_checkpoint.open_checkpoint(path)


def test_a_huge_tensor_is_not_iterated_as_a_number_of_elements(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"huge": HUGE, "w": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("a/data.pkl")
    rebuilt = pickled[: pickled.rindex(b"X\x01\x00\x00\x00w")]  # ends with the first tensor, and its name
    memo = 200
    first = rebuilt[: rebuilt.rindex(b"R") + 1] + b"r" + memo.to_bytes(4, "little")
    for number in (b"j" + memo.to_bytes(4, "little"), b"]", b"X\x01\x00\x00\x003"):
        storage = (
            b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x001X\x03\x00\x00\x00cpu"
            + number
            + b"tQ"
        )
        torch_file(path, first + b"X\x01\x00\x00\x00w" + storage + b"u.")
        with pytest.raises(CheckpointError, match="names a storage in another form"):
            nnx_checkpoint.open_checkpoint(path)


def test_containers_as_picklers_make_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    ordered = collections.OrderedDict(w=torch.ones(2))
    ordered.version = 3  # type: ignore[attr-defined] # torch keeps the state of an OrderedDict
    objects = {
        "ordered": ordered,
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, {"a": [torch.ones(1)]}),
        "set": {1, (2, "a")},
        "size": torch.Size([2, 3]),
        "bytes": bytearray(b"ab"),
        "tensors": [torch.ones(2), torch.ones(3).t(), torch.nn.Parameter(torch.ones(1))],
    }
    for zipped in (True, False):
        torch.save(objects, path, _use_new_zipfile_serialization=zipped)
        assert nnx_checkpoint.open_checkpoint(path).world_size == 1
