"""Users' own functions become splittable operators; their annotations are verified by trial."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nnx_nnscaler
from jobs.nnscaler_one_op import f, ints, one_op
from jobs.nnscaler_rule_oracle import check_strategy
from nnx_nnscaler.rules.annotation_grammar import AnnotationError
from nnx_nnscaler.rules.registry import strategies_of

register_op = nnx_nnscaler.register_op


@register_op("(n) c h^ w^, c, c -> n c h^ w^")
def scaled(x, scale, shift, eps=1e-5):
    deviation = x.std((2, 3), keepdim=True) + eps
    return x / deviation * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


@register_op("b k+, n k+ -> b n")
def product(x, weight):
    return x @ weight.T


@register_op("b (heads d^) -> b heads d, b heads")
def by_heads(x, heads: int):
    split = x.unflatten(1, (heads, -1))
    return split.clone(), split.square().sum(-1)


@register_op("*, ?, 1 -> *")
def stepped(x, steps: int, rate: Tensor | None = None):
    return x * steps if rate is None else x * steps * rate


def target_of(function) -> str:
    return str(function.operator)


def names_and_placements(graph, op, size: int = 2) -> dict[str, str]:
    return {
        s.name: ", ".join(map(str, s.inputs)) + " -> " + ", ".join(map(str, s.outputs))
        for s in strategies_of(op, graph, size)[1:]
    }


def checked(graph, op) -> dict[str, str]:
    """Strategies at 2 ranks, all of them tried by the generic checker at 2 and 4."""
    for size in (2, 4):
        for strategy in strategies_of(op, graph, size):
            assert not check_strategy(op, graph, strategy, size)
    return names_and_placements(graph, op)


def test_a_function_stays_what_it_was() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    result = product(x, weight)
    result.sum().backward()
    assert torch.equal(result, x @ weight.T)
    assert torch.equal(x.grad, weight.sum(0).expand(3, 4))
    assert product.__name__ == "product"


def test_a_function_is_one_operator_of_a_traced_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.shift = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return scaled(x, self.scale, self.shift, eps=1e-3).relu()

    exported = torch.export.export(Model(), (torch.randn(4, 8, 6, 6),), strict=False)
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called == [target_of(scaled), "aten.relu.default"]


def test_the_names_of_dims_are_strategies() -> None:
    assert checked(*one_op(target_of(scaled), f(4, 8, 6, 6), f(8), f(8))) == {
        "n": "S(0), R, R -> S(0)",
        "c": "S(1), S(0), S(0) -> S(1)",
    }
    assert checked(*one_op(target_of(product), f(4, 8), f(12, 8))) == {
        "b": "S(0), R -> S(0)",
        "k": "S(1), S(1) -> P",
        "n": "R, S(0) -> S(1)",
    }


def test_sizes_that_do_not_divide_are_left_out() -> None:
    graph, op = one_op(target_of(product), f(4, 7), f(5, 7))
    assert list(names_and_placements(graph, op)) == ["b"]


def test_an_argument_that_is_the_size_of_a_split_dim_is_given_as_its_part() -> None:
    graph, op = one_op(target_of(by_heads), f(4, 24), 8)
    assert checked(graph, op) == {"b": "S(0) -> S(0), S(0)", "heads": "S(1) -> S(1), S(1)"}


def test_leading_dims_and_optional_tensors() -> None:
    graph, op = one_op(target_of(stepped), f(4, 8, 2), 3)
    assert checked(graph, op) == {"*0": "S(0) -> S(0)", "*1": "S(1) -> S(1)", "*2": "S(2) -> S(2)"}
    graph, op = one_op(target_of(stepped), f(4, 8), 3, f())
    assert checked(graph, op) == {"*0": "S(0), R -> S(0)", "*1": "S(1), R -> S(1)"}


def test_a_wrong_annotation_is_refused_with_the_numbers() -> None:
    @register_op("b n -> b n")
    def normalised(x):
        return x.softmax(-1)

    graph, op = one_op(target_of(normalised), f(4, 8))
    with pytest.raises(AnnotationError, match=r"is wrong: with 'n' split, .* is off by 0?\.?\d") as caught:
        strategies_of(op, graph, 2)
    assert "'b n -> b n'" in str(caught.value)
    assert "'^'" in caught.value.remedy


def test_a_mean_annotated_as_a_sum_is_refused() -> None:
    @register_op("b n+ -> b")
    def mean(x):
        return x.mean(-1)

    graph, op = one_op(target_of(mean), f(4, 8))
    with pytest.raises(AnnotationError, match="with 'n' split, result 0 of 2 ranks is off by"):
        strategies_of(op, graph, 2)


def test_a_wrong_gradient_is_refused() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.rows = len(x)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.rows

    @register_op("b n -> b n")
    def odd(x):
        return Twice.apply(x)

    graph, op = one_op(target_of(odd), f(4, 8))
    with pytest.raises(
        AnnotationError, match="with 'b' split, the gradient of operand 0 of 2 ranks is off by"
    ):
        strategies_of(op, graph, 2)


def test_functions_of_the_same_name_are_operators_of_their_own() -> None:
    def make(factor: float):
        @register_op("b -> b")
        def times(x):
            return x * factor

        return times

    two, three = make(2.0), make(3.0)
    assert two(torch.ones(1)).item() == 2.0
    assert three(torch.ones(1)).item() == 3.0


def test_operands_of_other_dims_are_named() -> None:
    graph, op = one_op(target_of(product), f(2, 4, 8), f(12, 8))
    with pytest.raises(AnnotationError, match=r"does not fit .*: argument 'x' has shape \[2, 4, 8\]"):
        strategies_of(op, graph, 2)


def test_results_of_another_number_are_named() -> None:
    @register_op("b -> b")
    def fine(x):
        return x * 2

    graph, op = one_op(target_of(fine), f(4))
    op.output = (op.output, op.output)
    with pytest.raises(AnnotationError, match="it returns 2 results"):
        strategies_of(op, graph, 2)


def test_more_operands_than_arguments_are_refused() -> None:
    with pytest.raises(AnnotationError, match=r"lists 2 operands, but .*one takes 1: x"):

        @register_op("b, b -> b")
        def one(x):
            return x


def test_an_argument_without_a_type_is_refused() -> None:
    with pytest.raises(AnnotationError, match=r"argument 'steps' of .*untyped has no known type") as caught:

        @register_op("b, ? -> b")
        def untyped(x, steps):
            return x * steps

    assert "'steps: int'" in caught.value.remedy


def test_a_tensor_that_is_not_listed_is_refused() -> None:
    with pytest.raises(AnnotationError, match="has no dims for argument 'y'"):

        @register_op("b -> b")
        def forgotten(x, y: Tensor):
            return x * y


def test_an_argument_of_a_type_that_operators_cannot_take_is_refused() -> None:
    with pytest.raises(AnnotationError, match="cannot become an operator") as caught:

        @register_op("b, ? -> b")
        def odd(x, options: dict):
            return x

    assert "plain type" in caught.value.remedy


@torch.library.custom_op("nnx_test_probing::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, power: int) -> Tensor:
    return x * gate**power


gated.register_fake(lambda x, gate, power: torch.empty_like(x))
gated.register_autograd(
    lambda ctx, g: (
        g * ctx.saved_tensors[1] ** 2,
        (g * ctx.saved_tensors[0] * 2 * ctx.saved_tensors[1]).sum(0),
        None,
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


@pytest.mark.parametrize("given", ["nnx_test_probing::gated", "nnx_test_probing.gated.default", gated])
def test_an_operator_that_exists_is_annotated(given) -> None:
    assert register_op("b n, n, ? -> b n")(given) is given
    graph, op = one_op("nnx_test_probing.gated.default", f(4, 8), f(8), 2)
    assert checked(graph, op) == {"b": "S(0), R -> S(0)", "n": "S(1), S(0) -> S(1)"}


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(AnnotationError, match="'nnx_test_probing::missing' is neither a function nor"):
        register_op("b -> b")("nnx_test_probing::missing")


def test_tensors_of_an_operator_are_where_its_schema_has_them() -> None:
    with pytest.raises(AnnotationError, match="argument 'power' is of type int, no tensor"):
        register_op("b n, n, n -> b n")("nnx_test_probing::gated")
    with pytest.raises(AnnotationError, match="argument 'gate' is a tensor"):
        register_op("b n, ?, ? -> b n")("nnx_test_probing::gated")
    with pytest.raises(AnnotationError, match=r"lists 4 operands, but .* takes 3"):
        register_op("b n, n, ?, ? -> b n")("nnx_test_probing::gated")


def test_a_function_that_reads_values_is_traced_with_its_fake() -> None:
    class ThroughNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    @register_op("b n -> b n", fake=torch.empty_like)
    def doubled(x):
        return ThroughNumpy.apply(x)

    class Model(nn.Module):
        def forward(self, x):
            return doubled(x) + 1

    exported = torch.export.export(Model(), (torch.randn(4, 8),), strict=False)
    assert next(str(n.target) for n in exported.graph.nodes if n.op == "call_function") == target_of(doubled)
    x = torch.ones(4, 8, requires_grad=True)
    doubled(x).sum().backward()
    assert x.grad.unique().item() == 2.0


def test_an_operator_that_does_not_run_here_is_taken_on_trust(caplog) -> None:
    @register_op("b n -> b n")
    def elsewhere(x):
        if x.is_meta:
            return torch.empty_like(x)
        raise RuntimeError("only on that device")

    graph, op = one_op(target_of(elsewhere), f(4, 8))
    assert list(names_and_placements(graph, op)) == ["b", "n"]
    assert "only on that device" in caplog.text
    assert "not checked" in caplog.text


def test_indices_that_are_made_up_are_small() -> None:
    @register_op("b, n^ d -> b d")
    def looked_up(index, table):
        return table[index]

    assert checked(*one_op(target_of(looked_up), ints(8), f(4, 8))) == {
        "b": "S(0), R -> S(0)",
        "d": "R, S(1) -> S(1)",
    }
