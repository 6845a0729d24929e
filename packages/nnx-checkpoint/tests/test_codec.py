"""Typed JSON: every value keeps its type in a round trip, and nothing is executed."""

from __future__ import annotations

import argparse
import collections
import enum
import json
import math
import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

import nnx_checkpoint
from nnx_checkpoint.format.codec import Encoder, EnumName, decode
from nnx_core.errors import CheckpointError


def round_trip(value: Any, **options: Any) -> Any:
    encoder = Encoder("objects", **options)
    text = json.dumps(encoder.encode(value), allow_nan=False)
    return decode(
        json.loads(text), tensor=encoder.tensors.__getitem__, opaque=encoder.opaque_objects.__getitem__
    )


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down; nan equals nan and -0.0 differs from 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")])
    | st.builds(pathlib.Path, st.text(st.characters(categories=["L", "N"]), min_size=1))
)
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text()) | st.none()


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain = st.integers() | st.text()
    return (
        st.lists(children)
        | st.lists(children).map(tuple)
        | st.dictionaries(keys, children)
        | st.dictionaries(st.text(), children).map(collections.OrderedDict)
        | st.dictionaries(st.sampled_from(["$", "$x", "a"]), children)
        | st.lists(children).map(lambda items: collections.deque(items, maxlen=len(items) + 1))
        | st.sets(plain)
        | st.frozensets(plain)
        | st.lists(st.integers(0, 9)).map(torch.Size)
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(scalars, containers, max_leaves=25))
def test_every_tree_comes_back_with_its_types(value: Any) -> None:
    assert same(round_trip(value), value)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.int32(-3),
        np.bool_(True),
        np.datetime64("2026-01-01"),
        np.str_("text"),
        argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        collections.defaultdict(list, {1: [2]}),
        collections.defaultdict(None, {"a": 1}),
        collections.Counter([2, 2, 5]),
        bytearray(b"\x00\xff"),
        pytest.param(10**5000, id="a long int"),
        pytest.param(-(10**5000), id="a long negative int"),
        pathlib.PurePosixPath("/a/b"),
        2**63,
    ],
)
def test_a_value_of_a_special_type_comes_back(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    if not isinstance(value, pathlib.PurePath):
        assert type(back) is type(value)
    if isinstance(value, collections.defaultdict):
        assert back.default_factory is value.default_factory


@pytest.mark.parametrize("dtype", ["<f4", ">i8", "?", "<c16", "U3", "S2", "<M8[s]", "<f2"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_an_array_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.zeros(shape, dtype=dtype)
    back = round_trip(value)
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert back.tobytes() == value.tobytes()
    assert back.flags.writeable


def test_the_state_of_every_random_generator_comes_back() -> None:
    import random

    for state in (random.getstate(), np.random.get_state(), np.random.default_rng(3).bit_generator.state):
        back = round_trip(state)
        assert repr(back) == repr(state)
    random.setstate(round_trip(random.getstate()))
    np.random.set_state(round_trip(np.random.get_state()))


def test_an_enum_comes_back_as_its_member() -> None:
    module = types.ModuleType("a_test_module_of_enums")
    for kind in (Color, Level, Mode):
        kind.__module__ = module.__name__
        setattr(module, kind.__name__, kind)
    sys.modules[module.__name__] = module
    try:
        for member in (Color.RED, Level.LOW, Mode.READ):
            assert round_trip(member) is member
        encoded = Encoder("o").encode(Color.BLUE)
    finally:
        del sys.modules[module.__name__]
    # In a process that has not imported the module, nothing is imported: the name stands for the member.
    read = decode(encoded, tensor=str, opaque=str)
    assert read == EnumName("a_test_module_of_enums:Color", "BLUE")


def test_an_enum_reference_resolves_to_enums_only() -> None:
    for kind in ("os:system", "builtins:eval", "os:path", "builtins:int", "nowhere:X", "", ":"):
        read = decode({"$": "enum", "type": kind, "name": "echo"}, tensor=str, opaque=str)
        assert read == EnumName(kind, "echo")


def test_lightnings_attribute_dict_comes_back() -> None:
    from lightning.fabric.utilities.data import AttributeDict

    back = round_trip(AttributeDict(lr=0.1, name="x"))
    assert type(back) is AttributeDict
    assert back.lr == 0.1


def test_tensors_leave_a_reference_and_keep_their_place() -> None:
    encoder = Encoder("objects")
    weight = torch.nn.Parameter(torch.ones(2))
    tree = encoder.encode({"a": [weight], "a.0": torch.zeros(1)})
    assert tree == {
        "a": [{"$": "tensor", "name": "objects.a.0"}],
        "a.0": {"$": "tensor", "name": "objects.a.0#2"},
    }
    assert encoder.tensors["objects.a.0"] is weight


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (object(), "x.0.y", "builtins.object"),
        (len, "x.0.y", "builtins.builtin_function_or_method"),
        (int, "x.0.y", "builtins.type"),
        (Mode.READ | Mode.WRITE, "x.0.y", "Mode"),
        (collections.namedtuple("Pair", "a b")(1, 2), "x.0.y", "Pair"),
        (collections.defaultdict(lambda: 0), "x.0.y", "collections.defaultdict"),
        (np.array([object()]), "x.0.y", "numpy.ndarray"),
        (np.ma.masked_array([1]), "x.0.y", "MaskedArray"),
        (np.zeros(2, dtype="f4,i4"), "x.0.y", "numpy.ndarray"),
    ],
)
def test_what_has_no_encoding_is_refused_with_its_place(value: Any, place: str, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"the object at '{place}' is a .*{kind}, which has no safe"):
        round_trip({"x": [{"y": value}]})
    assert round_trip({"x": [value]}, opaque="pickle")["x"][0] is value
    assert round_trip({"x": [value]}, opaque="skip") == {"x": [None]}


def test_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(CheckpointError, match="is nested deeper than 200 levels"):
        round_trip({"state": circle})


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "unknown"},
        {"$": "tuple"},
        {"$": "tuple", "items": 3},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "bytes", "data": "%%%"},
        {"$": "float", "value": "x"},
        {"$": "torch.dtype", "value": "nn"},
        {"$": "torch.device", "value": "nowhere"},
        {"$": "numpy.array", "dtype": "O", "data": "", "shape": [1]},
        {"$": "numpy.array", "dtype": "<f4", "data": "AAAA", "shape": [9]},
        {"$": "numpy.scalar", "dtype": "<f4", "data": ""},
        {"$": "defaultdict", "factory": "eval", "items": []},
        {"$": "enum", "type": 3, "name": "x"},
        {"$": ["list"]},
    ],
)
def test_a_malformed_tree_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="'some file' is malformed: "):
        decode(tree, tensor=str, opaque=str, source="some file")


class Evil:
    """Unpickling one would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import sys; sys.nnx_test_was_executed = True",))


def test_pickled_objects_are_not_executed_without_an_explicit_opt_in(tmp_path: Any) -> None:
    path = tmp_path / "a"
    nnx_checkpoint.save(path, tensors={}, objects={"x": {"evil": Evil()}, "y": 1}, opaque="pickle")
    checkpoint = nnx_checkpoint.open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"objects.bin' holds the object at 'x.evil' as a pickle"):
        checkpoint.objects  # noqa: B018 - decoding it is the point
    assert nnx_checkpoint.verify(path) == []
    assert not hasattr(sys, "nnx_test_was_executed")
    assert nnx_checkpoint.open_checkpoint(path, weights_only=False).objects == {"x": {"evil": None}, "y": 1}
    assert vars(sys).pop("nnx_test_was_executed")


def test_pickled_objects_that_torch_knows_to_be_safe_load(tmp_path: Any) -> None:
    value = collections.Counter("abca")
    nnx_checkpoint.save(
        tmp_path / "a",
        tensors={},
        objects={"x": value},
        rank_objects={"y": collections.Counter("z")},
        opaque="pickle",
    )
    checkpoint = nnx_checkpoint.open_checkpoint(tmp_path / "a")
    assert checkpoint.objects == {"x": value}
    assert checkpoint.rank_objects(0) == {"y": collections.Counter("z")}


def test_an_object_that_cannot_be_pickled_is_refused(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"an object among \['f'\] cannot be pickled"):
        nnx_checkpoint.save(tmp_path / "a", tensors={}, objects={"f": lambda: 0}, opaque="pickle")


def test_a_module_of_weights_is_not_taken_apart() -> None:
    with pytest.raises(CheckpointError, match=r"swa_utils.AveragedModel, which has no safe"):
        round_trip({"callbacks": {"swa": AveragedModel(torch.nn.Linear(1, 1))}})
