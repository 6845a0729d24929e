"""Gradients of what every rank repeats are summed with the parameters', not where they arise."""

import torch
from torch import nn

from nnx_nnscaler.codegen.self_check import check_parity


class Embedded(nn.Module):
    """Adds positions, which every rank looks up, to a batch that is cut."""

    def __init__(self, read_again=False):
        super().__init__()
        self.positions = nn.Embedding(8, 16)
        self.scale = nn.Linear(16, 16)
        self.read_again = read_again

    def forward(self, x):
        added = self.positions(torch.arange(8)) * 2.0
        y = self.scale(x + added)
        return (y, added.sum()) if self.read_again else y


def test_a_position_embedding_takes_no_collective_of_its_own():
    found = check_parity(Embedded(), (torch.randn(8, 8, 16),), size=2, policy="data")
    assert found.error < 1e-12, found.worst
    assert "positions.weight" in found.plan.synchronized
    assert "keep__all_reduce" not in found.source


def test_a_use_with_a_complete_gradient_counts_once():
    found = check_parity(Embedded(read_again=True), (torch.randn(8, 8, 16),), size=2, policy="data")
    assert found.error < 1e-12, found.worst
    assert "keep__divide" in found.source


def test_it_is_right_at_more_ranks_and_under_every_policy():
    for policy in ("data", "zero", "tp", "autodist"):
        found = check_parity(Embedded(read_again=True), (torch.randn(8, 8, 16),), size=4, policy=policy)
        assert found.error < 1e-12, (policy, found.worst)
