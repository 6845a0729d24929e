"""The functions that programs call in place of plain operators, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nnx_core.communicator import GroupCommunicator
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.thread_ranks import run_as_ranks


def _on_ranks(size, job):
    return run_as_ranks(size, lambda communicator: job(Runtime(communicator)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("dim", "groups"), [(0, 1), (1, 1), (1, 3)])
def test_dropout_in_parts_is_dropout_of_the_whole_and_leaves_the_generator_as_one_process_would(
    size, dim, groups
):
    x = torch.randn(8, 24, dtype=torch.float64)
    torch.manual_seed(5)
    whole = F.dropout(x, 0.4)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    parts = _on_ranks(size, lambda rt: rt.dropout(rt.part(x, dim, groups), 0.4, dim, groups))
    assert torch.equal(torch.get_rng_state(), after)
    assert all(
        torch.equal(part, wanted)
        for part, wanted in zip(parts, _on_ranks(size, lambda rt: rt.part(whole, dim, groups)), strict=True)
    )


def test_in_one_process_dropout_and_attention_are_torchs_own():
    runtime = Runtime(GroupCommunicator(None))
    x = torch.randn(2, 4, 8, 8)
    torch.manual_seed(5)
    wanted = F.dropout(x, 0.4), F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True)
    torch.manual_seed(5)
    found = runtime.dropout(x, 0.4), runtime.attention(x, x, x, p=0.4, is_causal=True)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_a_query_that_sees_no_key_gives_zeros_and_no_nan_gradient():
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    x = torch.randn(4, 8, 8, dtype=torch.float64)

    def attend(rt):
        part = rt.part(x, 0).requires_grad_()
        result = rt.attention(part, part, part, mask, p=0.4, dim=0)
        result.sum().backward()
        return result, part.grad

    for result, gradient in _on_ranks(2, attend):
        assert not result[:, 3].any()
        assert not gradient.isnan().any()


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_an_embedding_sum_up_to_all_and_the_padding_row_gets_no_gradient(size):
    table = torch.randn(8, 4, dtype=torch.float64)
    ids = torch.tensor([[0, 3, 7], [5, 5, 2]])
    whole = table.clone().requires_grad_()
    wanted = F.embedding(ids, whole, 5)
    wanted.sum().backward()

    def look_up(rt):
        rows = rt.part(table, 0).requires_grad_()
        found = rt.embedding_rows(rows, ids, padding_idx=5)
        found.sum().backward()
        return found.detach(), rows.grad

    summands, gradients = zip(*_on_ranks(size, look_up), strict=True)
    assert torch.equal(sum(summands), wanted)
    assert torch.equal(torch.cat(gradients), whole.grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_by_classes_neither_overflows_nor_loses_precision(dtype, smoothing):
    scores = (torch.randn(8, 16) * 300).to(dtype)
    target = torch.randint(0, 16, (8,))
    wanted = F.cross_entropy(scores, target, label_smoothing=smoothing)
    for found in _on_ranks(
        2, lambda rt: rt.vocabulary_cross_entropy(rt.part(scores, 1), target, label_smoothing=smoothing)
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("name", "loss"), [("cross_entropy_mean", F.cross_entropy), ("nll_loss_mean", F.nll_loss)]
)
def test_a_mean_counts_the_targets_of_all_ranks_and_of_none_is_not_a_number(name, loss):
    scores = torch.randn(4, 6, dtype=torch.float64)

    def parts(target):
        return _on_ranks(2, lambda rt: getattr(rt, name)(rt.part(scores, 0), rt.part(target, 0)))

    target = torch.tensor([-100, -100, 2, 5])
    assert parts(target)[0] == 0
    torch.testing.assert_close(sum(parts(target)), loss(scores, target))
    assert all(part.isnan() for part in parts(torch.full((4,), -100)))


def test_an_addend_enters_a_sum_once_and_every_rank_has_a_gradient_for_it():
    bias = torch.randn(4)

    def add(rt):
        addend = bias.clone().requires_grad_()
        rt.once(addend).sum().backward()
        return rt.once(addend).detach(), addend.grad

    values, gradients = zip(*_on_ranks(4, add), strict=True)
    assert torch.equal(sum(values), bias)
    assert torch.equal(sum(gradients), torch.ones(4))


def test_numbers_drawn_together_are_the_same_on_all_threads():
    drawn = _on_ranks(4, lambda rt: rt.drawn(lambda: torch.rand(3)))
    assert all(torch.equal(one, drawn[0]) for one in drawn)
