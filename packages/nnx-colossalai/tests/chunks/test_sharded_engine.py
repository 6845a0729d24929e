"""`ShardedEngine` on real ranks: the same numbers in every tier, and masters in every view of a user."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs import colossalai_sharded_jobs as jobs
from jobs.simulated_device import SimDevice
from nnx_colossalai._torch_compat import Gathered
from nnx_colossalai.chunks.sharded import ShardedChunk
from nnx_colossalai.plan.spec import Tier
from nnx_conformance.pool import WorkerPool

ALL = {tier: (tier,) * 4 for tier in jobs.TIERS}
MIXED = ("offloaded", "gathered", "streamed", "sharded")
MIXES = {**ALL, "mixed": MIXED, "mixed otherwise": ("sharded", "streamed", "offloaded", "offloaded")}
DTYPES = [torch.bfloat16, torch.float16, None]


def of_every_mix(
    pool: WorkerPool, job: Any, *args: Any, mixes: Any = MIXES, world_size: int = 2
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each mix of tiers, and the job's results for it on every rank."""
    ranks = pool.run(
        jobs.each, job, list(mixes.values()), *args, world_size=world_size, init="gloo", timeout=100.0
    )
    for number, mix in enumerate(mixes):
        yield mix, [of_rank[number] for of_rank in ranks]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], where: str) -> None:
    assert sorted(one) == sorted(other), where
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, where


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("dtype", "world_size"),
    [*((dtype, 2) for dtype in DTYPES), pytest.param(torch.bfloat16, 4, marks=pytest.mark.full)],
    ids=str,
)
def test_every_mix_trains_to_the_same_bits(
    pool: WorkerPool, dtype: torch.dtype | None, world_size: int
) -> None:
    found = dict(of_every_mix(pool, jobs.trained, dtype, 7, world_size=world_size))
    for mix, ranks in found.items():
        for left, reference in zip(ranks, found["sharded"], strict=True):
            assert left["losses"] == reference["losses"], mix
            assert_same(left["masters"], reference["masters"], mix)
            assert_same(left["plain"], reference["masters"], mix)


@pytest.mark.quick(every=18)
@pytest.mark.parametrize("how", jobs.HOWS)
def test_gradients_are_those_of_fsdp2_however_they_come_about(pool: WorkerPool, how: str) -> None:
    found = dict(of_every_mix(pool, jobs.gradients_of, how, torch.bfloat16))
    for mix, ranks in found.items():
        for left, reference in zip(ranks, found["sharded"], strict=True):
            assert_same(left, reference, mix)
            assert all(one.dtype is torch.float32 for one in left.values()), mix
            assert ("frozen.weight" in left) == (how == "thawed"), mix
            assert ("layers.1.up.weight" in left) == (how != "thawed"), mix
            assert "layers.0.spare.weight" not in left, mix
            gradient = left["layers.0.up.weight"]
            assert not torch.equal(gradient.bfloat16().float(), gradient), f"{mix}: rounded"


@pytest.mark.full
def test_the_module_shows_its_masters_whenever_a_user_may_look(pool: WorkerPool) -> None:
    for mix, ranks in of_every_mix(pool, jobs.shown):
        for looks in ranks:
            assert {when: all(same) for when, same in looks.items()} == dict.fromkeys(looks, True), mix


@pytest.mark.full
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_an_error_is_a_step_like_any_other(pool: WorkerPool, where: str) -> None:
    for mix, ranks in of_every_mix(pool, jobs.after_an_error, where):
        for after, without in ranks:
            assert_same(after, without, mix)


@pytest.mark.full
@pytest.mark.parametrize("how", ["in place", "state dict"])
def test_masters_that_are_changed_from_outside_are_what_the_next_forward_uses(
    pool: WorkerPool, how: str
) -> None:
    for mix, ranks in of_every_mix(pool, jobs.changed_from_outside, how):
        for changed, wanted in ranks:
            assert changed == wanted, mix


@pytest.mark.full
@pytest.mark.parametrize("use", ["forward", "read", "finish", "forget"])
def test_whoever_uses_a_chunk_first_waits_for_it_once(pool: WorkerPool, use: str) -> None:
    everyone = ["", "layers.0", "layers.1", "layers.2"]
    for mix, ranks in of_every_mix(pool, jobs.waited, use):
        for seen in ranks:
            assert seen["before"] == seen["metadata"] == [], mix
            if use == "read":
                assert seen["first"] == ["layers.1"], mix
            elif use == "forward":
                assert seen["first"] == everyone, f"{mix}: not in the order of the forward"
            wanted = [] if use == "forget" else everyone
            assert sorted(seen["in all"]) == wanted, mix


@pytest.mark.full
def test_weights_that_another_thread_makes_late_are_waited_for(pool: WorkerPool) -> None:
    for mix, ranks in of_every_mix(pool, jobs.stepped_in_background, 5):
        for late, at_once in ranks:
            assert [one.item() for one in late] == [one.item() for one in at_once], mix


MOVES = {
    "nowhere": (ALL["sharded"], ALL["sharded"]),
    "down": (ALL["gathered"], ALL["streamed"]),
    "up": (ALL["streamed"], ALL["gathered"]),
    "a little": (MIXED, ("offloaded", "sharded", "offloaded", "gathered")),
    "across": (MIXED, tuple(reversed(MIXED))),
}


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_chunks_move_with_masters_and_gradients(pool: WorkerPool, dtype: torch.dtype | None) -> None:
    found = {
        move: dict(of_every_mix(pool, jobs.moved, after, dtype, mixes={move: before}))[move]
        for move, (before, after) in MOVES.items()
    }
    for move, ranks in found.items():
        for left, reference in zip(ranks, found["nowhere"], strict=True):
            assert left["losses"] == reference["losses"], move
            assert_same(left["gradients"], reference["gradients"], move)
            assert_same(left["masters"], reference["masters"], move)
            assert tuple(left["tiers"].values()) == MOVES[move][1]
            assert left["names"] == reference["names"], move
            assert all(left["owned"]), move


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_the_device_holds_what_the_tier_says(pool: WorkerPool, dtype: torch.dtype | None) -> None:
    for tier, ranks in of_every_mix(pool, jobs.memory, dtype, mixes=ALL):
        for used, left, masters in ranks:
            copies = masters // 4 * (2 if dtype else 4)
            least = {"gathered": masters, "sharded": masters, "offloaded": copies, "streamed": 0}[tier]
            assert least <= used <= least * 1.3, f"{tier}, with padding"
            assert left == 0, tier


@pytest.mark.full
@pytest.mark.parametrize("capacity", [2**14, 2**24])
def test_a_step_copies_weights_in_the_working_dtype_and_gradients_in_full(
    pool: WorkerPool, capacity: int
) -> None:
    """Two micro batches: on a device with little room the gradients of each are reduced."""
    for tier, ranks in of_every_mix(pool, jobs.traffic, capacity, mixes=ALL):
        for (to_device, to_host), padded, trained in ranks:
            forwards_and_backwards = 4 if tier == "streamed" else 0
            assert to_device == forwards_and_backwards * 2 * padded, tier
            reductions = (2 if capacity == 2**14 else 1) if tier in ("offloaded", "streamed") else 0
            assert to_host == reductions * 4 * trained, tier


@pytest.mark.full
def test_chunks_are_numbered_in_the_order_of_the_last_forward(pool: WorkerPool) -> None:
    for mix, ranks in of_every_mix(pool, jobs.order_of_use):
        for laid_out, used, skipped in ranks:
            assert laid_out == ["layers.0", "layers.1", "layers.2", ""], mix
            assert used == ["", "layers.0", "layers.1", "layers.2"], mix
            assert skipped == ["", "layers.2", "layers.0", "layers.1"], mix


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("laid out", "placing chunks"),
        ("step", "allocating the weights of a step"),
        ("moved", "moving chunks"),
    ],
)
def test_when_one_rank_has_no_room_every_rank_is_told(pool: WorkerPool, when: str, what: str) -> None:
    mixes = {"mixed": MIXED} if when == "laid out" else {"streamed": ALL["streamed"]}
    for _, ranks in of_every_mix(pool, jobs.out_of_memory, when, mixes=mixes):
        assert ranks[0]["message"].startswith(what)
        assert "failed on rank 1" in ranks[0]["message"]
        for told in ranks:
            assert "No room on the simulated device for" in told["message"]
            assert "1 bytes are allowed" in told["message"]
        assert [told["loss"] for told in ranks] == [told["wanted"] for told in ranks]


@pytest.mark.parametrize("tier", Tier, ids=lambda tier: tier.value)
def test_streamed_weights_are_not_overwritten_while_a_card_still_reads_them(tier: Tier) -> None:
    done: list[str] = []
    event = SimpleNamespace(synchronize=lambda: done.append("read"))
    inner = SimpleNamespace(fsdp_params=[], _all_gather_result=None, post_backward=None)
    inner.unshard = lambda _: setattr(inner, "_all_gather_result", SimpleNamespace(all_gather_event=event))
    group = Gathered(None, inner)  # type: ignore[arg-type] # not the module's business
    chunk = ShardedChunk(
        "", tier, [group], device=SimDevice(), working_dtype=None, used=lambda _: None, ending=lambda: None
    )
    inner.is_unsharded, inner._training_state = False, SimpleNamespace(name="FORWARD")
    inner.unshard()
    chunk._segments = [SimpleNamespace(copy=lambda _: done.append("written"))]  # type: ignore[list-item]
    chunk.refresh()
    chunk.refresh()
    assert done == [*(["read"] if tier is Tier.STREAMED else []), "written", "written"]
