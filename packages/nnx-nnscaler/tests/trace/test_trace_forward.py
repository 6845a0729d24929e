"""Graphs of small models compute the models' results, in both modes and for other batch sizes."""

import time

import pytest
import torch
from torch import nn

from jobs.nnscaler_interpreter import check_graph, run_graph
from jobs.nnscaler_trace_models import Answer, Cnn, Frozen, Gpt, Mlp, Nested, Recurrent, Writes
from nnx_nnscaler.ir.graph import Code, Make, Ref, Size
from nnx_nnscaler.trace import TraceError, trace_forward


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def targets(graph):
    return [op.target for op in graph.ops]


CASES = {
    "mlp": (Mlp, lambda n: (torch.randn(n, 8),)),
    "cnn": (Cnn, lambda n: (torch.randn(n, 3, 8, 8),)),
    "gpt": (Gpt, lambda n: (torch.randint(0, 32, (n, 8)), torch.randint(0, 32, (n, 8)))),
    "lstm": (Recurrent, lambda n: (torch.randn(n, 5, 4),)),
    "writes": (Writes, lambda n: (torch.randn(n, 6),)),
    "frozen": (Frozen, lambda n: (torch.randn(n, 4),)),
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_equals_its_model_for_any_batch_size(name, mode):
    make, sample = CASES[name]
    module = make().train(mode == "train")
    graph = trace_forward(module, sample(4))
    assert graph.kept == {}
    assert graph.guards == ()
    assert graph.symbols["B"][1] == 0
    for size in (4, 3, 2, 7):
        check_graph(graph, module, sample(size))


@pytest.mark.full
def test_tied_parameters_are_one_under_their_first_name():
    graph = trace_forward(Gpt(), (torch.zeros(2, 8, dtype=torch.long),))
    assert list(graph.parameters.values()).count("tokens.weight") == 1
    assert "head.weight" not in graph.parameters.values()
    embedding, head = graph.ops[0], next(op for op in graph.ops if op.module == "head")
    assert embedding.args[0] == head.args[1]


def test_sizes_are_expressions_and_no_operators():
    graph = trace_forward(Gpt(), (torch.zeros(3, 8, dtype=torch.long),))
    assert graph.outputs["rows"] == Size("2*B", 6)
    assert not any("sym" in target or "_assert" in target for target in targets(graph))
    view = next(op for op in graph.ops if op.target == "aten.view.default")
    assert view.args[1] == [Size("B", 3), 8, 2, 8]
    arange = next(op for op in graph.ops if op.target == "aten.arange.default")
    assert arange.kwargs == {"device": Code("rt.device")}


@pytest.mark.full
def test_operators_know_their_submodule_and_the_users_line():
    graph = trace_forward(Gpt(), (torch.zeros(2, 8, dtype=torch.long),))
    qkv = next(op for op in graph.ops if op.module == "blocks.1.qkv")
    assert qkv.source.startswith("nnscaler_trace_models.py:")
    assert "self.qkv(self.norm(x)).split(width, dim=2)" in qkv.source
    assert "<- linear.py:" in qkv.source
    add = next(op for op in graph.ops if op.target == "aten.add.Tensor")
    assert (add.module, "<-" in add.source) == ("", False)


def test_running_statistics_stay_operators_on_their_buffers():
    graph = trace_forward(Cnn(), (torch.randn(4, 3, 8, 8),))
    counter = next(op for op in graph.ops if op.target == "aten.add_.Tensor")
    assert graph.buffers[counter.args[0].name] == "norm.num_batches_tracked"
    assert set(graph.buffers.values()) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert "aten.add_.Tensor" not in targets(trace_forward(Cnn().eval(), (torch.randn(4, 3, 8, 8),)))


def test_statistics_are_updated_also_where_the_normalized_value_is_not_used():
    class Watching(Cnn):
        def forward(self, image):
            x = self.conv(image)
            self.norm(x)
            return x

    module, image = Watching(), torch.randn(4, 3, 8, 8)
    graph = trace_forward(module, (image,))
    assert "aten.batch_norm.default" in targets(graph)
    check_graph(graph, module, (image,))


def test_an_activation_in_place_becomes_a_value_of_its_own():
    graph = trace_forward(Cnn(), (torch.randn(4, 3, 8, 8),))
    assert "aten.relu.default" in targets(graph)
    assert "aten.relu_.default" not in targets(graph)


def test_dropout_is_gone_in_eval_and_its_draw_stays_in_training_even_when_unused():
    class Wasteful(nn.Module):
        def forward(self, x):
            nn.functional.dropout(x, 0.5, self.training)
            return x * torch.rand_like(x)

    x = torch.randn(4, 4)
    module = Wasteful()
    graph = trace_forward(module, (x,))
    assert targets(graph)[0] == "aten.dropout.default"
    check_graph(graph, module, (x,), exact=True)
    assert targets(trace_forward(Wasteful().eval(), (x,))) == ["aten.rand_like.default", "aten.mul.Tensor"]


def test_operators_that_nothing_needs_are_left_out():
    class Wasteful(Mlp):
        def forward(self, x):
            self.second(self.first(x) * 3)
            return self.first(x)

    graph = trace_forward(Wasteful(), (torch.randn(2, 8),))
    assert targets(graph) == ["aten.linear.default"]
    assert set(graph.parameters.values()) == {"first.weight", "first.bias"}


def test_nested_inputs_and_outputs_keep_their_structure():
    module = Nested()

    def sample(n):
        batch = {"name": "a", "x": torch.randn(n, 4)}
        return (batch, (torch.randn(4), (torch.randn(n), None))), {
            "mask": torch.rand(n, 4) > 0.5,
            "mode": "mean",
        }

    args, kwargs = sample(3)
    graph = trace_forward(module, args, kwargs)
    assert [leaf.name for leaf in graph.inputs] == [
        "batch_name", "batch_x", "pair_0", "pair_1_0", "pair_1_1", "mask", "mode",
    ]  # fmt: skip
    assert [leaf.constant for leaf in graph.inputs if leaf.meta is None] == ["a", None, "mean"]
    assert isinstance(graph.outputs, Make)
    assert graph.outputs.type == f"{Answer.__module__}:Answer"
    assert graph.outputs.fields["parts"]["size"] == Size("B", 3)
    result = check_graph(graph, module, args, kwargs)
    assert result.parts["x"][1] == "a"
    other = run_graph(graph, module, *sample(5))
    assert other.parts["size"] == 5


def test_inputs_that_share_memory_are_different_inputs():
    class Two(nn.Module):
        def forward(self, a, b):
            return a - 2 * b

    x = torch.randn(4, 3)
    graph = trace_forward(Two(), (x, x))
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    assert torch.equal(run_graph(graph, Two(), (a, b)), a - 2 * b)


def test_a_sample_of_one_row_gives_a_graph_for_any_batch():
    module = Mlp()
    graph = trace_forward(module, (torch.randn(1, 8),))
    assert graph.metas["x"].shape == (Size("B", 2), 8)
    check_graph(graph, module, (torch.randn(5, 8),))


def test_what_the_code_asks_of_the_batch_is_a_guard():
    class Asking(Mlp):
        def forward(self, x):
            return super().forward(x) if x.shape[0] < 10 else x

    assert trace_forward(Asking(), (torch.randn(4, 8),)).guards == ("B < 10", "B <= 9")


def test_a_batch_size_that_the_code_fixes_is_a_number():
    class Fixed(Mlp):
        def forward(self, x):
            return super().forward(x).view(4, 2, 2)

    module = Fixed()
    graph = trace_forward(module, (torch.randn(4, 8),))
    assert graph.symbols == {}
    assert graph.metas["x"].shape == (4, 8)
    check_graph(graph, module, (torch.randn(4, 8),))


def test_no_size_is_symbolic_when_that_is_asked():
    graph = trace_forward(Mlp(), (torch.randn(4, 8),), batch_dims=None)
    assert graph.metas["x"].shape == (4, 8)


def test_what_autograd_does_not_follow_is_marked():
    graph = trace_forward(Frozen(), (torch.randn(2, 4),))
    detached = [op.args[0] for op in graph.ops if op.target == "aten.detach.default"]
    weights = {graph.parameters[ref.name] for ref in detached if ref.name in graph.parameters}
    assert weights == {"teacher.weight", "teacher.bias"}
    assert not graph.meta("x").differentiable
    assert [graph.meta(ref.name).differentiable for ref in graph.outputs] == [True, True, False]


def test_regions_of_autocast_are_kept_as_contexts():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                y = self.layer(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.layer(x)
            return y, z, self.layer(x)

    module, x = Mixed(), torch.randn(3, 4)
    graph = trace_forward(module, (x,))
    assert [op.context for op in graph.ops] == [
        'torch.autocast("cpu", enabled=False)',
        'torch.autocast("cpu", dtype=torch.bfloat16, enabled=True)',
        "",
    ]
    check_graph(graph, module, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [t.dtype for t in module(x)] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_a_trace_under_autocast_has_no_casts_but_code_that_asks_is_told():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    return self.layer(x)
            return self.layer(x) * 2

    module, x = Asking(), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = trace_forward(module, (x,))
        assert torch.is_autocast_enabled("cpu")
    assert [(op.target, op.context) for op in graph.ops] == [
        ("aten.linear.default", 'torch.autocast("cpu", enabled=False)')
    ]
    assert len(trace_forward(module, (x,)).ops) == 2


def test_a_region_without_gradients_and_without_autocast_is_both():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @torch.no_grad()
        def angles(self, x):
            with torch.autocast("cpu", enabled=False):
                found = (x.float() @ self.layer.weight).cos()
            return found.to(x.dtype)

        def forward(self, x):
            return self.layer(x) * self.angles(x)

    module, x = Rotary(), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = trace_forward(module, (x,))
        torch.testing.assert_close(run_graph(graph, module, (x,)), module(x))
    (matmul,) = [op for op in graph.ops if op.target == "aten.matmul.default"]
    assert matmul.context == 'torch.autocast("cpu", enabled=False)'
    assert not graph.meta(matmul.name).differentiable


def test_tensors_that_are_no_buffers_are_constants_with_a_note():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.arange(4.0)

        def forward(self, x):
            return x * self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])

    module, x = Table(), torch.randn(2, 4)
    graph = trace_forward(module, (x,))
    assert [constant.tolist() for constant in graph.constants.values()] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert graph.notes == ("table is a tensor but no buffer: programs keep its present value",)
    check_graph(graph, module, (x,))


@pytest.mark.full
def test_a_module_on_the_meta_device_is_traced():
    with torch.device("meta"):
        module = Gpt()
    graph = trace_forward(module, (torch.zeros(2, 8, dtype=torch.long),))
    real = Gpt()
    assert targets(graph) == targets(trace_forward(real, (torch.zeros(2, 8, dtype=torch.long),)))
    check_graph(graph, real, (torch.randint(0, 32, (3, 8)),))


def test_names_are_identifiers_and_unlike_each_other():
    class Odd(nn.Module):
        def forward(self, input, rt, lambda_):
            return input + rt["a-b"] + rt["a b"] + lambda_

    parts = {"a-b": torch.randn(2), "a b": torch.randn(2)}
    graph = trace_forward(Odd(), (torch.randn(2), parts, torch.randn(2)))
    names = [leaf.name for leaf in graph.inputs]
    assert names == ["input_1", "rt_a_b", "rt_a_b_1", "lambda_"]
    assert len({*names, *(op.name for op in graph.ops)}) == 4 + len(graph.ops)


@pytest.mark.full
def test_sixteen_layers_are_traced_in_seconds():
    module, ids = Gpt(layers=16), torch.zeros(4, 8, dtype=torch.long)
    trace_forward(Mlp(), (torch.randn(2, 8),))
    start = time.process_time()
    graph = trace_forward(module, (ids, ids))
    assert time.process_time() - start < 6  # 2.6 s of CPU on a busy machine
    assert len(graph.ops) > 16 * 20


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (),
            {},
            r"the sample does not fit forward\(x\).*missing a required argument: 'x' \(given: nothing\)",
        ),
        ((), {"y": 1}, r"does not fit.*\(given: y=\).*Give dummy_forward_args the names"),
        (
            (object(),),
            {},
            r"argument 'x' of the forward is a object: expected a tensor.*Pass its tensors one by one",
        ),
        ((torch.randn(3, 5),), {}, r"the forward of Mlp cannot be traced|fails on the sample"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(args, kwargs, message):
    with pytest.raises(TraceError, match=message):
        trace_forward(Mlp(), args, kwargs)


def test_the_first_use_of_ref_is_the_input():
    graph = trace_forward(Mlp(), (torch.randn(2, 8),))
    assert graph.ops[0].args[0] == Ref("x")
