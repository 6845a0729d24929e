"""``nnx plan``: the trace, the repetition of layers, the table, its advice and bad input."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import nnx
from nnx_core.cli import plan as command
from nnx_core.cli.schema import schema_of
from nnx_core.errors import OptionError, StrategyNotFoundError
from nnx_core.planning.estimate import World
from nnx_core.planning.model import trace_module
from nnx_core.planning.repeat import equal_layers
from nnx_core.planning.replay import Replay


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


class AllLayersSeen(Stack):
    """Its head reads the outputs of all layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        seen = []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return self.last(torch.stack(seen).sum(0))


class DependsOnData(Stack):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[batch.sum(1) > 0]).mean() * float(batch.mean())


def peaks(module: type[nn.Module], *, repeat: bool) -> list[tuple[str, int, int]]:
    trace = trace_module(module, torch.zeros(16, 8), accelerator="cpu", repeat=repeat)
    return [(phase.name, phase.peak, phase.end) for phase in Replay(trace, World(size=1)).run().phases]


def test_repeated_layers_equal_traced_layers() -> None:
    trace = trace_module(Stack, torch.zeros(16, 8), accelerator="cpu")
    assert trace.layers == (("blocks", 9),)
    assert len(trace.parameters) == 4 + 9 * 6
    assert peaks(Stack, repeat=True) == peaks(Stack, repeat=False)


@pytest.mark.parametrize("module", [AllLayersSeen, Stack])
def test_events_of_repeated_layers_name_every_layer(module: type[nn.Module]) -> None:
    repeated = trace_module(module, torch.zeros(16, 8), accelerator="cpu")
    traced = trace_module(module, torch.zeros(16, 8), accelerator="cpu", repeat=False)
    gradients = [sorted(e.name for e in t.events if e.kind.value == "gradient") for t in (repeated, traced)]
    assert gradients[0] == gradients[1]


def test_layers_of_other_settings_are_no_run() -> None:
    layers = nn.ModuleList(nn.Dropout(0.1 * at) for at in range(9))
    assert equal_layers(layers) == []
    assert [run.count for run in equal_layers(nn.ModuleList(nn.Linear(2, 2) for _ in range(6)))] == [6]


def test_the_trace_counts_what_the_memory_tracker_of_torch_counts() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    from nnx_core.planning.record import Recorder
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


def test_the_advice_is_the_smaller_batch_and_the_plan_with_it_fits() -> None:
    row = nnx.plan(Stack, torch.zeros(512, 8), memory="5MB", accelerator="cpu", strategies=["ddp"])["ddp"]
    assert row.fits == "no"
    assert row.cure.startswith(f"batch {row.largest_batch} a device, with accumulate_grad_batches=")
    smaller = torch.zeros(row.largest_batch or 0, 8)
    assert nnx.plan(Stack, smaller, memory="5MB", accelerator="cpu", strategies=["ddp"])["ddp"].fits != "no"


def test_optimizers_whose_state_is_lazy_or_per_parameter_are_counted() -> None:
    for name, states in (("SGD", 0), ("Adam", 2), ("Adagrad", 1)):
        found = nnx.plan(nn.Linear(64, 64), torch.zeros(1, 64), strategies=["ddp"], optimizer=name)
        assert found.rows[0].estimate is not None
        kinds = found.rows[0].estimate.phases[-1].kinds
        assert kinds["optimizer"] // kinds["parameters"] == states, name


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
