"""The options, under the names of lightning-hivemind. This module imports neither torch nor hivemind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from nnx_core.errors import OptionError
from nnx_core.options import check_options, option

__all__ = ["PEERS", "HivemindOptions"]

PEERS = "PL_INITIAL_PEERS"
"""The variable with the addresses of peers, as lightning-hivemind named it."""
FURTHER = (
    *("allreduce_timeout", "next_chunk_timeout", "load_state_timeout", "shutdown_timeout", "tracker_opts"),
    *("average_state_every", "use_local_updates", "average_opt_statistics", "performance_ema_alpha"),
    *("grad_compression", "state_averaging_compression", "load_state_compression"),
)
"""The arguments of hivemind.Optimizer that `optimizer_kwargs` takes."""
REFUSED = {
    "auxiliary": ("an auxiliary peer takes no step", "Leave it out; a peer may train on its CPU."),
    "client_mode": ("it is a property of the node", "Pass dht_kwargs={'client_mode': True}."),
    "extra_tensors": (
        "hivemind would average counters in buffers as floats",
        "Leave it out: each peer keeps its own buffers, and a checkpoint has those of the peer that saves.",
    ),
    "grad_averager_factory": (
        "this strategy clips and steps on the gradients of hivemind's own averager",
        "Leave it out; compress gradients with grad_compression.",
    ),
}
"""Other arguments of hivemind.Optimizer, with the reason and the remedy."""
_NUMBER = (int, float)


@dataclass(frozen=True, kw_only=True)
class HivemindOptions:
    """Options of a peer. Peers of one run need the same target_batch_size, optimizer and scheduler."""

    target_batch_size: int = option(
        0, help="The samples of all peers after which all peers step. It is required.", types=(int,)
    )
    run_id: str = option(
        "lightning_run", help="The name of the run; peers of one name train together.", types=(str,)
    )
    batch_size: int | None = option(
        None,
        help="The samples of this peer between two of its optimizer steps; by default counted in each batch.",
        types=(int,),
    )
    initial_peers: str | list[str] | None = option(
        None,
        help="Addresses of peers of the run, as a list or separated by commas; by default the variable "
        "PL_INITIAL_PEERS. The first peer has none.",
        types=(str, list, tuple),
    )
    host_maddrs: list[str] | None = option(
        None,
        help="Addresses to listen at; by default '/ip4/0.0.0.0/tcp/0' and '/ip4/0.0.0.0/udp/0/quic'.",
        types=(list, tuple),
    )
    dht_kwargs: dict[str, Any] = option(
        {}, help="Further arguments of hivemind.DHT, such as client_mode or use_relay.", types=(dict,)
    )
    matchmaking_time: float = option(5.0, help="Seconds to wait for peers before an average.", types=_NUMBER)
    averaging_timeout: float = option(
        30.0,
        help="Seconds after which an average is given up; the peer's samples of that step are then lost.",
        types=_NUMBER,
    )
    delay_state_averaging: bool = option(
        False, help="Average weights in the background while the peer trains on.", types=(bool,)
    )
    offload_optimizer: bool | None = option(
        None, help="Keep the optimizer and a float32 copy of the weights in host memory.", types=(bool,)
    )
    delay_optimizer_step: bool | None = option(
        None,
        help="Step in the background too; it needs offload_optimizer and delay_state_averaging.",
        types=(bool,),
    )
    delay_grad_averaging: bool = option(
        False, help="Average gradients in the background too; it needs delay_optimizer_step.", types=(bool,)
    )
    reuse_grad_buffers: bool = option(
        False, help="Refused: hivemind divides reused gradients twice while a peer is alone.", types=(bool,)
    )
    scheduler_fn: Callable[[Any], Any] | None = option(
        None, help="A function that returns the scheduler of an optimizer; it counts steps of the swarm."
    )
    averager_opts: dict[str, Any] | None = option(
        None, help="Further arguments of both averagers, such as request_timeout.", types=(dict,)
    )
    optimizer_kwargs: dict[str, Any] = option(
        {},
        help="Further arguments of hivemind.Optimizer, such as average_state_every or grad_compression.",
        types=(dict,),
    )
    verbose: bool = option(False, help="Log the events inside hivemind.", types=(bool,))

    def __post_init__(self) -> None:
        check_options(self)
        for item in fields(self):
            value, types = getattr(self, item.name), item.metadata["types"]
            if value is not None and int in types and value <= 0 and value is not item.default:
                raise OptionError(f"{item.name}={value!r} is not positive.", remedy="Pass, say, 8.")
        if not self.run_id or "." in self.run_id:
            raise OptionError(
                f"run_id={self.run_id!r} is no name of a run.", remedy="Pass a name without a dot."
            )
        _check_further(self.optimizer_kwargs)
        self._refuse_without("delay_grad_averaging", "delay_optimizer_step")
        self._refuse_without("delay_optimizer_step", "offload_optimizer", "delay_state_averaging")
        if self.reuse_grad_buffers:
            raise OptionError(
                "reuse_grad_buffers=True is not supported: hivemind 1.1.12 divides reused gradients by the "
                "number of batches twice while a peer is alone.",
                remedy="Leave it out: gradients are then added up in a buffer of their size.",
            )
        if self.use_local_updates and self.offload_optimizer:
            raise OptionError(
                "use_local_updates contradicts offload_optimizer=True.", remedy="Leave one of them out."
            )

    def _refuse_without(self, name: str, *needed: str) -> None:
        missing = [f"{other}=True" for other in needed if not getattr(self, other)]
        if getattr(self, name) and missing:
            raise OptionError(
                f"{name}=True needs {' and '.join(missing)}.", remedy=f"Pass them too, or leave {name} out."
            )

    @property
    def use_local_updates(self) -> bool:
        """True if peers step on their own gradients, and average weights only."""
        return bool(self.optimizer_kwargs.get("use_local_updates"))

    @property
    def peers(self) -> list[str]:
        """The addresses of the peers to join; empty for the first peer."""
        given = self.initial_peers or os.environ.get(PEERS, "")
        listed = given.split(",") if isinstance(given, str) else given
        return [peer.strip() for peer in listed if peer.strip()]


def _check_further(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name not in FURTHER:
            reason, remedy = REFUSED.get(
                name, ("hivemind.Optimizer has no such argument, or it is an option", f"Use {FURTHER}.")
            )
            raise OptionError(f"optimizer_kwargs has {name!r}: {reason}.", remedy=remedy)
