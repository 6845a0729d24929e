"""The meaning of annotations, and the errors for unreadable ones."""

from __future__ import annotations

import pytest

from nnx_nnscaler.ir.placement import P, R, S
from nnx_nnscaler.rules.annotation_grammar import Annotation, AnnotationError


def strategies(text: str, **sizes: int) -> dict[str, tuple[list[str], list[str]] | None]:
    annotation = Annotation.parse(text)
    found = {}
    for name in annotation.names():
        placements = annotation.placements(name, sizes)
        found[name] = placements and ([str(p) for p in placements[0]], [str(p) for p in placements[1]])
    return found


def test_a_matrix_product_is_split_by_rows_by_columns_and_along_what_it_sums() -> None:
    assert strategies("m k+, n k+ -> m n") == {
        "m": (["S(0)", "R"], ["S(0)"]),
        "k": (["S(1)", "S(1)"], ["P"]),
        "n": (["R", "S(0)"], ["S(1)"]),
    }


def test_fixed_dims_are_never_split() -> None:
    assert list(strategies("(n) c h^ w^, c, c -> n c h^ w^")) == ["n", "c"]
    assert list(strategies("n^ k -> n k")) == ["k"]


def test_a_mark_holds_wherever_the_name_stands() -> None:
    assert strategies("b k, k^ -> b k") == {"b": (["S(0)", "R"], ["S(0)"])}


def test_the_second_part_of_a_composed_dim_is_split_in_groups() -> None:
    assert strategies("b (q h) -> b q h", q=3) == {
        "b": (["S(0)"], ["S(0)"]),
        "q": (["S(1)"], ["S(1)"]),
        "h": (["S(1,3)"], ["S(2)"]),
    }


def test_a_group_of_unknown_size_cannot_be_split_behind() -> None:
    assert strategies("b (q h) -> b q h")["h"] is None


def test_any_number_of_leading_dims_is_split_one_by_one() -> None:
    annotation = Annotation.parse("* k^, k -> *")
    assert annotation.leading(0, 3) == 2
    expanded = annotation.expanded(2)
    assert expanded.names() == ["*0", "*1"]
    assert expanded.placements("*1", {}) == ([S(1), R], [S(1)])


def test_three_dots_are_another_way_to_write_leading_dims() -> None:
    assert Annotation.parse("... k^ -> ...").operands == Annotation.parse("* k^ -> *").operands


def test_leading_dims_can_be_fixed() -> None:
    assert Annotation.parse("*^ k -> * k").expanded(2).names() == ["k"]


def test_arguments_that_are_no_tensors_have_no_placement_of_their_own() -> None:
    assert Annotation.parse("b n, ? -> b n").operands[1] is None


def test_one_alone_is_a_tensor_without_dims() -> None:
    annotation = Annotation.parse("b+ -> 1")
    assert annotation.results == ((),)
    assert annotation.placements("b", {}) == ([S(0)], [P])


def test_a_dim_that_stands_twice_in_a_tensor_is_not_split() -> None:
    assert strategies("n n -> n n") == {"n": None}


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("b n", 4, "expected '->'"),
        ("b n -> b n -> b", 12, "unexpected '->'"),
        ("b n -> b ; n", 10, "';' has no meaning"),
        ("b (n -> b", 6, "expected the name of a dim, found '->'"),
        ("b () -> b", 4, "expected a name and ')'"),
        ("b (2 n) -> b n", 4, "parentheses hold names only"),
        ("b n -> ?", 8, "a result cannot be '?'"),
        ("* n * -> n", 7, "'*' appears twice in one tensor"),
        ("b k -> b", 3, "'k' is not in every result; mark it '+'"),
        ("b k -> b k, b", 3, "'k' is not in every result"),
        ("b k+ -> b k", 3, "'k' has the mark '+' of a summed dim, but is in a result"),
        ("b -> b n", 8, "'n' is in a result but in no operand"),
        ("b k+, k^ -> b", 8, "'k' has the mark '+' before"),
        ("b, + -> b", 4, "expected the name of a dim, found '+'"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, place: int, problem: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        Annotation.parse(text)
    assert str(caught.value).startswith(f"annotation {text!r}, character {place}: {problem}"), str(
        caught.value
    )
    assert "register_op" in caught.value.remedy
