"""`Peer`: this process in a swarm, with its node of the DHT and hivemind's optimizer around the user's."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin one from Python 3.11 on
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core._torch_compat import shadow_of
from nnx_core.errors import OptionError, RankLostError, UnsupportedError
from nnx_hivemind._hivemind_compat import (
    DHT,
    GradientAverager,
    SwarmOptimizer,
    get_dht_time,
    show_events,
    starting,
)
from nnx_hivemind.options import PEERS, HivemindOptions

__all__ = ["Peer"]

log = logging.getLogger("nnx.hivemind")
_RECORDS = "nnx_hivemind"
"""The key in the DHT under which each peer has a record of its run."""
_SECONDS_OF_RECORD = 3600.0
_SECONDS_TO_MEET = 15.0
_LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic")


class Peer:
    """One peer of a swarm.

    Attributes:
        address: The addresses of this peer, separated by commas.
        order: The number of this peer: the smallest that no other peer of the run had when it came.
        hive: Hivemind's optimizer; None outside of `join` and `leave`.
        clip: A function that clips the swarm's gradients before its step; None without one.
        averaged_with: The number of peers in the last average of gradients, this one included.
        is_stepping: True while hivemind may step the user's optimizer, in a thread of its own.

    Args:
        options: The options of the strategy.

    Raises:
        OptionError: An address or another argument of the DHT is not valid.
        RankLostError: No peer answers.
    """

    def __init__(self, options: HivemindOptions) -> None:
        self._options = options
        self.hive: SwarmOptimizer | None = None
        self.clip: Callable[[list[Tensor]], object] | None = None
        self.averaged_with = 1
        self._epoch = 0
        self.is_stepping = False
        self._error: BaseException | None = None
        show_events(options.verbose)
        self._dht = _start_node(options)
        found = [str(each) for each in self._dht.get_visible_maddrs()]
        self.address = ",".join([each for each in found if "/127.0.0.1/" not in each] or found)
        taken = {each["order"] for each in self._others() if each["run_id"] == options.run_id}
        self.order = min(set(range(len(taken) + 1)) - taken)
        self._record: dict[str, Any] = {"run_id": options.run_id, "order": self.order}
        self._publish()

    @property
    def epoch(self) -> int:
        """The steps of the swarm; set before `join` if the run resumes."""
        return self._epoch if self.hive is None else int(self.hive.local_epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    @property
    def peers(self) -> int:
        """The number of peers that report progress, at least 1."""
        return 1 if self.hive is None else max(1, int(self.hive.tracker.global_progress.num_peers))

    # Other peers

    def introduce(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Publish what this peer trains.

        Raises:
            UnsupportedError: A peer trains something else, or the peers train other runs.
        """
        options, layout = self._options, [(name, tuple(p.shape)) for name, p in module.named_parameters()]
        facts = {
            "model": f"{type(module).__name__}, {blake2b(str(layout).encode(), digest_size=4).hexdigest()}",
            "optimizer": f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups",
            "target_batch_size": options.target_batch_size,
            "scheduler_fn": options.scheduler_fn is not None,
            "use_local_updates": options.use_local_updates,
        }
        for other in self._of_run():
            for name, value in facts.items():
                if other[name] != value:
                    raise UnsupportedError(
                        f"this peer has {name}={value!r}, and a peer of run {options.run_id!r} has "
                        f"{other[name]!r}.",
                        remedy="Start all peers of a run with one script, or pass another run_id.",
                    )
        self._record.update(facts)
        self._publish()

    def _of_run(self) -> list[dict[str, Any]]:
        """Wait for a peer of the run that has introduced itself, if there are peers; return all of them."""
        run, deadline = self._options.run_id, time.monotonic() + _SECONDS_TO_MEET
        while True:
            others = self._others()
            known = [each for each in others if each["run_id"] == run and "model" in each]
            if known or not self._options.peers:
                return known
            if time.monotonic() > deadline:
                runs = ", ".join(sorted({repr(each["run_id"]) for each in others})) or "nothing"
                raise UnsupportedError(
                    f"no peer trains run_id={run!r}: the peers of {PEERS} or initial_peers train {runs}.",
                    remedy="Pass the run_id of the other peers; start the first peer without addresses.",
                )
            time.sleep(0.5)

    def _others(self) -> list[dict[str, Any]]:
        found = self._dht.get(_RECORDS, latest=True)
        records = found.value if found is not None else {}
        return [each.value for key, each in records.items() if each.value and key != str(self._dht.peer_id)]

    def _publish(self, *, ends: bool = False) -> None:
        """Publish or withdraw the record of this peer; it has to be repeated within its time."""
        self._published = get_dht_time()
        stored = self._dht.store(
            _RECORDS,
            subkey=str(self._dht.peer_id),
            value=None if ends else self._record,
            expiration_time=self._published + _SECONDS_OF_RECORD,
            return_future=True,
        )
        with suppress(FutureTimeoutError):  # some of the nodes that should store it may be gone
            stored.result(timeout=1.0 if ends else 10.0)

    # Joining

    def join(self, optimizer: Optimizer) -> None:
        """Start hivemind's optimizer around the user's, and take over the state of the swarm.

        Raises:
            OptionError: Hivemind refuses an option.
        """
        options = self._options
        initialize(optimizer)
        self._own = self._inner = optimizer
        self._shown = _settings(optimizer)
        opts = {"request_timeout": min(3.0, options.matchmaking_time / 3), **(options.averager_opts or {})}
        names = (
            *("target_batch_size", "run_id", "matchmaking_time", "averaging_timeout"),
            *("delay_state_averaging", "delay_optimizer_step", "delay_grad_averaging", "verbose"),
        )
        try:
            with starting():
                self.hive = SwarmOptimizer(
                    after_load=self._after_load,
                    dht=self._dht,
                    params=optimizer.param_groups,
                    optimizer=self._make_inner,
                    scheduler=options.scheduler_fn and partial(self._make_scheduler, epoch=self._epoch),
                    offload_optimizer=bool(options.offload_optimizer),
                    averager_opts={"initialize_optimizer": False, **opts},
                    grad_averager_factory=None
                    if options.use_local_updates
                    else partial(GradientAverager, **opts),
                    **{name: getattr(options, name) for name in names},
                    **options.optimizer_kwargs,
                )
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise OptionError(
                f"hivemind refuses an option for {type(optimizer).__name__}: {type(error).__name__} {error}.",
                remedy="Correct averager_opts or optimizer_kwargs.",
            ) from error
        if self._epoch:
            self.hive.state_averager.local_epoch = self._epoch
            with self.hive.tracker.pause_updates():
                self.hive.tracker.update_epoch(self._epoch)
        if self.peers > 1 or options.peers:
            self.hive.load_state_from_peers()
        log.info("hivemind: peer %d joined at step %d of the swarm", self.order, self.epoch)

    def _make_inner(self, groups: Any) -> Optimizer:
        """Return the user's optimizer, or its copy on the host tensors that hivemind passes to offload."""
        if not self._options.offload_optimizer:
            return self._own
        groups = [{**group, "params": list(group["params"])} for group in groups]
        state = {
            host: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in entries.items()}
            for own, host in zip(_parameters(self._own.param_groups), _parameters(groups), strict=True)
            if (entries := self._own.state.get(own))
        }
        self._inner = inner = shadow_of(self._own, groups, state)
        step = inner.step
        inner.step = lambda *args, **kwargs: self.run_inner(partial(step, *args, **kwargs))  # type: ignore[method-assign]
        return inner

    def _make_scheduler(self, inner: Optimizer, *, epoch: int) -> Any:
        """Return the user's scheduler after so many steps of the swarm."""
        assert self._options.scheduler_fn is not None
        for group in inner.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects a step of the optimizer before each of these
            scheduler = self._options.scheduler_fn(inner)
            for _ in range(epoch):
                scheduler.step()
        return scheduler

    def _after_load(self, hive: SwarmOptimizer) -> None:
        """Make the scheduler again, because hivemind decays a downloaded learning rate twice."""
        if self._options.scheduler_fn is not None:
            averager = hive.state_averager
            averager.scheduler = self._make_scheduler(averager.optimizer, epoch=hive.local_epoch)

    # A step

    def step(self, samples: int) -> None:
        """Add this peer's gradients to the swarm's; the swarm steps once it has enough samples."""
        hive, before = self.hive, self.epoch
        assert hive is not None
        if self._inner is not self._own and self._shown != _settings(self._own):
            raise UnsupportedError(
                "a value of a param group was written, and under offload_optimizer=True a copy steps.",
                remedy="Pass scheduler_fn to change the learning rate, or leave offload_optimizer out.",
            )
        self.is_stepping = True
        try:
            hive.step(batch_size=samples)
        finally:
            self.is_stepping = False
            for parameter in _parameters(self._own.param_groups):
                if not parameter.requires_grad:
                    parameter.grad = None  # hivemind makes one of zeros
        error, self._error = self._error, None
        if error is not None:
            raise error
        if hive.local_epoch != before:
            self._note_average(hive)
        if get_dht_time() > self._published + _SECONDS_OF_RECORD / 2:
            self._publish()

    def run_inner(self, step: Callable[[], Any]) -> Any:
        """Step on the swarm's gradients; `step` raises an error of it, which hivemind only logs."""
        try:
            with self._gradients():
                return step()
        except BaseException as error:
            self._error = error
            raise

    @contextmanager
    def _gradients(self) -> Iterator[None]:
        """Give the optimizer the swarm's gradients, clipped, and none to frozen parameters."""
        assert self.hive is not None
        inner = list(_parameters(self._inner.param_groups))
        if self._inner is self._own and self.hive.grad_averager is not None:
            with self.hive.grad_averager.get_tensors() as means:  # a peer alone may have its last batch's
                for parameter, mean in zip(inner, means, strict=True):
                    parameter.grad = mean.to(parameter.device, copy=True)
        pairs = zip(_parameters(self._own.param_groups), inner, strict=True)
        frozen = [(parameter, parameter.grad) for own, parameter in pairs if not own.requires_grad]
        for parameter, _ in frozen:
            parameter.grad = None
        if self.clip is not None:
            self.clip(inner)
        yield
        for parameter, gradient in frozen:
            parameter.grad = gradient

    def _note_average(self, hive: SwarmOptimizer) -> None:
        """Count the peers of the last average, and warn if it failed."""
        self.averaged_with, control = 1, hive.scheduled_grads
        with suppress(BaseException):  # it failed, was cancelled, or goes on
            self.averaged_with = len(control.result(timeout=0)) if control is not None else 1
        failed = control is not None and control.done() and self.averaged_with == 1
        if failed and self.peers > 1 and not self._options.delay_grad_averaging:
            log.warning("hivemind: step %d without gradients: the peers formed no group", hive.local_epoch)

    def settle(self) -> None:
        """Wait for steps and averages in the background, and show their results in the user's optimizer."""
        if self.hive is None:
            return
        self.hive.state_averager.step(wait_for_delayed_updates=True)
        if self._inner is not self._own:
            for own, inner in zip(self._own.param_groups, self._inner.param_groups, strict=True):
                own.update({name: value for name, value in inner.items() if name != "params"})
                for parameter, host in zip(own["params"], inner["params"], strict=True):
                    self._own.state[parameter] = self._inner.state.get(host, {})
            self._shown = _settings(self._own)

    # Leaving

    def leave(self) -> None:
        """Leave the run, and stay a node of the DHT."""
        hive, self._epoch, self.hive = self.hive, self.epoch, None
        if hive is not None:
            hive.shutdown()

    def close(self) -> None:
        """Leave the run and the DHT."""
        self.leave()
        if self._dht.is_alive():
            self._publish(ends=True)
            self._dht.shutdown()


def _start_node(options: HivemindOptions) -> Any:
    """Start a node of the DHT in a process of its own."""
    listen, peers = list(options.host_maddrs or _LISTEN), options.peers
    try:
        with starting():
            return DHT(start=True, initial_peers=peers or None, host_maddrs=listen, **options.dht_kwargs)
    except Exception as error:
        if isinstance(error, (TypeError, ValueError)) or "multiaddr" in str(error):  # p2pd parses them
            raise OptionError(
                f"hivemind refuses initial_peers={peers}, host_maddrs={listen} or dht_kwargs: {error}.",
                remedy="Pass addresses as a peer logs them: /ip4/10.0.0.1/tcp/4000/p2p/12D3...",
            ) from error
        raise RankLostError(
            f"no peer of initial_peers={peers} answers: {type(error).__name__}: {error}.",
            remedy="Check that one of them runs and can be reached; each start of a peer has a new address.",
        ) from error


def _parameters(groups: Any) -> Iterator[Any]:
    for group in groups:
        yield from group["params"]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the values of param groups, without parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


@torch.no_grad()
def initialize(optimizer: Optimizer) -> None:
    """Allocate an optimizer's state as before its first step, because peers download all of it.

    It steps a copy without hooks on weights and gradients of zero, which leave zeros in sums and averages.
    """
    if optimizer.state:
        return
    trained = [each for each in _parameters(optimizer.param_groups) if each.requires_grad]
    before = [(parameter.detach().clone(), parameter.grad) for parameter in trained]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter.zero_())
    shadow = shadow_of(optimizer, optimizer.param_groups)
    try:
        shadow.step()
    finally:
        for parameter, (weight, gradient) in zip(trained, before, strict=True):
            parameter.copy_(weight)
            parameter.grad = gradient
    for entries in shadow.state.values():
        if "step" in entries:
            entries["step"] *= 0
    optimizer.state.update(shadow.state)
