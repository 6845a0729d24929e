"""Plans for a world that is not present."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.colossalai_llama import Llama, llama2_7b
from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.plan.document import PlanDocument
from nnx_colossalai.plan.dry_run import dry_run
from nnx_colossalai.plan.model import model_spec
from nnx_colossalai.plan.spec import Constraints, Rates, Tier
from nnx_colossalai.plan.units import find_units
from nnx_core.backend import ParallelContext
from nnx_core.errors import PlanError

GIB = 2**30
TOKENS = torch.zeros(2, 6, dtype=torch.long)


def small(**options) -> Llama:
    return Llama(dim=16, heads=2, inner=40, layers=3, words=50, **options)


@pytest.mark.full
def test_seven_billion_parameters_on_eight_ranks_are_planned_within_thirty_seconds() -> None:
    start = time.process_time()  # one thread; others use the machine too
    outcome = dry_run(
        lambda: llama2_7b(recompute=True),
        [torch.empty(1, 2048, dtype=torch.long, device="meta")],
        world_size=8,
        device_bytes=12 * GIB,
        host_bytes=64 * GIB,
        optimizer=torch.optim.AdamW,
    )
    text = str(outcome)
    taken = time.process_time() - start
    assert taken < 30, f"it took {taken:.1f} s"
    assert outcome.planned.memory.device <= 12 * GIB
    assert outcome.waste == 0 and outcome.notes == ()
    assert "6,738,415,616 elements in 35 chunks on 8 ranks" in text
    assert "sharding adds 0.000% to the elements" in text
    assert outcome.probe.activation_bytes["layers.0"] == 2048 * 4096 * 2
    on_host = {tier.steps_on_host for tier in outcome.planned.placement.tiers.values()}
    assert on_host == {True, False}


def test_more_memory_needs_no_host() -> None:
    tokens = [torch.empty(1, 64, dtype=torch.long)]
    outcome = dry_run(llama_of(2), tokens, world_size=8, device_bytes=80 * GIB)
    assert not any(tier.steps_on_host for tier in outcome.planned.placement.tiers.values())


def llama_of(layers: int):
    return lambda: Llama(layers=layers)


@pytest.mark.full
def test_the_plan_can_be_used_where_that_world_is(tmp_path: Path) -> None:
    outcome = dry_run(small(), [TOKENS], world_size=4, device_bytes=10**6, min_numel=500)
    outcome.document.save(tmp_path / "plan.json")
    outcome.draw(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    spec = model_spec(find_units(small(), min_numel=500), world_size=4, precision="bf16-mixed")
    assert PlanDocument.load(tmp_path / "plan.json").placement(spec) == outcome.planned.placement


def test_what_the_loss_keeps_counts() -> None:
    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float().flatten(0, 1), TOKENS.flatten())

    plain, with_loss = (
        dry_run(small(), [TOKENS], world_size=1, device_bytes=10**6, loss=one).probe for one in (None, loss)
    )
    logits = 12 * 50
    # The logarithms in float32 are kept in place of the logits in bfloat16.
    more = with_loss.activation_bytes[""] - plain.activation_bytes[""]
    assert more == logits * (4 - 2) + TOKENS.nbytes + 4 + 4


def test_keyword_inputs_constraints_and_rates_are_kept_to() -> None:
    outcome = dry_run(
        small(),
        [],
        input_kwargs={"tokens": TOKENS},
        world_size=1,
        device_bytes=10**6,
        constraints=Constraints(policy="streamed"),
        rates=Rates(host_step=5.0),
        optimizer=0,
        precision="32-true",
    )
    assert set(outcome.planned.placement.tiers.values()) == {Tier.STREAMED}
    assert outcome.resources.host_step == 5.0
    assert (outcome.spec.optimizer_bytes, outcome.spec.working_bytes) == (0, 4)
    assert outcome.notes == () and outcome.probe.note == ""


def test_embeddings_that_are_used_elsewhere_are_left_to_the_root() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner = nn.Embedding(50, 16), nn.Linear(16, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            return functional.linear(self.inner(self.embed(tokens)), self.embed.weight)

    outcome = dry_run(Tied(), [TOKENS], world_size=1, device_bytes=10**6, min_numel=100)
    assert [group.name for group in outcome.spec.groups] == ["inner", ""]
    assert outcome.probe.used_outside == frozenset()


@pytest.mark.parametrize("inputs", [None, []], ids=["no inputs", "inputs that fail"])
def test_embeddings_and_heads_are_left_to_the_root_where_nobody_could_look_as_in_a_run(inputs: Any) -> None:
    outcome = dry_run(small(), inputs, world_size=1, device_bytes=10**6, min_numel=100)
    seen = dry_run(small(), [TOKENS], world_size=1, device_bytes=10**6, min_numel=100)
    layers = [f"layers.{at}" for at in range(3)]
    assert [group.name for group in outcome.spec.groups] == [*layers, ""]
    assert {group.name for group in seen.spec.groups} > {*layers, ""}

    backend = ColossalAIBackend(ColossalAIOptions(min_num_params=100))
    backend.setup(ParallelContext(device=torch.device("cpu"), precision="bf16-mixed"))
    module = small()
    backend.parallelize(module, lambda: ((), {}))
    (model,) = backend._models.values()
    assert [chunk.name for chunk in model.engine.chunks] == [group.name for group in outcome.spec.groups]
    backend.unparallelize(module)
    backend.teardown()


def test_what_was_guessed_or_not_counted_is_said() -> None:
    outcome = dry_run(small(), None, world_size=1, device_bytes=10**6)
    assert outcome.notes == (
        "activations are not counted: no inputs were given",
        "no optimizer is known yet: taken for Adam.",
    )
    assert str(outcome).endswith("note: no optimizer is known yet: taken for Adam.")
    wrong = dry_run(small(), [], world_size=1, device_bytes=10**6)
    assert wrong.notes[0].startswith("activations are not counted: TypeError: ")


def test_a_world_that_is_too_small_is_refused_with_bytes_and_knob() -> None:
    with pytest.raises(PlanError, match=r"device_memory"):
        dry_run(small(), [TOKENS], world_size=2, device_bytes=1000)


def test_the_model_is_left_as_it_was() -> None:
    model = small()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    dry_run(model, [TOKENS], world_size=4, device_bytes=10**6)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
