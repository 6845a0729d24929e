"""Jobs that train with Fabric: hand-written loops over the same model and data as the Trainer jobs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import nnx
import nnx_checkpoint as storage
from nnx_conformance import Subject
from nnx_conformance import training as conformance
from nnx_fsdp.backend import FSDPBackend
from nnx_test_helpers.lightning_jobs import OPTIONS, collectives, full
from nnx_test_helpers.resume_jobs import Seen
from nnx_test_helpers.training import GLOBAL_BATCH, Block, Net, Run, dataset, digest_of, loader, make_trainer


def fabric_for(devices: int, precision: str = "32-true") -> Fabric:
    """Fabric on our strategy, or on one plain process for the comparison."""
    strategy: Any = "auto"
    if devices > 1:
        strategy = nnx.strategy("fsdp_auto", namespace="lightning.fabric", **OPTIONS)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices, precision=precision)
    fabric.launch()
    return fabric


def batch(fabric: Fabric, step: int, size: int = GLOBAL_BATCH) -> tuple[Tensor, Tensor]:
    """This rank's share of a global batch."""
    share = size // fabric.world_size
    start = step * GLOBAL_BATCH + fabric.global_rank * share
    inputs, targets = dataset().tensors
    return inputs[start : start + share], targets[start : start + share]


def model_and_optimizer(kind: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    """The model of the Trainer jobs, and an optimizer as its `configure_optimizers` makes it."""
    module = Net(Run(optimizer=kind))
    return module, module.configure_optimizers()


def loss_of(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(model(data[0]), data[1])


def step(fabric: Fabric, model: Any, optimizer: Any, index: int) -> float:
    """One step; returns the loss over all ranks."""
    loss = loss_of(model, batch(fabric, index))
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return mean(fabric, loss)


def mean(fabric: Fabric, value: Tensor) -> float:
    """The mean over the ranks."""
    return float(fabric.all_reduce(value.detach().double(), reduce_op="mean"))


# --- training loops -----------------------------------------------------------------------------------


def setup_together(devices: int) -> dict[str, Any]:
    """``setup(model, optimizer)`` with an optimizer and a scheduler built before."""
    fabric = fabric_for(devices)
    module, raw = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(raw, 2, 0.5)
    model, optimizer = fabric.setup(module, raw)
    losses = []
    for index in range(5):
        losses.append(step(fabric, model, optimizer, index))
        schedule.step()
    held = {id(p) for group in raw.param_groups for p in group["params"]}
    return {
        "losses": losses,
        "sharded": sum(isinstance(p, DTensor) for p in model.parameters()),
        "holds": held == {id(p) for p in module.parameters() if p.requires_grad},
        "names": list(model.state_dict()) == list(Net(Run()).state_dict()),
        "lr": raw.param_groups[0]["lr"],
    }


def setup_apart(devices: int) -> list[float]:
    """``setup_module``, then an optimizer over its parameters, then ``setup_optimizers``."""
    fabric = fabric_for(devices)
    module = Net(Run())
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(module.configure_optimizers())
    return [step(fabric, model, optimizer, index) for index in range(5)]


def accumulate(devices: int) -> dict[str, Any]:
    """Two micro batches a step without synchronisation after the first; clipping by norm and by value."""
    fabric = fabric_for(devices)
    module, raw = model_and_optimizer()
    model, optimizer = fabric.setup(module, raw)
    norms, losses = [], []
    for index in range(6):
        is_last = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = loss_of(model, batch(fabric, index))
            fabric.backward(loss / 2)
        losses.append(mean(fabric, loss))
        if is_last and index < 4:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
            clipped = fabric.clip_gradients(model, optimizer, max_norm=1e9, norm_type=2.0)
            norms.append(float(clipped))
        if is_last and index >= 4:
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
            largest = max(float(full(p.grad).abs().max()) for p in module.parameters() if p.grad is not None)
            norms.append(largest)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


class Generator(nn.Module):
    """Turns noise into samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(6) for _ in range(2)])

    def forward(self, noise: Tensor) -> Tensor:
        return self.blocks(noise)


class Critic(nn.Module):
    """Tells samples from data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(6) for _ in range(2)])
        self.out = nn.Linear(6, 1)

    def forward(self, sample: Tensor) -> Tensor:
        return self.out(self.blocks(sample)).mean()


def adversarial(devices: int, path: str, resume: bool, steps: int = 2) -> dict[str, Any]:
    """Train two models with an optimizer each, in turn; save, or resume from a checkpoint."""
    fabric = fabric_for(devices)
    torch.manual_seed(5)
    parts: dict[str, Any] = {"generator": Generator(), "critic": Critic()}
    state: dict[str, Any] = {"step": 0}
    for name, part in parts.items():
        optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
        state[name], state[f"{name} optimizer"] = fabric.setup(part, optimizer)
    sharded = {name: all(isinstance(p, DTensor) for p in part.parameters()) for name, part in parts.items()}
    if resume:
        fabric.load(path, state)
    losses = []
    for _ in range(steps):
        noise, real = batch(fabric, state["step"])
        fake = state["generator"](noise)
        critic_loss = state["critic"](fake.detach()) - state["critic"](real)
        fabric.backward(critic_loss)
        state["critic optimizer"].step()
        state["critic optimizer"].zero_grad()
        generator_loss = -state["critic"](fake)
        fabric.backward(generator_loss)
        state["generator optimizer"].step()
        state["generator optimizer"].zero_grad()
        state["critic optimizer"].zero_grad()
        losses += [mean(fabric, critic_loss), mean(fabric, generator_loss)]
        state["step"] += 1
    if not resume:
        fabric.save(path, state)
    return {"losses": losses, "sharded": sharded, "step": state["step"]}


class Steps(Net):
    """A LightningModule whose steps Fabric calls directly, and another method besides."""

    def training_step(self, data: tuple[Tensor, Tensor], index: int = 0) -> Tensor:
        return F.mse_loss(self(data[0]), data[1])

    def energy(self, x: Tensor, *, scale: float) -> Tensor:
        return scale * self.head(self.blocks[0](self.embed(x))).square().mean()


def call_methods(devices: int) -> dict[str, Any]:
    """``training_step`` and a marked method run through the engine and give gradients."""
    fabric = fabric_for(devices)
    module = Steps(Run())
    optimizer = module.configure_optimizers()
    model, optimizer = fabric.setup(module, optimizer)
    model.mark_forward_method("energy")
    losses = []
    for index in range(3):
        data = batch(fabric, index)
        loss = model.training_step(data, index) + model.energy(data[0], scale=0.5)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(fabric, loss))
    with torch.no_grad():
        losses.append(mean(fabric, model.energy(batch(fabric, 3)[0], scale=2.0)))
    return {"losses": losses}


def build_empty(devices: int) -> dict[str, Any]:
    """A model made on the meta device gets equal, real weights on every rank."""
    fabric = fabric_for(devices)
    with fabric.init_module(empty_init=True):
        module = nn.Sequential(*[Block(10) for _ in range(2)], nn.Linear(10, 6))
    on_meta = {p.device.type for p in module.parameters()}
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    weights = {name: full(p) for name, p in model.named_parameters()}
    inputs = batch(fabric, 0)[0].repeat(1, 2)[:, :10]
    before = loss_of(model, (inputs, inputs[:, :6]))
    fabric.backward(before)
    optimizer.step()
    after = loss_of(model, (inputs, inputs[:, :6]))
    with fabric.init_module(empty_init=False):
        real = {p.device.type for p in nn.Linear(2, 2).parameters()}
    return {
        "meta": on_meta,
        "real": real,
        "digest": digest_of(weights),
        "norms": {name: float(w.norm()) for name, w in weights.items() if name.endswith("up.weight")},
        "improves": mean(fabric, after) < mean(fabric, before),
    }


def call_fabric_collectives() -> dict[str, Any]:
    """The same checks as of Trainer's strategy, through Fabric."""
    fabric = fabric_for(3)
    results = collectives(fabric.strategy, fabric.strategy.all_reduce)
    me = fabric.global_rank
    results["fabric gather"] = fabric.all_gather({"x": torch.tensor([me])})["x"].flatten().tolist()
    results["fabric broadcast"] = fabric.broadcast([me], src=2)
    results["fabric reduce"] = fabric.all_reduce(torch.tensor(float(me))).item()
    return results


# --- checkpoints --------------------------------------------------------------------------------------


def exact(module: nn.Module, optimizer: Any) -> tuple[str, str]:
    """Hashes of the complete weights and optimizer state, by name."""
    names = {p: name for name, p in module.named_parameters()}
    state = {
        f"{names[p]}.{key}": full(value)
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    weights = {name: full(value) for name, value in module.state_dict().items()}
    return digest_of(weights), digest_of(state)


def save(devices: int, path: str, steps: int = 3, gamma: float = 0.5) -> Seen:
    """Train and save with user objects beside the model."""
    fabric = fabric_for(devices)
    module, raw = model_and_optimizer()
    model, optimizer = fabric.setup(module, raw)
    schedule = torch.optim.lr_scheduler.StepLR(raw, 2, gamma)
    losses = []
    for index in range(steps):
        losses.append(step(fabric, model, optimizer, index))
        schedule.step()
    fabric.save(
        path,
        {
            "net": model,
            "opt": optimizer,
            "schedule": schedule,
            "step": steps,
            "config": {"name": "x", "sizes": (1, 2), "table": torch.arange(3)},
        },
    )
    return Seen(*exact(module, raw), losses)


def load(devices: int, path: str, steps: int = 3) -> tuple[Seen, dict[str, Any]]:
    """Resume, and report the user objects and the remaining entries."""
    fabric = fabric_for(devices)
    module, raw = model_and_optimizer()
    model, optimizer = fabric.setup(module, raw)
    schedule = torch.optim.lr_scheduler.StepLR(raw, 2, 0.5)
    state: dict[str, Any] = {"net": model, "opt": optimizer, "schedule": schedule, "step": 0}
    rest = fabric.load(path, state)
    seen = Seen(*exact(module, raw), [])
    for index in range(state["step"], state["step"] + steps):
        seen.losses.append(step(fabric, model, optimizer, index))
        schedule.step()
    return seen, {"step": state["step"], "rest": sorted(rest), "config": rest.get("config")}


def load_trainers(devices: int, path: str) -> Seen:
    """Resume a Trainer's checkpoint in Fabric: one module, one optimizer."""
    fabric = fabric_for(devices)
    module, raw = model_and_optimizer()
    model, optimizer = fabric.setup(module, raw)
    rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    seen = Seen(*exact(module, raw), [])
    seen.losses += [step(fabric, model, optimizer, index) for index in range(rest["global_step"], 6)]
    return seen


class Ahead(Net):
    """Starts in the middle of the data, because Fabric's checkpoints do not say where they are."""

    def train_dataloader(self) -> Any:
        return loader(self.trainer, skip=3)


def resume_in_trainer(run: Run, path: str) -> list[float]:
    """Resume a checkpoint of Fabric's: weights and optimizer."""
    module = Ahead(run)
    make_trainer(run).fit(module, ckpt_path=path)
    return module.losses


def filter_and_raw(devices: int, path: str, raw_path: str) -> dict[str, Any]:
    """``filter``, ``strict``, and ``load_raw`` into a module and an optimizer."""
    fabric = fabric_for(devices)
    module, raw = model_and_optimizer()
    model, optimizer = fabric.setup(module, raw)
    step(fabric, model, optimizer, 0)
    fabric.save(path, {"net": model}, filter={"net": lambda name, value: not name.startswith("frozen")})
    report: dict[str, Any] = {"names": sorted(storage.open_checkpoint(path).tensors)}
    for key, strict in (("all of it", True), ("without the frozen layer", False)):
        fresh = fabric.setup_module(Net(Run()))
        try:
            fabric.load(path, {"net": fresh}, strict=strict)
            report[key] = torch.equal(full(fresh.embed.weight), full(model.embed.weight))
        except nnx.CheckpointError as error:
            report[key] = str(error)
    for strict in (True, False):
        try:
            fabric.load(path, {"net": fabric.setup_module(Net(Run())), "other": 1}, strict=strict)
            report[f"key {strict}"] = "loaded"
        except nnx.CheckpointError as error:
            report[f"key {strict}"] = str(error)
    try:
        fabric.load(path, {"critic": fabric.setup_module(Net(Run()))})
    except nnx.CheckpointError as error:
        report["another model's key"] = str(error)
    if fabric.global_rank == 0:
        torch.save(Net(Run(optimizer="sgd")).state_dict(), raw_path)
    fabric.barrier()
    fabric.load_raw(raw_path, model)
    report["raw"] = torch.equal(full(model.embed.weight), Net(Run()).embed.weight)
    return report


class Witness(FSDPBackend):
    """Remembers for which module each backward was."""

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.seen = [*getattr(self, "seen", []), module]
        super().backward(module, loss, *args, **kwargs)


def modules_of_backward(devices: int) -> list[list[int]]:
    """Return the modules in each backward of the engine: with one set up, with both, and with one named."""
    nnx.StrategyRegistry.register("witness", Witness, override=True)
    fabric = Fabric(strategy="witness", accelerator="cpu", devices=devices)
    fabric.launch()
    modules = [nn.Linear(4, 3), nn.Linear(4, 3)]
    x = torch.ones(2, 4)
    first = fabric.setup_module(modules[0])
    fabric.backward(first(x).sum())
    second = fabric.setup_module(modules[1])
    fabric.backward(first(x).sum() + second(x).sum())
    fabric.backward(second(x).sum(), model=second)
    nnx.StrategyRegistry.remove("witness")
    seen = fabric.strategy.backend.seen
    return [[i for i, module in enumerate(modules) if module in tuple(one.modules())] for one in seen]


def resume_flat_masters(subject: Subject, loop: conformance.Loop, path: str) -> conformance.Seen:
    """The conformance suite's interrupted loop."""
    subject.prepare()
    return conformance.interrupted(subject, loop, path)
