"""Graphs as JSON: they round-trip, and other JSON is refused."""

import json

import pytest
import torch

from jobs.nnscaler_interpreter import check_graph
from jobs.nnscaler_trace_models import Branching, Frozen, Gpt, Nested, Writes
from nnx_nnscaler.ir.graph import Code, Graph, Input, Make, Op, Ref, Size, TensorMeta
from nnx_nnscaler.ir.graph_json import GraphFormatError, graph_from_json, graph_to_json
from nnx_nnscaler.trace import trace_forward


def graph():
    meta = TensorMeta((Size("B", 4), 3), "float32", True)
    values = [
        Ref("x"),
        (1, [2.5, float("-inf")]),
        {"a": Code("torch.float32"), 3: 1j},
        Make("m:C", {"f": None}),
    ]
    op = Op(
        "y", "aten.add.Tensor", tuple(values), {"k": Size("2*B", 8)}, (meta, None), "a.b", "f.py:1: x", ""
    )
    inputs = [
        Input("x", meta),
        Input("n", None, None),
        Input("s", None, slice(1, None)),
        Input("d", None, torch.bfloat16),
        Input("e", None, torch.device("cpu")),
        Input("z", None, ...),
    ]
    return Graph(
        inputs,
        {"w": "a.w"},
        {},
        {},
        {"x": meta},
        [op],
        (Ref("y"), "s"),
        {"B": ("x", 0)},
        False,
        "spec",
        ("B < 9",),
    )


def test_every_kind_of_argument_comes_back():
    text = graph_to_json(graph())
    again = graph_from_json(text)
    assert again == graph()
    assert graph_to_json(again) == text
    assert isinstance(again.ops[0].args, tuple)
    assert again.ops[0].output[0].shape == (Size("B", 4), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_constants_come_back_bit_by_bit(dtype, shape):
    made = graph()
    made.constants["c"] = torch.randn(shape).to(dtype)
    again = graph_from_json(graph_to_json(made)).constants["c"]
    assert (again.dtype, tuple(again.shape)) == (dtype, shape)
    assert torch.equal(again, made.constants["c"])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("make", "args"),
    [
        (Gpt, (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))),
        (Branching, (torch.randn(2, 8),)),
        (Frozen, (torch.randn(2, 4),)),
        (Nested, ({"x": torch.randn(2, 4), "name": "n"}, (torch.randn(4), (torch.randn(2), None)))),
        (Writes, (torch.randn(4, 6),)),
    ],
)
def test_traced_graphs_come_back(make, args):
    module = make()
    made = trace_forward(module, args)
    again = graph_from_json(graph_to_json(made))
    constants, made.constants = made.constants, {}
    assert [tensor.tolist() for tensor in again.constants.values()] == [
        t.tolist() for t in constants.values()
    ]
    with_constants, again.constants = again.constants, {}
    assert again == made
    again.constants = with_constants
    check_graph(again, module, args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read.*reuse='override'"),
        ("[]", "cannot be read"),
        ('{"version": 99}', "has version 99, expected 1"),
        ('{"version": 1}', "is damaged: KeyError"),
    ],
)
def test_what_is_no_graph_is_refused(text, message):
    with pytest.raises(GraphFormatError, match=message):
        graph_from_json(text)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (
            lambda found: found["ops"][0][2]["tuple"].__setitem__(0, {"code": "__import__('os').getcwd()"}),
            "code",
        ),
        (lambda found: found["ops"][0].__setitem__(7, "open('x')"), "context"),
        (lambda found: found["ops"][0].__setitem__(0, "a; b"), "name"),
        (lambda found: found["ops"][0].__setitem__(1, "os.system"), "target"),
        (lambda found: found["guards"].append("[].append"), "guard"),
        (lambda found: found["ops"][0][3].__setitem__("dict", [["k", {"size": ["B;1", 1]}]]), "size"),
        (lambda found: found["ops"][0][3].__setitem__("dict", [["k", {"odd": 1}]]), "tag"),
    ],
)
def test_code_that_no_trace_writes_is_refused(place, value):
    found = json.loads(graph_to_json(graph()))
    place(found)
    with pytest.raises(GraphFormatError, match="is damaged"):
        graph_from_json(json.dumps(found))


def test_an_argument_that_is_no_data_cannot_be_stored():
    made = graph()
    made.outputs = object()
    with pytest.raises(GraphFormatError, match="a object among its arguments cannot be stored"):
        graph_to_json(made)
