"""``nnx plan``: the trace, the table, its advice and bad input."""

from __future__ import annotations

import json
import resource
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nnx
from nnx_core.cli import plan as command
from nnx_core.cli.schema import schema_of
from nnx_core.errors import OptionError, StrategyNotFoundError, UnsupportedError
from nnx_core.planning.estimate import World
from nnx_core.planning.model import trace_module
from nnx_core.planning.record import Recorder
from nnx_core.planning.table import Plan
from nnx_core.planning.trace import Event, Kind, Parameter, Trace
from nnx_core.planning.units import UnitMemory


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(pl.LightningModule):
    def __init__(self, layers: int = 9, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class DependsOnData(Stack):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[batch.sum(1) > 0]).mean() * float(batch.mean())


def test_the_trace_counts_what_the_memory_tracker_of_torch_counts() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    from nnx_core.planning.tracing import fake_mode

    with fake_mode():
        model, batch = Stack(layers=3), torch.zeros(16, 8)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            loss = model.training_step(batch, 0)
            theirs = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        del loss
        recorder = Recorder(model)
        recorder.ignore(batch)
        with recorder.step():
            loss = model.training_step(batch, 0)
            ours = recorder.current
            assert loss.requires_grad  # its graph keeps the activations
        parameters = sum(p.numel() * 4 for p in model.parameters())
    assert ours == theirs["Total"] - parameters


def test_a_layer_ends_its_backward_before_the_one_that_feeds_it_begins() -> None:
    trace = trace_module(Stack, torch.zeros(16, 8), accelerator="cpu")
    order = [(event.kind, event.name) for event in trace.events]
    before, after = (Kind.LEAVE_BACKWARD, "blocks.5"), (Kind.ENTER_BACKWARD, "blocks.4")
    assert order.index(before) < order.index(after)


def test_a_unit_whose_input_has_no_gradient_is_reduced_at_the_end_with_its_gradient_alive() -> None:
    parameters = {name: Parameter(name, (100,), 4) for name in ("a.w", "b.w")}
    events = [Event(Kind.PHASE, "backward")]
    for storage, name in enumerate(("a", "b")):
        events += [Event(Kind.ENTER_BACKWARD, name), Event(Kind.MAKE, "", storage, 400)]
        events.append(Event(Kind.GRADIENT, f"{name}.w", storage, 400))
    trace = Trace(events=tuple(events), parameters=parameters)
    replay = UnitMemory(trace, World(size=2, accelerator="cpu"), units=["a", "b"])
    backward = replay.run().phases[1]
    # Shards of 200 of both, b gathered and both gradients of 400; the input of a's reduction, its shard and
    # gloo's copy.
    assert backward.peak == 2 * 200 + 400 + 2 * 400 + 400 + 200 + 400
    assert backward.end == 2 * 200 + 2 * 200


@pytest.mark.full
def test_the_plot_is_drawn_and_its_errors_are_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")

    def draw(path: Path) -> None:
        nnx.plan(Stack, torch.zeros(4, 8), memory="1MB", strategies=["ddp", "fsdp"], plot=path)

    draw(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match=r"cannot write the plot .*memory\.cat"):
        draw(tmp_path / "memory.cat")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="matplotlib is not installed"):
        draw(tmp_path / "memory.png")


@pytest.mark.full
def test_no_weight_is_allocated() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = nnx.plan(lambda: Stack(layers=50, width=2048), torch.zeros(4, 8), strategies=["ddp"])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert found.rows[0].estimate is not None
    assert found.rows[0].estimate.peak > 6 * 2**30
    assert grown < 2**29


def test_a_module_with_weights_is_planned_and_said_so() -> None:
    module = Stack(layers=2)
    before = [parameter.clone() for parameter in module.parameters()]
    found = nnx.plan(module, torch.zeros(4, 8), strategies=["ddp"])
    assert any("allocated already" in note for note in found.notes)
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.full
def test_a_step_may_call_its_index_otherwise_or_take_none() -> None:
    class Otherwise(Stack):
        def training_step(self, batch: Tensor, index: int) -> Tensor:  # type: ignore[override]
            return self(batch).square().mean()

    class Without(Stack):
        def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
            return self(batch).square().mean()

    plans = [nnx.plan(kind, torch.zeros(16, 8), strategies=["ddp"]) for kind in (Stack, Otherwise, Without)]
    assert {plan.source for plan in plans} == {"traced"}
    assert plans[0]["ddp"].estimate == plans[1]["ddp"].estimate == plans[2]["ddp"].estimate


def test_a_step_that_cannot_be_traced_names_its_line_and_falls_back_to_a_formula() -> None:
    found = nnx.plan(DependsOnData, torch.zeros(4, 8), strategies=["ddp"])
    assert found.source == "formula"
    assert any("test_planning.py:" in note and "Activations are not counted" in note for note in found.notes)
    assert found.rows[0].estimate is not None
    assert found.rows[0].estimate.bar == 0.5


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    row = nnx.plan(Stack, torch.zeros(64, 8), memory="3MB", accelerator="cpu", strategies=["ddp"])["ddp"]
    assert row.largest_batch
    for size, fits in ((row.largest_batch, True), (row.largest_batch + 1, False)):
        found = nnx.plan(Stack, torch.zeros(size, 8), memory="3MB", accelerator="cpu", strategies=["ddp"])[
            "ddp"
        ]
        assert (found.fits != "no") == fits, size


def bytes_of_run(batch: Tensor, *, recompute: str = "") -> int:
    """Return the peak of two real steps of one process, and the buckets of ddp."""
    model = Stack()
    for layer in model.modules():
        if type(layer).__name__ == recompute:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = model.configure_optimizers()
    recorder = Recorder(model)
    recorder.ignore(batch)
    with recorder:
        for _ in range(2):
            loss = model.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            del loss
            optimizer.step()
    return recorder.peak + 2 * sum(p.nbytes for p in model.parameters()) + batch.nbytes


def planned(batch: Tensor, memory: int | None = None, *, devices: int = 1, **options: object) -> Plan:
    names = ["ddp", "fsdp"]
    return nnx.plan(
        Stack, batch, memory=memory, devices=devices, options=options, accelerator="cpu", strategies=names
    )


@pytest.mark.full
def test_the_first_advice_is_a_smaller_batch_and_the_run_fits_with_it() -> None:
    batch, limit = torch.zeros(512, 8), 5_000_000
    row = planned(batch, limit)["ddp"]
    assert (row.fits, bytes_of_run(batch) > limit) == ("no", True)
    assert row.cure.startswith(f"batch {row.largest_batch} a device, with accumulate_grad_batches=")
    assert bytes_of_run(batch[: row.largest_batch]) <= limit


@pytest.mark.full
def test_the_second_advice_is_to_recompute_and_the_run_fits_with_it() -> None:
    batch = torch.zeros(1, 512, 8)
    needed = planned(batch, activation_checkpointing=Block)["ddp"].estimate
    assert needed is not None
    row = planned(batch, needed.peak)["ddp"]
    assert (row.fits, row.largest_batch) == ("no", 0)
    assert row.cure == "recompute activations: torch.utils.checkpoint around each Block"
    assert bytes_of_run(batch, recompute="Block") <= needed.peak < bytes_of_run(batch)


@pytest.mark.full
def test_the_third_advice_is_a_strategy_that_fits() -> None:
    batch, limit = torch.zeros(4, 8), 1_000_000
    found = planned(batch, limit, devices=8)
    assert (found["ddp"].fits, found["ddp"].cure) == ("no", "another strategy fits: fsdp")
    assert found["fsdp"].estimate is not None
    assert found["fsdp"].estimate.peak <= limit


def test_optimizers_whose_state_is_lazy_or_per_parameter_are_counted() -> None:
    for name, states in (("SGD", 0), ("Adam", 2), ("Adagrad", 1)):
        found = nnx.plan(nn.Linear(64, 64), torch.zeros(1, 64), strategies=["ddp"], optimizer=name)
        assert found.rows[0].estimate is not None
        kinds = found.rows[0].estimate.phases[-1].kinds
        assert kinds["optimizer"] // kinds["parameters"] == states, name


@pytest.mark.full
def test_bad_input_is_refused() -> None:
    batch = torch.zeros(4, 8)
    with pytest.raises(OptionError, match="memory='80 cats' is not a size"):
        nnx.plan(Stack, batch, memory="80 cats")
    with pytest.raises(OptionError, match="devices=0 is not a positive number"):
        nnx.plan(Stack, batch, devices=0)
    with pytest.raises(OptionError, match="precision='fp8' is unknown"):
        nnx.plan(Stack, batch, precision="fp8")
    with pytest.raises(StrategyNotFoundError, match="fsdp_autos"):
        nnx.plan(Stack, batch, strategies=["fsdp_autos"])
    with pytest.raises(OptionError, match="activation_checkpointing names 'Blok'"):
        nnx.plan(Stack, batch, options={"activation_checkpointing": "Blok"})
    with pytest.raises(OptionError, match="neither example_input_array nor train_dataloader"):
        nnx.plan(Stack)
    decimal = nnx.plan(Stack, batch, memory="80GB", strategies=["ddp"]).world.memory
    assert (decimal, nnx.plan(Stack, batch, memory="80GiB", strategies=["ddp"]).world.memory) == (
        80 * 10**9,
        80 * 2**30,
    )


def run(target: str, **settings: object) -> int:
    chosen = {"batch": None, "arguments": {}, "as_json": False, "script": None, "words": [], **settings}
    return command.run(target, accelerator="cpu", strategies=["ddp"], **chosen)  # type: ignore[arg-type]


@pytest.mark.full
def test_the_command_prints_eighty_columns_and_fails_if_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = f"{__file__}:Stack"
    assert run(here, batch="16x8", arguments={"layers": 6}) == 0
    printed = capsys.readouterr().out
    assert "ddp" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert run(here, batch="16x8", memory="1KiB") == 1
    assert "missing:" in capsys.readouterr().out


def test_the_json_has_the_schema_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{__file__}:Stack", batch="16x8", memory="1GB", as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    shape = schema_of("plan")
    assert set(printed) == set(shape["properties"])
    row = shape["$defs"]["StrategyPlan"]["properties"]
    assert set(printed["strategies"][0]) == set(row)
    estimate = shape["$defs"]["MemoryEstimate"]["properties"]
    assert set(printed["strategies"][0]["estimate"]) == set(estimate)


def test_the_command_refuses_bad_targets_and_batches() -> None:
    for target, message in (
        ("Stack", "names no class"),
        ("no_such_module:Stack", "cannot be imported"),
        (f"{__file__}:Stock", "has no class 'Stock'"),
        ("missing.py:Stack", "there is no file"),
    ):
        with pytest.raises(OptionError, match=message):
            run(target, batch="16x8")
    for batch in ("4x", "0x8", "four", "4,x"):
        with pytest.raises(OptionError, match="is no batch"):
            run(f"{__file__}:Stack", batch=batch)
    with pytest.raises(OptionError, match="cannot be made"):
        run(f"{__file__}:Stack", batch="16x8", arguments={"depth": 3})


@pytest.mark.full
def test_a_script_is_planned_at_its_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "import lightning.pytorch as pl\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_planning import Stack\n"
        "loader = torch.utils.data.DataLoader(torch.zeros(32, 8), batch_size=int(sys.argv[1]))\n"
        "pl.Trainer(logger=False).fit(Stack(), loader)\n"
        "raise SystemError('the script went on')\n"
    )
    assert run("", script=script, words=["8"]) == 0
    printed = capsys.readouterr().out
    assert "batch 8 a device" in printed.replace("\n", " ")
    assert "allocated already" in printed
    script.write_text("pass\n")
    with pytest.raises(OptionError, match=r"ended without `Trainer\.fit`"):
        run("", script=script)


def test_a_plan_leaves_no_hook_on_all_modules() -> None:
    nnx.plan(Stack(), torch.zeros(4, 8), devices=2, strategies=["ddp"])
    left = {name: hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_f")}
    assert len(left) > 3 and not any(left.values())
