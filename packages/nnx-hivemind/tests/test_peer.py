"""One peer: each historical argument, the numbers of one process, bad input, and what a peer leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("nnx_hivemind._hivemind_compat", reason="hivemind is not installed")

import nnx_core
from nnx_core.backend import ParallelContext
from nnx_core.errors import OptionError, PluginError, UnsupportedError
from nnx_core.lightning.routing import route_optimizer_steps
from nnx_hivemind import HivemindOptions
from nnx_hivemind.backend import HivemindBackend
from nnx_hivemind.options import REFUSED
from nnx_hivemind.peer import initialize

starts_processes = pytest.mark.full
BATCH = 8
SELDOM = {"min_refresh_period": 600.0, "default_refresh_period": 600.0, "max_refresh_period": 900.0}
OPTIONS: dict[str, Any] = {
    "target_batch_size": BATCH,
    "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
    # hivemind estimates when the swarm has its samples, and a busy machine would step on too few
    "optimizer_kwargs": {"tracker_opts": SELDOM},
}
DELAYED = {"offload_optimizer": True, "delay_optimizer_step": True, "delay_state_averaging": True}


class Loop:
    """A plain training loop, of a peer or of one process."""

    def __init__(self, backend: HivemindBackend | None, make: Callable[..., Any] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model, self.backend = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)), backend
        self.optimizer = make(self.model.parameters(), lr=0.1)
        if backend is not None:
            backend.setup(ParallelContext(device=torch.device("cpu")))
            backend.parallelize(self.model, lambda: ((), {}))
            backend.setup_optimizers(self.model, [self.optimizer])
            route_optimizer_steps([self.optimizer], backend, self.model)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def train(self, steps: int, *, accumulate: int = 1, clip: float = 0.0) -> list[Tensor]:
        """Step on batches, or of one process on the mean of several; return the weights."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            self.optimizer.zero_grad()
            for _ in range(accumulate):
                batch = torch.randn(BATCH, 8, generator=generator)
                if self.backend is None:
                    (self.loss(batch) / accumulate).backward()
                else:
                    self.optimizer.zero_grad()
                    self.backend.run_step(self.model, self.loss, batch).backward()
                    if clip:
                        self.backend.clip_grad_norm(self.optimizer, clip)
                    self.optimizer.step()
            if self.backend is None:
                if clip:
                    nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
        if self.backend is not None:
            self.backend.unparallelize(self.model)
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def peer() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def new(make: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Loop:
        loops.append(Loop(HivemindBackend(HivemindOptions(**{**OPTIONS, **options})), make))
        return loops[-1]

    yield new
    for loop in loops:
        assert loop.backend is not None
        loop.backend.teardown()


def gamma(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


HISTORICAL: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Any]] = {
    "target_batch_size": ({"target_batch_size": 64}, lambda hive: hive.target_batch_size, 64),
    "run_id": ({"run_id": "mine"}, lambda hive: hive.run_id, "mine"),
    "delay_state_averaging": ({"delay_state_averaging": True}, lambda hive: hive.delay_state_averaging, True),
    "delay_optimizer_step": (DELAYED, lambda hive: hive.delay_optimizer_step, True),
    "delay_grad_averaging": (
        {**DELAYED, "delay_grad_averaging": True},
        lambda hive: hive.delay_grad_averaging,
        True,
    ),
    "offload_optimizer": ({"offload_optimizer": True}, lambda hive: hive.offload_optimizer, True),
    "scheduler_fn": ({"scheduler_fn": gamma}, lambda hive: hive.state_averager.scheduler.gamma, 0.5),
    "matchmaking_time": ({"matchmaking_time": 1.5}, lambda hive: hive.matchmaking_time, 1.5),
    "averaging_timeout": ({"averaging_timeout": 9.0}, lambda hive: hive.averaging_timeout, 9.0),
    "verbose": ({"verbose": True}, lambda hive: hive.status_loglevel, 20),
    "averager_opts": (
        {"averager_opts": {"request_timeout": 0.3}},
        lambda hive: {
            averager.matchmaking_kwargs["request_timeout"]
            for averager in (hive.state_averager, hive.grad_averager)
        },
        {0.3},
    ),
    "optimizer_kwargs": (
        {"optimizer_kwargs": {"average_state_every": 3}},
        lambda hive: hive.average_state_every,
        3,
    ),
}


@starts_processes
@pytest.mark.parametrize("name", HISTORICAL)
def test_each_historical_argument_reaches_hivemind(peer: Callable[..., Loop], name: str) -> None:
    options, read, value = HISTORICAL[name]
    loop = peer(**options)
    loop.train(2)
    assert loop.backend is not None and loop.backend.peer is not None
    assert read(loop.backend.peer.hive) == value


@starts_processes
def test_batch_size_counts_the_samples_of_a_step_and_host_maddrs_is_where_it_listens(
    peer: Callable[..., Loop],
) -> None:
    loop = peer(batch_size=2, target_batch_size=64)
    loop.train(2)
    assert loop.backend is not None and loop.backend.peer is not None
    assert loop.backend.peer.hive.local_progress.samples_accumulated == 4
    assert loop.backend.peer.address.startswith("/ip4/127.0.0.1/tcp/")
    assert f"PL_INITIAL_PEERS={loop.backend.peer.address}" in loop.backend.summary(loop.model)


@starts_processes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload_optimizer": True},
        {"averager_opts": {"request_timeout": 1.0}},
    ],
    ids=str,
)
def test_a_peer_alone_has_the_numbers_of_one_process(
    peer: Callable[..., Loop], options: dict[str, Any]
) -> None:
    wanted = Loop(None).train(4, accumulate=2, clip=0.5)
    found = peer(target_batch_size=2 * BATCH, **options).train(4, accumulate=2, clip=0.5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@starts_processes
def test_a_scheduler_counts_steps_of_the_swarm_and_frozen_weights_stay(peer: Callable[..., Loop]) -> None:
    loop = peer(target_batch_size=2 * BATCH, scheduler_fn=gamma)
    loop.model[0].requires_grad_(False)
    before = loop.model[0].weight.clone()
    loop.train(2, accumulate=2)
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)
    assert torch.equal(loop.model[0].weight, before)
    assert loop.model[0].weight.grad is None


@starts_processes
def test_a_peer_that_joins_takes_over_weights_state_step_and_learning_rate(peer: Callable[..., Loop]) -> None:
    first = peer(scheduler_fn=gamma)
    weights = first.train(3)
    assert first.backend is not None and first.backend.peer is not None
    second = peer(scheduler_fn=gamma, initial_peers=first.backend.peer.address)
    assert second.backend is not None
    assert (first.backend.data_order, second.backend.data_order) == (0, 1)
    nn.init.zeros_(second.model[0].weight)
    second.backend.run_step(second.model, second.loss, torch.ones(1, 8))
    assert second.backend.epoch == 3
    for ours, theirs in zip(second.model.parameters(), weights, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(second.optimizer.state.values(), first.optimizer.state.values(), strict=True):
        assert ours["step"] == theirs["step"] == 3
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


@starts_processes
def test_a_value_written_where_a_copy_steps_is_refused(peer: Callable[..., Loop]) -> None:
    loop = peer(offload_optimizer=True)
    loop.train(1)
    loop.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(UnsupportedError, match="a value of a param group was written"):
        loop.train(1)


@starts_processes
def test_an_error_of_the_optimizer_reaches_the_caller(peer: Callable[..., Loop]) -> None:
    class Fails(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if Fails.broken:
                raise ZeroDivisionError("of the user's optimizer")
            return super().step(closure)

    loop = peer(Fails)
    loop.train(1)
    Fails.broken = True
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        loop.train(1)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_allocated_state_is_that_before_the_first_step(make: Any) -> None:
    first, second = Loop(None, make), Loop(None, make)
    initialize(second.optimizer)
    for ours, theirs in zip(first.train(3), second.train(3), strict=True):
        assert torch.equal(ours, theirs)


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"optimizer_kwargs": {name: True}}, f"optimizer_kwargs has '{name}'") for name in REFUSED),
    ({"optimizer_kwargs": {"lr": 1}}, "optimizer_kwargs has 'lr'"),
    ({"target_batch_size": -1}, "target_batch_size=-1 is not positive"),
    ({"target_batch_size": "8"}, "target_batch_size='8' is of type str"),
    ({"run_id": "a.b"}, "run_id='a.b' is no name"),
    ({"matchmaking_time": 0.0}, "matchmaking_time=0.0 is not positive"),
    ({"reuse_grad_buffers": True}, "divides reused gradients by the number of batches twice"),
    ({"delay_grad_averaging": True}, "needs delay_optimizer_step=True"),
    ({"delay_optimizer_step": True}, "needs offload_optimizer=True and delay_state_averaging=True"),
    (
        {"offload_optimizer": True, "optimizer_kwargs": {"use_local_updates": True}},
        "use_local_updates contradicts",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        HivemindOptions(**{**OPTIONS, **options})


@starts_processes
def test_a_run_that_hivemind_cannot_train_is_refused(peer: Callable[..., Loop]) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(UnsupportedError, match="a peer of hivemind has one device, and this run has 2"):
        HivemindBackend(HivemindOptions(**OPTIONS)).setup(ParallelContext(device=cpu, world_size=2))
    with pytest.raises(UnsupportedError, match="cannot train with precision='16-mixed'"):
        HivemindBackend(HivemindOptions(**OPTIONS)).setup(ParallelContext(device=cpu, precision="16-mixed"))
    with pytest.raises(OptionError, match="needs target_batch_size"):
        HivemindBackend(HivemindOptions()).setup(ParallelContext(device=cpu))
    with pytest.raises(OptionError, match=r"hivemind refuses initial_peers=\['nonsense'\]"):
        HivemindBackend(HivemindOptions(**OPTIONS, initial_peers="nonsense")).setup(
            ParallelContext(device=cpu)
        )
    loop = peer()
    assert loop.backend is not None
    with pytest.raises(UnsupportedError, match="hivemind trains with one optimizer"):
        loop.backend.setup_optimizers(loop.model, [torch.optim.SGD(loop.model.parameters(), lr=1.0)])


SCRIPT = """
import sys, time, torch
from nnx_core.backend import ParallelContext
from nnx_hivemind import HivemindOptions
from nnx_hivemind.backend import HivemindBackend
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
more = {MORE}
backend = HivemindBackend(
    HivemindOptions(target_batch_size=8, host_maddrs=["/ip4/127.0.0.1/tcp/0"], optimizer_kwargs=more)
)
backend.setup(ParallelContext(device=torch.device("cpu")))
backend.setup_optimizers(model, [optimizer])
try:
    backend.run_step(model, model, torch.ones(1, 2))
finally:
    print(time.time(), flush=True)
"""


FABRIC = """
import sys, torch
from lightning.fabric import Fabric
import nnx
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
strategy = nnx.strategy(
    "hivemind", namespace="lightning.fabric", target_batch_size=8, host_maddrs=["/ip4/127.0.0.1/tcp/0"]
)
fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
state = {"model": model, "optimizer": optimizer}
if len(sys.argv) > 2:
    fabric.load(sys.argv[1], state)
for _ in range(3):
    optimizer.zero_grad()
    fabric.backward((model(torch.ones(8, 2)) - 1).square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
fabric.save(sys.argv[1], state)
print("steps of the swarm:", strategy.backend.epoch)
"""


@starts_processes
def test_fabric_trains_saves_and_resumes_and_its_process_ends(tmp_path: Path) -> None:
    script = tmp_path / "fabric_script.py"
    script.write_text(FABRIC)
    for steps, resumes in ((3, []), (6, ["resume"])):
        command = [sys.executable, str(script), str(tmp_path / "fabric.ckpt"), *resumes]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
        assert ended.returncode == 0, ended.stderr
        assert f"steps of the swarm: {steps}" in ended.stdout


@starts_processes
@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ({}, 0, ""),
        (
            {"average_opt_statistics": ["nothing"]},
            1,
            "hivemind refuses an option for SGD: KeyError 'nothing'",
        ),
    ],
    ids=["a loop without an end", "a constructor that fails"],
)
def test_a_process_ends_within_seconds_and_leaves_nothing(
    more: dict[str, Any], code: int, says: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{MORE}", repr(more)))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, error = process.communicate(timeout=240)
        assert (process.returncode, says in error) == (code, True), error
        left = subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True, check=False)
        assert left.stdout == ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@starts_processes
def test_ctrl_c_still_works_while_a_peer_trains(peer: Callable[..., Loop]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    peer().train(1)
    assert signal.getsignal(signal.SIGINT) is handler is not signal.SIG_IGN


def test_each_peer_has_samplers_of_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    strategy = nnx_core.strategy("hivemind", **OPTIONS)
    assert "seed" not in strategy.distributed_sampler_kwargs  # the first peer reads as one process does
    strategy.backend.data_order = 2
    assert strategy.distributed_sampler_kwargs["seed"] == 7


def test_without_hivemind_one_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from nnx_core.names.spec import StrategySpec

    for name in [name for name in sys.modules if name.startswith(("hivemind", "nnx_hivemind"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hivemind", None)
    with pytest.raises(PluginError, match=r"hivemind cannot be imported.*pip install hivemind==1\.1\.12"):
        StrategySpec("hivemind", "nnx_hivemind.backend:HivemindBackend").resolve()
