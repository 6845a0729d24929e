"""The example of a third-party plugin is complete: it is found, trains, and its checkpoint resumes elsewhere.

Its own tests, in examples/tiny_backend/tests, check its guarantees.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from jobs import tiny_backend_jobs as jobs
from nnx_core.names.discovery import inventory

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = EXAMPLES / "tiny_backend"


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def test_it_is_found_by_its_entry_point_and_described_without_importing_torch():
    owners = inventory().owners
    assert {name for name in owners if owners[name].startswith("nnx-tiny ")} == {"tiny", "tiny_lightning"}
    shown, imported = jobs.show_in_a_fresh_process("tiny")
    assert json.loads(shown)["target"] == "nnx_tiny.backend:TinyBackend"
    assert json.loads(shown)["options"][0]["name"] == "bucket_megabytes"
    assert not imported


def test_all_of_it_is_less_than_300_lines():
    sources = sorted((TINY / "src").rglob("*.py"))
    assert len(sources) >= 5
    assert sum(len(source.read_text().splitlines()) for source in sources) < 300


def test_its_readme_names_its_files():
    readme = (TINY / "README.md").read_text()
    named = set(re.findall(r"^\| `([\w/]+\.py)` \|", readme, re.MULTILINE))
    sources = {path.name for path in (TINY / "src/nnx_tiny").glob("*.py")} - {"__init__.py"}
    assert named == sources | {"tests/test_conformance.py"}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["tiny", "tiny_lightning"])
def test_it_trains_as_one_process_does_and_fsdp_reads_its_checkpoint(pool, tmp_path, strategy):
    alone = pool.run(jobs.train, strategy, tmp_path / "alone", world_size=1)[0]
    ranks = pool.run(jobs.train, strategy, tmp_path / "both", world_size=2)
    assert len(alone["train"]) == 2 * jobs.STEPS
    assert len(set(alone["train"])) == 2 * jobs.STEPS
    for rank in ranks:
        assert rank["train"] == pytest.approx(alone["train"], abs=1e-5)
    resumed = pool.run(jobs.train, "fsdp_auto", tmp_path, tmp_path / "both/last.ckpt", world_size=2)
    for rank in resumed:
        assert rank["val"] == pytest.approx(ranks[0]["val"], abs=1e-6)


def test_it_refuses_an_option_out_of_range(pool):
    assert pool.run(jobs.refused_option, world_size=1) == [
        "bucket_megabytes=0 is not a positive size. Pass, say, 25."
    ]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("bucket_megabytes", [25.0, 1e-6])
def test_gradients_of_several_dtypes_are_averaged_in_buckets_of_any_size(pool, bucket_megabytes):
    for seen in pool.run(jobs.average, bucket_megabytes, world_size=3, init="gloo"):
        assert seen["shared"].tolist() == [1.0, 2.0, 3.0]
        assert seen["lower precision"].dtype == torch.bfloat16
        assert seen["lower precision"].tolist() == [1.0]


def test_a_gradient_that_one_rank_lacks_counts_as_zero_there_and_one_that_all_lack_stays_away(pool):
    for seen in pool.run(jobs.average, 25.0, world_size=3, init="gloo"):
        assert seen["only on rank 1"].tolist() == [pytest.approx(2.0)]
        assert seen["nowhere"] is None
        assert seen["frozen"] is None


def test_the_raw_strategy_counts_the_ranks_of_all_nodes(pool):
    assert pool.run(jobs.sampler_shares, world_size=1) == [
        {
            (node, local): {"num_replicas": 6, "rank": 2 * node + local}
            for node in range(3)
            for local in (0, 1)
        }
    ]


def test_the_raw_strategy_reduces_as_lightning_asks(pool):
    for rank, seen in enumerate(pool.run(jobs.reductions, world_size=3, init="gloo")):
        assert seen == {
            "mean": 1.0,
            "avg": 1.0,
            "sum": 3.0,
            "max": 2.0,
            "ReduceOp.SUM": 3.0,
            "None": 3.0,
            "mean of integers": 1.0,
            "not a tensor": rank,
            "argument": float(rank),
        }
