"""The backend under plain PyTorch in one process: plans, files, moves, steps that run out of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs.simulated_device import SimDevice
from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.loss_scale import DynamicLossScaler
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.plan.spec import Tier
from nnx_core.backend import ParallelContext
from nnx_core.errors import OptionError, PlanError, UnsupportedError
from nnx_core.optimizers.gradients import ParallelGradScaler

CPU = torch.device("cpu")


class Layer(nn.Module):
    """Its linear layers are 72 elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.up(x).tanh())
        return hidden


def model(*, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def no_sample() -> Any:
    raise UnsupportedError("no sample here.")


class Run:
    """A model under the backend, as an adapter would have it."""

    def __init__(
        self,
        *,
        precision: str = "32-true",
        module: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        self.module = module if module is not None else model()
        self.backend = ColossalAIBackend(ColossalAIOptions(**{"min_num_params": 10, **options}))
        self.backend.setup(ParallelContext(device=CPU, precision=precision))
        assert self.backend.parallelize(self.module, no_sample) == {}
        self.optimizer = optimizer(self.module.parameters(), lr=0.01)
        self.backend.setup_optimizers(self.module, [self.optimizer])

    @property
    def tiers(self) -> dict[str, str]:
        (chunked,) = self.backend._models.values()
        return {chunk.name: chunk.tier.value for chunk in chunked.engine.chunks}

    def step(self, seed: int) -> float:
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
        outputs = self.backend.run_step(self.module, self.module, inputs)
        loss = outputs.float().square().mean()
        self.optimizer.zero_grad()
        self.backend.backward(self.module, loss)
        self.backend.clip_grad_norm(self.optimizer, 0.1)
        self.backend.optimizer_step(self.optimizer, self.optimizer.step)
        return loss.item()

    def end(self) -> dict[str, Tensor]:
        self.backend.unparallelize(self.module)
        self.backend.teardown()
        return {name: value.clone() for name, value in self.module.state_dict().items()}


def trained(steps: int = 4, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(**settings)
    return [run.step(seed) for seed in range(steps)], run.end()


def expect_the_same(
    found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("policy", ["cuda", "cpu", "gathered", "sharded", "offloaded", "streamed"])
def test_a_policy_puts_every_chunk_where_it_says(policy: str) -> None:
    run = Run(placement_policy=policy)
    expected = {"cuda": ("gathered", "sharded"), "cpu": ("streamed",)}.get(policy, (policy,))
    assert set(run.tiers.values()) <= set(expected)
    run.step(0)
    run.end()


@pytest.mark.parametrize("overlap", ["none", "exact"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fractions_mix_tiers_and_change_no_number(precision: str, overlap: str) -> None:
    mixed = Run(precision=precision, offload_fraction=0.5, stream_fraction=0.25, overlap=overlap)
    assert sorted(tier for name, tier in mixed.tiers.items() if name) == [
        "gathered", "gathered", "offloaded", "streamed"
    ]  # fmt: skip
    losses = [mixed.step(seed) for seed in range(4)]
    expect_the_same((losses, mixed.end()), trained(precision=precision, placement_policy="cuda"))


def test_single_chunks_are_placed_by_name_and_pattern() -> None:
    run = Run(tiers={"*": "offloaded", "2": "streamed", "": "gathered"})
    assert {name: tier for name, tier in run.tiers.items() if name} == {
        "0": "offloaded", "1": "offloaded", "2": "streamed", "3": "offloaded"
    }  # fmt: skip
    run.end()


def test_a_chunk_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"'block', .*no group of that name\. Nearest names"):
        Run(tiers={"block": "streamed"})


def test_chunk_size_divides_layers_and_its_floor_joins_them() -> None:
    assert set(Run().tiers) == {"0", "1", "2", "3", ""}
    assert {"0.up", "0.down", "3.up"} < set(Run(chunk_size=100).tiers)
    assert set(Run(min_chunk_size=4 * 145, min_num_params=None).tiers) == {""}
    assert set(Run(min_chunk_size=4 * 144, min_num_params=None).tiers) == {"0", "1", "2", "3", ""}
    # The largest parameter has 64 elements: chunks of more than 80 are divided.
    assert {"0.up", "0.down"} < set(Run(chunk_search_range=16).tiers)


def test_a_plan_is_written_edited_and_used(tmp_path: Path) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "memory.png"
    Run(placement_policy="cuda", plan_file=str(plan), timeline_file=str(picture)).end()
    assert picture.read_bytes().startswith(b"\x89PNG")
    body = json.loads(plan.read_text())
    for chunk in body["chunks"]:
        chunk["tier"] = "streamed" if chunk["name"] == "1" else "offloaded"
    plan.write_text(json.dumps(body))
    run = Run(plan=str(plan))
    assert run.tiers["1"] == "streamed" and run.tiers["0"] == "offloaded"
    losses = [run.step(seed) for seed in range(4)]
    expect_the_same((losses, run.end()), trained())


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    Run(plan_file=str(plan)).end()
    with pytest.raises(PlanError, match=r"is for another model: the model has no '3'"):
        Run(plan=str(plan), module=model(layers=3))


def test_the_table_is_logged_once_for_a_model(said: list[str]) -> None:
    Run(placement_policy="cpu").end()
    (line,) = [line for line in said if "chunks planned" in line]
    assert "streamed" in line and "elements" in line


def test_the_state_of_the_optimizer_corrects_the_plan() -> None:
    """Planned for Adam, SGD leaves room to have more on the device."""
    # Of 576 elements: 4 bytes masters, 4 gradients, and 8 of Adam's state or none of SGD's.
    settings = {"device": SimDevice(7200, delays=None), "overlap": "none"}
    adam = Run(**settings)
    adam_on_host = [tier for tier in adam.tiers.values() if Tier(tier).steps_on_host]
    adam.end()
    sgd = Run(optimizer=torch.optim.SGD, **settings)
    assert adam_on_host
    assert len([tier for tier in sgd.tiers.values() if Tier(tier).steps_on_host]) < len(adam_on_host)
    losses = [sgd.step(seed) for seed in range(3)]
    expect_the_same((losses, sgd.end()), trained(3, optimizer=torch.optim.SGD))


def test_outputs_are_cast_to_float32_where_that_is_asked_for() -> None:
    for force, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        run = Run(precision="bf16-true", module=model().bfloat16(), force_outputs_fp32=force)
        inputs = torch.ones(2, 8, dtype=torch.bfloat16)
        found = run.backend.run_step(
            run.module, lambda x, root=run.module: {"y": root(x), "n": [x.int()]}, inputs
        )
        assert (found["y"].dtype, found["n"][0].dtype) == (dtype, torch.int32)
        run.end()


# --- loss scale -----------------------------------------------------------------------------------


def test_the_loss_scale_is_that_of_the_options_unless_the_user_brings_one() -> None:
    run = Run(precision="16-mixed", initial_scale=32.0, hysteresis=3, growth_interval=7)
    scaler = run.backend.grad_scaler(torch.amp.GradScaler("cpu"))
    assert isinstance(scaler, DynamicLossScaler)
    assert (scaler.get_scale(), scaler.rule.hysteresis, scaler.get_growth_interval()) == (32.0, 3, 7)
    assert run.backend.grad_scaler(scaler) is scaler
    own = run.backend.grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0))
    assert isinstance(own, ParallelGradScaler) and not isinstance(own, DynamicLossScaler)
    assert own.get_scale() == 8.0
    run.end()


# --- out of memory --------------------------------------------------------------------------------


class Exhausting(nn.Module):
    """Raises as torch does on a full card, in a forward or a backward, a given number of times."""

    def __init__(self, *, times: int, where: str) -> None:
        super().__init__()
        self.layers = model()
        self.dropout = nn.Dropout(0.5)
        self.times, self.where = times, where

    def _maybe(self, *_: Any) -> None:
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB.")

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.layers[:2](x))
        if self.where == "forward":
            self._maybe()
        if self.where == "backward" and hidden.requires_grad:
            hidden.register_hook(self._maybe)
        return self.layers[2:](hidden)


def exhausted(times: int, where: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    run = Run(module=Exhausting(times=times, where=where), device=SimDevice(2**20, delays=1))
    torch.manual_seed(4)
    losses = [run.step(seed) for seed in range(3)]
    tiers = set(run.tiers.values())
    assert (tiers == {"gathered"}) == (times == 0)
    return losses, run.end()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_out_of_memory_runs_again_under_a_lower_plan_and_no_number_changes(
    where: str, times: int, said: list[str]
) -> None:
    expected = exhausted(0, where)
    expect_the_same(exhausted(times, where), expected)
    assert any("Out of memory: CUDA out of memory" in line and "to lower tiers" in line for line in said)


class Tight(nn.Module):
    """Raises as torch does on a full card, until enough of the model has left the device.

    Args:
        tells: Include the requested bytes in the error.
    """

    def __init__(self, *, tells: bool) -> None:
        super().__init__()
        self.layers = model(layers=16)
        self.tells, self.failures = tells, 0
        self.missing: Callable[[], int] = lambda: 0
        self.device = SimDevice(2**20)

    def forward(self, x: Tensor) -> Tensor:
        missing = self.missing()
        if missing > 0:
            self.failures += 1
            asked = self.device.capacity - self.device.used + missing
            tried = f" Tried to allocate {asked} bytes. GPU 0 has a total capacity of 2.00 MiB"
            raise torch.OutOfMemoryError(f"CUDA out of memory.{tried if self.tells else ''}")
        hidden: Tensor = self.layers(x)
        return hidden


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("tells", "most"), [(True, 1), (False, 5)])
def test_a_step_out_of_memory_is_not_run_again_for_every_chunk(tells: bool, most: int) -> None:
    module = Tight(tells=tells)
    run = Run(module=module, device=module.device)
    (chunked,) = run.backend._models.values()
    allowed = chunked.placing.planned.memory.device // 8
    module.missing = lambda: chunked.placing.planned.memory.device - allowed
    run.step(0)
    assert 1 <= module.failures <= most
    run.end()


class Kept(torch.autograd.Function):
    """Keeps device memory from a forward to its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimDevice, numel: int) -> Tensor:
        ctx.save_for_backward(device.empty(numel, torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class Large(Exhausting):
    """Its graph takes more than half of the device."""

    def __init__(self) -> None:
        super().__init__(times=1, where="backward")
        self.device = SimDevice(2**17)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Kept.apply(x.clone().requires_grad_(), self.device, 2**14))


def test_the_graph_of_a_backward_that_failed_is_free_before_the_forward_runs_again() -> None:
    module = Large()
    run = Run(module=module, device=module.device)
    run.step(0)
    assert module.times == 0 and set(run.tiers.values()) != {"gathered"}
    run.end()


def test_when_no_plan_is_left_the_error_says_so_with_the_knob() -> None:
    words = r"2\.00 KiB.*there is no lower plan: .*device_memory"
    with pytest.raises(DeviceMemoryError, match=words):
        exhausted(100, "forward")


def test_accumulated_gradients_are_not_mixed_with_those_of_a_backward_that_failed() -> None:
    run = Run(module=Exhausting(times=0, where="backward"), device=SimDevice(2**20, delays=1))
    inputs = torch.ones(2, 8)
    run.backend.backward(run.module, run.backend.run_step(run.module, run.module, inputs).sum())
    run.module.times = 1  # type: ignore[assignment] # of Exhausting
    loss = run.backend.run_step(run.module, run.module, inputs).sum()
    with pytest.raises(
        DeviceMemoryError, match=r"cannot use lower tiers now: .*mixed with those accumulated before"
    ):
        run.backend.backward(run.module, loss)
    run.end()


def test_a_step_of_manual_optimization_is_not_run_twice() -> None:
    module = Exhausting(times=1, where="forward")
    module.automatic_optimization = False  # type: ignore[assignment] # as on a LightningModule
    run = Run(module=module, device=SimDevice(2**20, delays=1))
    with pytest.raises(DeviceMemoryError, match="manual optimization may have changed weights already"):
        run.step(0)
    run.end()
