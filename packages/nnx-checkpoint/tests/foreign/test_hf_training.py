"""A directory of Hugging Face is a `ckpt_path`, and each rank reads its own part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nnx
import nnx_checkpoint
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.training import Run

transformers = pytest.importorskip("transformers", reason="its models are the judge")

from jobs.hf_models import Lit, build, logits, memory_of_reading, save_config, train  # noqa: E402

WIDE: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 768, "vocab_size": 2000, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}


@pytest.mark.full
def test_a_directory_starts_training_and_a_run_goes_back_to_one(pool: WorkerPool, tmp_path: Path) -> None:
    """The same losses from the directory as from the weights themselves, on two ranks, and there and back."""
    build("gpt2").save_pretrained(tmp_path / "hub", max_shard_size="6KB")
    save_config(build("gpt2"), tmp_path / "config")
    run = {"strategy": "fsdp_auto", "options": {"min_num_params": 100}, "devices": 2, "steps": 2}
    saved = pool.run(
        train, Run(resume=str(tmp_path / "hub"), save=str(tmp_path / "a.ckpt"), **run), "gpt2", world_size=2
    )[0]
    nnx_checkpoint.convert(tmp_path / "a.ckpt", tmp_path / "out", to="hf", config=tmp_path / "config")
    nnx_checkpoint.convert(tmp_path / "out", tmp_path / "b.ckpt")
    opened = [nnx_checkpoint.open_checkpoint(tmp_path / name) for name in ("a.ckpt", "b.ckpt")]
    assert nnx_checkpoint.compare(*opened).same
    more = {**run, "steps": 4, "strategy": "nnscaler_dp", "options": {}, "devices": 3}
    resumed = pool.run(train, Run(resume=str(tmp_path / "out"), **more), "gpt2", world_size=3)[0]
    straight = pool.run(
        train, Run(resume=str(tmp_path / "hub"), **{**run, "steps": 4}), "gpt2", world_size=2
    )[0]
    assert saved == straight[:2]
    assert resumed == pytest.approx(straight[2:], abs=1e-5)
    assert saved[0] == pytest.approx(first_loss(), abs=1e-6)


def first_loss() -> float:
    batch = torch.randint(0, 37, (12, 8), generator=torch.Generator().manual_seed(3))
    return float(build("gpt2")(input_ids=batch, labels=batch).loss.item())


def test_load_from_checkpoint_builds_the_model_and_reads_it(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path / "hub")
    lit = nnx.load_from_checkpoint(Lit, tmp_path / "hub", kind="gpt2")
    assert torch.equal(logits(lit.net.eval()), logits(model))
    plain = nnx.load_from_checkpoint(transformers.GPT2LMHeadModel, tmp_path / "hub", config=model.config)
    assert torch.equal(logits(plain.eval()), logits(model))


@pytest.mark.full
@pytest.mark.parametrize(
    ("stored", "dim"),
    [
        pytest.param("bfloat16", 0, id="rows converted"),
        pytest.param("float32", 0, id="rows"),
        pytest.param("bfloat16", 1, id="columns converted"),
        pytest.param("float32", 1, id="columns"),
    ],
)
def test_a_rank_holds_its_part_and_at_most_two_tensors(
    pool: WorkerPool, tmp_path: Path, stored: str, dim: int
) -> None:
    model = build("llama", **WIDE)
    model = model.bfloat16() if stored == "bfloat16" else model.bfloat16().float()
    model.save_pretrained(tmp_path / "hub", max_shard_size="3MB")
    for cost in pool.run(memory_of_reading, str(tmp_path / "hub"), WIDE, dim, world_size=4):
        assert cost["same"]
        assert cost["tensors"] + cost["buffer"] <= 2 * cost["largest"], cost
        if dim == 0:  # of columns it reads the gaps below a page too
            assert cost["read"] <= 1.1 * cost["own"] / (2 if stored == "bfloat16" else 1), cost
