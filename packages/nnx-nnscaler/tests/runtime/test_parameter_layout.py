"""Layouts of parameters: parts of all ranks together are the whole, whichever way it is cut."""

import itertools

import pytest
import torch

from nnx_checkpoint.box import find_fault
from nnx_nnscaler.plan.program_plan import R, S
from nnx_nnscaler.runtime.part import ParameterLayout, rows_of

CASES = [
    ((8, 6), R),
    ((8, 6), S(0)),
    ((8, 6), S(1)),
    ((12, 5), S(0, groups=3)),
    ((5, 12), S(1, groups=3)),
    ((3, 4, 2), S(1)),
    ((7,), R),
    ((1, 4), R),
    ((0, 4), R),
]


def layouts(shape, placement, unit_size, parts):
    for unit_rank, part in itertools.product(range(unit_size), range(parts)):
        layout = ParameterLayout(shape=shape, placement=placement, unit_rank=unit_rank, unit_size=unit_size)
        rows = rows_of(layout.unit_shape[0], rank=part, size=parts) if parts > 1 else None
        yield ParameterLayout(
            shape=shape, placement=placement, unit_rank=unit_rank, unit_size=unit_size, rows=rows
        )


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "placement"), CASES)
def test_the_parts_of_all_ranks_are_the_whole(shape, placement, parts):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    rebuilt = torch.full(shape, -1.0, dtype=torch.float64)
    boxes = set()
    for layout in layouts(shape, placement, 2, parts):
        local = layout.local_part(whole).contiguous()
        assert tuple(local.shape) == layout.local_shape
        shard = layout.shard_of_local(local)
        for box, view in zip(shard.boxes, shard.data, strict=True):
            boxes.add(box)
            rebuilt[box.slices] = view
    assert torch.equal(rebuilt, whole)
    assert find_fault(shape, boxes) == ""


def test_shards_are_views_that_fill_the_local_tensor():
    layout = ParameterLayout(shape=(12, 2), placement=S(0, groups=3), unit_rank=1, unit_size=2, rows=(1, 5))
    local = torch.zeros(4, 2)
    whole = torch.arange(24.0).view(12, 2)
    layout.shard_of_local(local).fill_from(whole)
    assert torch.equal(local, layout.local_part(whole))


def test_a_rank_without_rows_has_no_box():
    layout = ParameterLayout(shape=(1, 4), rows=(1, 1))
    shard = layout.shard_of_local(torch.empty(0, 4))
    assert shard.boxes == () and shard.nbytes == 0


def test_a_parameter_of_one_number_stays_whole():
    shard = ParameterLayout(shape=()).shard_of_local(torch.tensor(3.0))
    assert shard.is_whole and shard.data[0].item() == 3.0
