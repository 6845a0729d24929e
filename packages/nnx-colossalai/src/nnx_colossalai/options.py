"""Define the options of the colossalai strategies, without torch, so that `nnx show` is fast.

The first block has the arguments of lightning-colossalai's ColossalAIStrategy. Some have no effect there;
here they work as its documentation says, or raise an error with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from nnx_core.errors import OptionError
from nnx_core.options import bytes_of, check_options, option

if TYPE_CHECKING:
    from torch import nn

    from nnx_colossalai.device import Device

    LayerClasses = type[nn.Module] | str | Iterable[type[nn.Module] | str]


POLICIES = ("auto", "cuda", "cpu")
_TIERS = ("gathered", "sharded", "offloaded", "streamed")
_GRIDS = 4096
_NUMBER = (int, float)


@dataclass(frozen=True, kw_only=True)
class ColossalAIOptions:
    """The options that set the chunks of a model, their tiers, and their optimizer steps."""

    use_chunk: bool = option(
        True, help="Only True: all parameters are held in chunks, one for each layer.", types=(bool,)
    )
    chunk_size: int | None = option(
        None,
        help="Largest chunk, in elements; larger layers are split into their submodules, if they have any. "
        "By default a chunk is a layer.",
        types=(int,),
    )
    enable_distributed_storage: bool = option(
        True,
        help="False keeps the gathered weights of every layer on each rank from its forward to its backward: "
        "faster, more memory.",
        types=(bool,),
    )
    placement_policy: str = option(
        "auto",
        help="'auto' chooses the tiers with the fastest step within the memory limits; 'cuda' keeps all "
        "on the device, 'cpu' all in host memory; or one tier for all chunks: 'gathered', 'sharded', "
        "'offloaded', 'streamed'.",
        types=(str,),
    )
    force_outputs_fp32: bool = option(
        False, help="Cast floating-point outputs of every step to float32.", types=(bool,)
    )
    gpu_margin_mem_ratio: float | None = option(
        None,
        help="With 'auto': share of the device memory beside weights and activations for masters and "
        "optimizer state, 0 to 1. By default as much as makes the step fastest.",
        types=_NUMBER,
    )
    chunk_search_range: int | None = option(
        None,
        help="Elements by which a chunk may exceed the larger of min_chunk_size and the largest parameter; "
        "larger layers are split. By default without limit.",
        types=(int,),
    )
    chunk_search_n_grids: int | None = option(
        None, help=f"Only {_GRIDS}: chunks are sized exactly, so no grid is searched.", types=(int,)
    )
    min_chunk_size: int | None = option(
        None,
        help="Smallest chunk, in bytes of working weights; smaller layers share the chunk of the module "
        "around them. By default 100,000 elements.",
        types=(int,),
    )
    initial_scale: float = option(2.0**16, help="Initial loss scale in '16-mixed'.", types=_NUMBER)
    min_scale: float = option(1.0, help="Smallest loss scale.", types=_NUMBER)
    max_scale: float = option(2.0**32, help="Largest loss scale.", types=_NUMBER)
    growth_factor: float = option(2.0, help="Factor by which the loss scale grows.", types=_NUMBER)
    backoff_factor: float = option(
        0.5, help="Factor that the loss scale is multiplied by after overflow.", types=_NUMBER
    )
    growth_interval: int = option(
        1000, help="Steps without overflow after which the loss scale grows.", types=(int,)
    )
    hysteresis: int = option(
        2, help="Overflows since the last growth after which the loss scale backs off.", types=(int,)
    )

    device_memory: int | float | str | None = option(
        None,
        help="Device memory limit of a rank: bytes, or text such as '24GiB'. By default all memory of "
        "the host, or nine tenths of a GPU's free memory, less 1 GiB above one rank.",
        types=(int, float, str),
    )
    host_memory: int | float | str | None = option(
        None,
        help="Host memory limit of a rank. By default its share of the machine's free memory.",
        types=(int, float, str),
    )
    offload_fraction: float | None = option(
        None,
        help="Share of the trained elements whose masters and optimizer state are in host memory, 0 to 1, "
        "exact to one chunk. By default the planner chooses it.",
        types=_NUMBER,
    )
    stream_fraction: float | None = option(
        None,
        help="Share of the trained elements whose weights are in host memory as well, at most "
        "offload_fraction.",
        types=_NUMBER,
    )
    tiers: Mapping[str, str] | None = option(
        None,
        help="Fixed tiers by chunk name, or by pattern such as 'blocks.*'.",
        types=(Mapping,),
    )
    overlap: Literal["exact", "none"] = option(
        "exact",
        help="'exact' steps the optimizer in the background: a layer's next forward waits for its own chunk "
        "only, with bitwise the same result; 'none' steps before the next forward.",
        choices=("exact", "none"),
    )
    plan: str | None = option(
        None, help="Use the plan in this JSON file; nothing is planned.", types=(str,), is_read=True
    )
    plan_file: str | None = option(None, help="Write the plan to this JSON file.", types=(str,))
    timeline_file: str | None = option(
        None, help="Draw the planned memory over one step to this PNG file.", types=(str,)
    )
    auto_wrap_policy: LayerClasses | Callable[[nn.Module], bool] | None = option(
        None,
        help="Modules that become chunks: a layer class or several, or their names, or a function from "
        "module to bool. By default repeated layers and large leaves such as embeddings.",
        layers=True,
    )
    by_choice: LayerClasses | None = option(
        None,
        help="Conditionally executed modules, such as experts: their names as in `named_modules`, or layer "
        "classes or their names. They and their submodules are never chunks.",
    )
    min_num_params: int | None = option(
        None, help="Smallest chunk, in elements; pass this or min_chunk_size.", types=(int,)
    )
    activation_checkpointing: LayerClasses | None = option(
        None,
        help="A layer class or several, or their names, whose activations are recomputed in backward "
        "instead of saved: less memory for about a third more computation.",
        layers=True,
    )
    cpu_adam: Literal["torch", "deepspeed"] = option(
        "torch",
        help="Kernel that steps Adam in host memory: torch's fused kernel, or 'deepspeed', which must be "
        "installed and gives other last bits.",
        choices=("torch", "deepspeed"),
    )
    device: Device[Any] | Callable[..., Device[Any]] | None = option(
        None, help="Device to use instead of the rank's own, or a function of the context that makes one."
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_policy()
        self._check_unsupported()
        self._check_sizes()
        self._check_shares()
        self._check_scales()
        if self.timeline_file is not None and find_spec("matplotlib") is None:
            raise OptionError(
                f"timeline_file={self.timeline_file!r} is drawn by matplotlib, which is not installed.",
                remedy="Run `pip install matplotlib`, or leave the option out.",
            )
        for name in ("device_memory", "host_memory"):
            bytes_of(getattr(self, name), name=name)
        if self.plan is not None:
            self._check_nothing_is_planned()

    @property
    def device_bytes(self) -> int | None:
        """`device_memory` in bytes."""
        return bytes_of(self.device_memory, name="device_memory")

    @property
    def host_bytes(self) -> int | None:
        """`host_memory` in bytes."""
        return bytes_of(self.host_memory, name="host_memory")

    def _check_policy(self) -> None:
        known = (*POLICIES, *_TIERS)
        if self.placement_policy not in known:
            raise OptionError(
                f"placement_policy={self.placement_policy!r} is unknown.",
                remedy=f"Use one of {', '.join(map(repr, known))}; for 'static' and 'const' of later "
                "versions, use 'auto' with offload_fraction and stream_fraction.",
            )
        for name, tier in (self.tiers or {}).items():
            if tier not in _TIERS:
                raise OptionError(
                    f"tiers={{{name!r}: {tier!r}}} is not a tier.",
                    remedy=f"Use one of {', '.join(map(repr, _TIERS))}.",
                )
        if not self.enable_distributed_storage and self.placement_policy in ("cpu", *_TIERS[1:]):
            raise OptionError(
                f"enable_distributed_storage=False contradicts placement_policy={self.placement_policy!r}: "
                "gathered weights stay on the device.",
                remedy="Give one of them only.",
            )

    def _check_unsupported(self) -> None:
        if not self.use_chunk:
            raise OptionError(
                "use_chunk=False is not supported, as in lightning-colossalai. Chunks are exactly as large "
                "as their layers, so training without them would save no memory.",
                remedy="Leave it out; auto_wrap_policy chooses the modules that become chunks.",
            )
        if self.chunk_search_n_grids not in (None, _GRIDS):
            raise OptionError(
                f"chunk_search_n_grids={self.chunk_search_n_grids}: chunks are exactly as large as their "
                "layers, so no grid of sizes is searched.",
                remedy="Leave it out.",
            )

    def _check_sizes(self) -> None:
        for name in ("chunk_size", "chunk_search_range", "min_chunk_size", "min_num_params"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < (name == "chunk_size")):
                unit = "bytes" if name == "min_chunk_size" else "elements"
                raise OptionError(
                    f"{name}={value!r} is not a size.", remedy=f"Pass a positive number of {unit}."
                )
        for first, second in (
            ("chunk_size", "chunk_search_range"),
            ("min_chunk_size", "min_num_params"),
        ):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise OptionError(
                    f"{first}={getattr(self, first)} and {second}={getattr(self, second)} conflict.",
                    remedy="Give one of them only.",
                )

    def _check_shares(self) -> None:
        for name in ("gpu_margin_mem_ratio", "offload_fraction", "stream_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise OptionError(f"{name}={value!r} is not a share.", remedy="Pass a number from 0 to 1.")

    def _check_scales(self) -> None:
        wrong = {
            "growth_factor": self.growth_factor <= 1,
            "backoff_factor": not 0 < self.backoff_factor < 1,
            "growth_interval": self.growth_interval < 1,
            "hysteresis": self.hysteresis < 1,
            "min_scale": not 0 < self.min_scale < math.inf,
            "max_scale": not self.min_scale <= self.max_scale < math.inf,
            "initial_scale": not self.min_scale <= self.initial_scale <= self.max_scale,
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise OptionError(
                f"{name}={getattr(self, name)!r} is out of its range.",
                remedy="growth_factor > 1 > backoff_factor > 0, 0 < min_scale <= initial_scale <= max_scale, "
                "growth_interval and hysteresis at least 1.",
            )

    def _check_nothing_is_planned(self) -> None:
        constraints = ("offload_fraction", "stream_fraction", "gpu_margin_mem_ratio", "tiers")
        given = [name for name in constraints if getattr(self, name) is not None]
        if self.placement_policy != "auto":
            given.append("placement_policy")
        if given:
            raise OptionError(
                f"plan={self.plan!r} sets all tiers, so {', '.join(given)} would have no effect.",
                remedy="Give one of them only, or edit the plan.",
            )
