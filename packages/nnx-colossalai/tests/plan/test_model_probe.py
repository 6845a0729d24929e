"""The probe finds a step's memory and compute exactly, without memory, and leaves the model unchanged."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import nnx
from jobs.colossalai_llama import Llama
from nnx_colossalai.plan.kept import Probe, probe
from nnx_colossalai.plan.units import find_units
from nnx_core.errors import UnsupportedError


def look(model: nn.Module, *inputs: object, min_numel: int = 100, **options: object) -> Probe:
    return probe(find_units(model, min_numel=min_numel), model, inputs, **options)  # type: ignore[arg-type]


def small_llama(**options) -> Llama:
    return Llama(dim=16, heads=2, inner=40, layers=3, words=50, **options)


TOKENS = torch.zeros(2, 6, dtype=torch.long)


def really_kept(model: nn.Module, *inputs: Tensor) -> int:
    """Return the bytes that autograd saves in a real forward, and of inputs and output; each storage once."""
    own = [*model.parameters(), *model.buffers()]
    weights = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)
    for tensor in (*inputs, output):
        kept[tensor.untyped_storage().data_ptr()] = tensor
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)


MODELS = {
    "chain": (lambda: nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 20)), [torch.ones(5, 20)]),
    "norms": (
        lambda: nn.Sequential(nn.Linear(20, 20), nn.LayerNorm(20), nn.Tanh(), nn.BatchNorm1d(20)),
        [torch.ones(5, 20)],
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten()),
        [torch.ones(2, 3, 8, 8)],
    ),
    "llama": (small_llama, [TOKENS]),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_is_what_autograd_keeps_in_a_real_step(name: str) -> None:
    build, inputs = MODELS[name]
    model = build()
    found = look(model, *inputs)
    assert found.note == ""
    assert sum(found.activation_bytes.values()) == really_kept(model, *inputs)


def test_activations_are_those_of_the_unit_that_makes_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(20, 30), nn.GELU()), nn.Linear(30, 10))
    found = look(model, torch.ones(5, 20), min_numel=300)
    assert found.activation_bytes == {"0.0": 5 * 30 * 4, "1": 5 * 10 * 4, "": 5 * (20 + 30) * 4}


@pytest.mark.full
def test_recomputed_layers_keep_their_inputs_only_and_need_a_layer_more_for_a_moment() -> None:
    plain, recomputing = (look(small_llama(recompute=on), TOKENS) for on in (False, True))
    layers = [f"layers.{at}" for at in range(3)]
    hidden = 2 * 6 * 16 * 4
    assert all(plain.activation_bytes[name] > 5 * hidden for name in layers)
    assert all(recomputing.activation_bytes[name] == hidden for name in layers)
    assert recomputing.temporary_bytes > plain.temporary_bytes
    assert recomputing.temporary_bytes > plain.activation_bytes["layers.0"] - hidden
    assert sum(recomputing.flops.values()) > 1.2 * sum(plain.flops.values())


def test_operations_are_counted_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 10, bias=False))
    found = look(model, torch.ones(7, 10, requires_grad=True))
    one = 2 * 7 * 10 * 20
    assert found.flops == {"0": 3 * one, "1": 3 * one, "": 0}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_step_is_looked_at_as_in_training_wherever_it_is_asked_for(mode: type) -> None:
    expected = look(small_llama(), TOKENS)
    with mode():
        assert look(small_llama(), TOKENS) == expected


def test_frozen_layers_keep_and_compute_less() -> None:
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    trained = look(model, torch.ones(5, 20))
    model.requires_grad_(False)
    frozen = look(model, torch.ones(5, 20))
    assert sum(frozen.flops.values()) < sum(trained.flops.values())
    assert sum(frozen.activation_bytes.values()) < sum(trained.activation_bytes.values())


def test_a_mixed_precision_keeps_half_as_much_of_matrix_products() -> None:
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 10, bias=False))
    full = look(model, torch.ones(5, 20))
    half = look(model, torch.ones(5, 20), working=torch.bfloat16, mixed=True)
    true = look(model, torch.ones(5, 20), working=torch.bfloat16)
    assert full.activation_bytes["0"] == 2 * true.activation_bytes["0"] == 4 * 5 * 30
    assert half.activation_bytes["0"] == 2 * 5 * 30 + 2 * 5 * 20  # autocast's copy of the input
    assert full.activation_bytes[""] == 2 * true.activation_bytes[""]


def test_weights_that_are_used_while_their_module_does_not_run_are_named() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(functional.linear(self.embed(tokens), self.embed.weight) @ self.embed.weight)

    model = Tied()
    assert look(model, TOKENS).used_outside == {"embed"}
    left = find_units(model, min_numel=100, leave=["embed"])
    assert probe(left, model, [TOKENS]).used_outside == frozenset()


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Transformer(32, 4, 2, 2, 64), [torch.ones(3, 2, 32), torch.ones(4, 2, 32)]),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
            [torch.ones(3, 2, 32)],
        ),
        (nn.LSTM(32, 32, num_layers=2), [torch.ones(3, 2, 32)]),
    ],
    ids=["transformer", "encoder", "lstm"],
)
def test_no_unit_of_torchs_own_models_is_used_outside_of_itself(module: nn.Module, inputs: list) -> None:
    for bounds in ({"min_numel": 1}, {"min_numel": 1, "max_numel": 50}):
        found = probe(find_units(module, **bounds), module, inputs)
        assert (found.note, found.used_outside) == ("", frozenset())
        assert sum(found.activation_bytes.values()) > 0


@pytest.mark.full
def test_a_model_without_memory_of_its_own_is_enough() -> None:
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with torch.device("meta"):
        model = Llama(layers=4, recompute=True)
    found = look(model, tokens, working=torch.bfloat16, mixed=True)
    assert found.note == ""
    assert found.activation_bytes["layers.0"] == 64 * 4096 * 2
    last, head = 4096 * 11008, 4096 * 32000  # recomputing ends before the last product of a layer
    layer = 4 * 4096**2 + 3 * last
    assert sum(found.flops.values()) == pytest.approx(64 * (4 * (8 * layer - 2 * last) + 6 * head), rel=0.01)


# --- nothing is left behind -----------------------------------------------------------------------------


class Messy(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(20, 20), nn.BatchNorm1d(20)
        self.cache: dict[str, object] = {"old": 1}
        self.seen: list[object] = []
        self.nested = {"inner": [1, 2]}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(self.norm(self.linear(x)))
        random.random(), np.random.rand(), torch.manual_seed(7)
        self.calls += 1
        self.last = y
        self.cache["new"] = y
        self.nested["inner"].append(y)
        self.seen.append(y)
        self.linear.extra = y
        if not hasattr(self, "angles"):
            self.register_buffer("angles", torch.ones(3))
        return y * self.angles.sum()


class Failing(Messy):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        if x.sum().item() > 3:
            return x
        raise ValueError("the second line\nis not shown")


@pytest.mark.parametrize("cls", [Messy, Failing])
def test_the_model_and_the_random_states_are_as_before(cls: type[Messy]) -> None:
    model = cls()
    hooks: list[object] = []
    model.linear.register_forward_hook(lambda *_: hooks.append(1))
    tensors = {name: (t, t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    dicts = [(vars(part), dict(vars(part))) for part in model.modules()]
    counts = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = look(model, torch.ones(5, 20))
    assert (found.note != "") is (cls is Failing)
    now = dict([*model.named_parameters(), *model.named_buffers()])
    assert now.keys() == tensors.keys()
    assert all(
        now[name] is t and torch.equal(t, copy) and t.grad is None for name, (t, copy) in tensors.items()
    )
    assert all(space.keys() == before.keys() for space, before in dicts)
    assert all(space[key] is value for space, before in dicts for key, value in before.items())
    assert (model.cache, model.seen, model.nested, model.calls) == ({"old": 1}, [], {"inner": [1, 2]}, 0)
    assert counts == [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    if cls is Messy:  # and it still trains
        model(torch.randn(5, 20)).sum().backward()


class Counting(nn.Module):
    """Counts and draws outside of its attributes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.total = nn.Linear(20, 20), torch.zeros(())
        self.rates, self.generator = iter([1, 2, 3]), np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        self.total += 1
        return self.linear(x) * next(self.rates) * self.generator.random()


def test_what_a_forward_counts_and_draws_is_put_back() -> None:
    model = Counting()
    assert look(model, torch.ones(5, 20)).note == ""
    assert (Counting.calls, float(model.total), next(model.rates)) == (0, 0.0, 1)
    assert model.generator.random() == np.random.default_rng(0).random()


def test_a_forward_that_may_go_on_with_a_generator_is_not_run() -> None:
    model = nn.Linear(20, 20)
    model.rates = (rate for rate in range(3))  # type: ignore[assignment]
    assert "'rates', a generator of Python" in look(model, torch.ones(5, 20)).note
    assert next(model.rates) == 0  # type: ignore[call-overload]


class GoesOn(LightningModule):
    """Draws from a generator before it calls the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rates = nn.Linear(20, 20), (rate for rate in range(9))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return next(self.rates) * self.linear(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_that_goes_on_with_a_generator_is_refused_and_not_left_out_of_the_plan() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=nnx.strategy("colossalai", device_memory="1MiB"), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_steps=1,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="advanced 'rates'"):
        trainer.fit(GoesOn(), DataLoader(TensorDataset(torch.ones(4, 20)), batch_size=2))


def test_what_a_forward_logs_is_dropped() -> None:
    logged: list[object] = []

    class Logging(nn.Linear):
        def log(self, *values: object) -> None:
            logged.append(values)

        log_dict = log

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.log("mean", y.mean())
            self.log_dict({"sum": y.sum()})
            return y

    model = Logging(3, 3)
    assert look(model, torch.ones(2, 3)).note == "" and not logged
    model(torch.ones(2, 3))
    assert len(logged) == 2


def test_a_model_that_cannot_be_run_without_memory_is_said_and_counts_nothing() -> None:
    found = look(Failing(), torch.ones(5, 20))
    assert found.activation_bytes == {} and found.flops == {} and found.temporary_bytes == 0
    assert found.note.startswith("activations are not counted: DataDependentOutputException: ")

    def wrong(x: Tensor) -> Tensor:
        raise ValueError("the first line\nand another")

    units = find_units(nn.Linear(2, 2))
    assert probe(units, wrong, [1]).note == "activations are not counted: ValueError: the first line"


def test_a_forward_that_communicates_is_not_run(pool) -> None:
    from jobs.colossalai_plan_jobs import probe_a_forward_that_communicates

    notes = pool.run(probe_a_forward_that_communicates, world_size=2, init="gloo", timeout=60)
    assert notes == ["activations are not counted: RuntimeError: it communicates with other ranks"] * 2
