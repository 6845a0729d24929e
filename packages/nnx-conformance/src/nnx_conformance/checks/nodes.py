"""Ranks of several simulated nodes, one rank on each.

The simulation needs no second machine, so it runs everywhere. `tests/nodes` of the repository covers slow
links, private disks and machines that vanish.

"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.checkpoints.runs import TASK, expect_resumed, path_in, resume, save
from nnx_conformance.comparing import TOLERANCE, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task, share_of
from nnx_conformance.training import fit, make_trainer


@check()
def losses_across_nodes(bench: Bench) -> None:
    """Losses and updates of ranks on separate nodes are those of one process."""
    task = Task(clip=0.05 if bench.identity.capabilities.clip_by_norm else None)
    ranks = bench.run(fit, task, world_size=2, nodes=2)
    expect_same_run(ranks, bench.train_alone(task), tolerance=TOLERANCE[task.dtype], what="2 nodes")


@check()
def node_and_local_ranks(bench: Bench) -> None:
    """A rank knows its node rank and local rank, and the shares of all ranks cover the data."""
    ranks = bench.run(_where_it_is, world_size=2, nodes=2)
    for rank, seen in enumerate(ranks):
        known = {"global_rank": rank, "node_rank": rank, "local_rank": 0, "world_size": 2, "num_nodes": 2}
        for name, wanted in known.items():
            expect(seen[name] == wanted, f"on node {rank} of 2, {name} is {seen[name]}, expected {wanted}.")
    shares = [seen["share"] for seen in ranks]
    count = shares[0]["num_replicas"]  # one if both nodes work on the same samples
    expect(
        {share["num_replicas"] for share in shares} == {count}
        and {share["rank"] for share in shares} == set(range(count)),
        f"the shares on 2 nodes are {shares}, which do not cover the data.",
    )


@check(deadline=120)
def resume_at_node_counts(bench: Bench) -> None:
    """A checkpoint of two nodes resumes exactly on one node, on three, and on two ranks of one."""
    saved = bench.run(save, TASK, path_in(bench), world_size=2, nodes=2)[0]
    for ranks, nodes in ((1, 1), (3, 3), (2, 1)):
        resumed = bench.run(resume, TASK, path_in(bench), world_size=ranks, nodes=nodes)
        expect_resumed(bench, resumed, saved, f"saved by 2 nodes, resumed by {ranks} ranks on {nodes}")


@check(of_adapter=True)
def rank_zero_across_nodes(bench: Bench) -> None:
    """Once-only work runs on the first node, and per-node work runs once on each node."""
    seen = bench.run(_count_calls, world_size=2, nodes=2)
    for name, wanted in (("rank_zero_only", [1, 0]), ("is_global_zero", [1, 0]), ("prepare_data", [1, 1])):
        counts = [calls[name] for calls in seen]
        expect(counts == wanted, f"{name} was true or called {counts} times on 2 nodes, expected {wanted}.")


def _where_it_is(subject: Subject) -> dict[str, Any]:
    task = Task(steps=1)
    module, trainer = task.module(), make_trainer(subject, task)
    trainer.fit(module)
    names = ("global_rank", "node_rank", "local_rank", "world_size", "num_nodes")
    return {**{name: getattr(trainer, name) for name in names}, "share": share_of(trainer)}


class _Counting(Plain):
    """Counts the calls that only some processes should make."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.calls = dict.fromkeys(("rank_zero_only", "is_global_zero", "prepare_data"), 0)

    def prepare_data(self) -> None:
        """Count; Lightning calls this once per node, because the data would be stored there."""
        self.calls["prepare_data"] += 1

    def on_train_start(self) -> None:
        self._count_on_rank_zero()
        self.calls["is_global_zero"] += self.trainer.is_global_zero

    @rank_zero_only
    def _count_on_rank_zero(self) -> None:
        self.calls["rank_zero_only"] += 1


def _count_calls(subject: Subject) -> dict[str, int]:
    task = Task(model=_Counting, steps=1)
    module = _Counting(task)
    fit(subject, task, module=module)
    return module.calls
