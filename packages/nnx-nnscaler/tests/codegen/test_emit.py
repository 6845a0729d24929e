"""Generated code is readable, equal on all ranks, and free of name clashes."""

import ast
import re

import pytest
import torch
from torch import nn

from jobs.nnscaler_codegen_models import GPT, tokens
from nnx_nnscaler.codegen.emit import emit, load_program
from nnx_nnscaler.codegen.writer import Names, part_of
from nnx_nnscaler.ir.program_plan import plan_from_text, plan_to_text
from nnx_nnscaler.parity import check_parity
from nnx_nnscaler.plan.planning import plan_program, replicated_plan
from nnx_nnscaler.plan.recompute import recomputed_owner
from nnx_nnscaler.trace import trace_forward

LAYERS = 6


@pytest.fixture(scope="module")
def graph():
    return trace_forward(GPT(layers=LAYERS), (tokens(), tokens(seed=1)), {})


@pytest.fixture(scope="module")
def source(graph):
    return emit(graph, plan_program(graph, size=2, policy="tp"), title="GPT (models.py:1)")


def functions(source):
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.full
def test_the_head_says_what_the_program_is(source):
    head = ast.get_docstring(ast.parse(source))
    assert "the forward of GPT (models.py:1), in training mode" in head
    assert "Policy 'tp', for a plan unit of 2 ranks" in head


def test_lines_name_submodules_source_lines_shapes_and_placements(source):
    assert "# tokens" in source
    assert "nnscaler_codegen_models.py:" in source
    assert "# [B, 8, 64] S(2)" in source
    assert 'w["tokens.weight"]' in source
    assert re.search(r"rt\.(reduce_scatter__all_gather|all_reduce__keep)\(", source)


def test_equal_layers_are_one_function_in_a_loop(source):
    found = functions(source)
    assert list(found) == ["blocks", "forward"]
    assert f"for i in range({LAYERS}):" in source
    assert ast.get_docstring(found["blocks"]) == f"Layers blocks.0 to blocks.{LAYERS - 1}, which are alike."
    assert len(source.splitlines()) < 110
    assert 'w[f"{layer}.mlp.0.weight"]' in source


@pytest.mark.full
def test_more_layers_make_no_longer_program(graph, source):
    more = trace_forward(GPT(layers=LAYERS + 4), (tokens(), tokens(seed=1)), {})
    longer = emit(more, plan_program(more, size=2, policy="tp"), title="GPT (models.py:1)")
    assert len(longer.splitlines()) == len(source.splitlines())


def layer(width=8):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


class Skips(nn.Module):
    """Layers whose results are also collected, so that no loop can carry just one of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)
        )

    def forward(self, x):
        collected = []
        for layer in self.layers:
            x = layer(x)
            collected.append(x)
        return torch.stack(collected).sum(0)


class Repeats(nn.Module):
    """The same layers called twice, and others of another width in between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)
        )
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 8)) for n in (16, 16, 4)
        )

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
            for layer in self.wide:
                x = layer(x)
        return x


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("module", [Skips, Repeats])
@pytest.mark.parametrize("policy", ["data", "tp"])
def test_folding_never_changes_what_is_computed(module, policy):
    found = check_parity(module(), (torch.randn(4, 8),), size=2, policy=policy)
    assert found.error < 1e-12
    assert ("def layers(" in found.source) == (module is Repeats)


class Awkward(nn.Module):
    """Names that emitted code uses itself, or that Python does."""

    def __init__(self):
        super().__init__()
        self.w, self.F, self.rt = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.torch = nn.Parameter(torch.ones(4))

    def forward(self, input, w=None, c=None):
        sum = self.w(input) + self.F(w) + self.rt(c) * self.torch
        max, index = sum.max(-1)
        return {"class": max, "def": index, "lambda": [sum.min(), (sum,)]}


def test_names_of_python_and_of_programs_are_not_hidden():
    x = torch.randn(4, 4)
    found = check_parity(Awkward(), (x, x), {"c": x}, size=2)
    assert found.error == 0
    arguments = [argument.arg for argument in functions(found.source)["forward"].args.args]
    assert len(set(arguments)) == len(arguments) == 7
    assert arguments[:4] == ["rt", "m", "w", "c"]


def test_names_are_never_handed_out_twice():
    names = Names()
    wishes = ["x", "x", "x_1", "x", "if", "if_", "print", "0", "a.b", "a_b", "", "i", "layer"]
    given = [names.new(wish) for wish in wishes]
    assert len(set(given)) == len(given)
    assert all(name.isidentifier() for name in given)


@pytest.mark.parametrize(
    ("text", "size", "part"),
    [("8", 2, "4"), ("B", 4, "B // 4"), ("8*B", 2, "8*B // 2"), ("B - 1", 2, "(B - 1) // 2"), ("B", 1, "B")],
)
def test_parts_of_sizes(text, size, part):
    assert part_of(text, size) == part


def test_a_traceback_shows_the_line_of_a_program_in_memory():
    program = load_program("def forward(rt, m, w, c):\n    return w['missing']  # here\n")
    with pytest.raises(KeyError) as caught:
        program(None, None, {}, {})
    assert "# here" in str(caught.traceback[-1].statement)


def test_a_plan_is_the_same_after_it_was_text(graph):
    plan = plan_program(graph, size=2, policy="autodist")
    assert plan_from_text(plan_to_text(plan)) == plan
    assert emit(graph, plan_from_text(plan_to_text(plan))) == emit(graph, plan)


@pytest.mark.parametrize(
    ("module", "patterns", "owner"),
    [
        ("blocks.3.mlp.0", ["blocks.*"], "blocks.3"),
        ("blocks.3.mlp.0", ["blocks.*.mlp"], "blocks.3.mlp"),
        ("blocks.3", ["blocks.*.mlp"], None),
        ("head", ["blocks.*"], None),
        ("encoder.layer.0.attention", ["encoder.layer.[01]"], "encoder.layer.0"),
        ("", ["*"], None),
    ],
)
def test_patterns_of_what_is_recomputed(module, patterns, owner):
    assert recomputed_owner(module, patterns) == owner


def test_an_evaluation_recomputes_nothing():
    graph = trace_forward(GPT(layers=1).eval(), (tokens(),), {})
    assert "recomputed" not in emit(graph, replicated_plan(graph, 2), recompute=["blocks.*"])


def text_elsewhere():
    """The same program and plan, made in this process."""
    graph = trace_forward(GPT(layers=LAYERS), (tokens(), tokens(seed=1)), {})
    plan = plan_program(graph, size=2, policy="tp")
    return hash("text"), emit(graph, plan, title="GPT (models.py:1)") + plan_to_text(plan)


@pytest.mark.full
def test_programs_do_not_depend_on_the_process(pool, graph, source):
    expected = source + plan_to_text(plan_program(graph, size=2, policy="tp"))
    seeds, texts = zip(*pool.run(text_elsewhere, world_size=2), strict=True)
    assert len({*seeds, hash("text")}) == 3
    assert texts == (expected, expected)
