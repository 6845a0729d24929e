"""Options of the fairscale strategies.

This module needs the standard library only, so that `nnx show` need not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx_core.errors import OptionError
from nnx_core.options import check_options, option

if TYPE_CHECKING:
    from torch import nn

    LayerClasses = type[nn.Module] | str | Iterable[type[nn.Module] | str]


_DTYPES = ("float32", "float16", "bfloat16")


def _dtype_name(value: Any) -> Any:
    """Return ``torch.float16`` as ``"float16"``; names and None stay unchanged."""
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else value


@dataclass(frozen=True, kw_only=True)
class FairscaleFSDPOptions:
    """Options of fairscale's FSDP."""

    cpu_offload: bool = option(
        False,
        help="Offload shards, gradients and optimizer state to host memory. No effect on CPU.",
        types=(bool,),
    )
    flatten_parameters: bool = option(
        True,
        help="Accepted for old code: a unit's parameters are communicated as one flat tensor either way.",
        types=(bool,),
    )
    reshard_after_forward: bool = option(
        True,
        help="Free gathered parameters after a unit's forward; False keeps them until backward (faster, more "
        "memory). The root unit always keeps its own.",
        types=(bool,),
    )
    move_grads_to_cpu: bool | None = option(
        None,
        help="Offload reduced gradients to host memory. Default: the same as cpu_offload. No effect on CPU.",
        types=(bool,),
    )
    fp32_reduce_scatter: bool | None = option(
        None,
        help="Reduce gradients in float32 despite compute_dtype. Any value but None also turns on "
        "fairscale's own mixed precision, in float16 unless compute_dtype is set.",
        types=(bool,),
    )
    compute_dtype: str | None = option(
        None,
        help="Gather and compute in this dtype with float32 shards: fairscale's own mixed precision, on top "
        "of `precision=`, which autocasts.",
        choices=(None, *_DTYPES),
    )
    bucket_cap_mb: int = option(
        25, help="Megabytes of the buckets that reduce gradients; 0 reduces each one alone.", types=(int,)
    )
    min_num_params: int = option(
        100_000_000,
        help="Modules with this many parameters outside of other units become units.",
        types=(int, float),
    )
    auto_wrap: bool = option(
        True,
        help="Choose units by min_num_params or auto_wrap_policy if `wrap()` has chosen none.",
        types=(bool,),
    )
    auto_wrap_policy: LayerClasses | Callable[..., bool] | None = option(
        None,
        help="Units in place of large modules: a layer class or several, or their names, or a policy "
        "function of `fairscale.nn.auto_wrap`.",
        layers=True,
    )
    activation_checkpointing: LayerClasses | None = option(
        None,
        help="A layer class or several, or their names, whose activations are recomputed in backward "
        "instead of stored: less memory for about a third more computation.",
        layers=True,
    )
    state_dict_to_cpu: bool = option(
        False,
        help="Accepted for old code: nnx writes state to disk without a copy.",
        types=(bool,),
    )
    sync_module_states: bool = option(
        True,
        help="Start every rank with rank zero's weights and buffers, regardless of its own seed.",
        types=(bool,),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute_dtype", _dtype_name(self.compute_dtype))
        check_options(self)
        if self.min_num_params < 0:
            raise OptionError(
                f"min_num_params={self.min_num_params} is negative.", remedy="Pass a number of parameters."
            )
        if not self.auto_wrap and self.auto_wrap_policy is not None:
            raise OptionError(
                "auto_wrap_policy has no effect with auto_wrap=False.",
                remedy="Leave one of them out.",
            )


@dataclass(frozen=True, kw_only=True)
class OSSOptions:
    """Options of OSS."""

    broadcast_fp16: bool = option(
        False,
        help="Send updated parameters to the other ranks in float16: half the traffic, and every rank, the "
        "owner too, continues from the rounded values.",
        types=(bool,),
    )
    bucket_cap_mb: int = option(
        25, help="Megabytes of the buckets that average gradients after backward.", types=(int,)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.bucket_cap_mb < 1:
            raise OptionError(
                f"bucket_cap_mb={self.bucket_cap_mb} is not positive.", remedy="Pass a number of megabytes."
            )


@dataclass(frozen=True, kw_only=True)
class ShardedOptions:
    """Options of ShardedDataParallel."""

    reduce_buffer_size: int = option(
        2**23,
        help="Maximum elements of the buffer that reduces an owner's small gradients; 0 reduces each "
        "gradient alone.",
        types=(int,),
    )
    reduce_fp16: bool = option(
        False,
        help="Reduce gradients in float16. It needs reduce_buffer_size=0.",
        types=(bool,),
    )
    broadcast_fp16: bool = option(
        False,
        help="Send updated parameters to the other ranks in float16: half the traffic, and every rank, the "
        "owner too, continues from the rounded values.",
        types=(bool,),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.reduce_buffer_size < 0:
            raise OptionError(
                f"reduce_buffer_size={self.reduce_buffer_size} is negative.",
                remedy="Pass a number of elements, or 0 for no buffer.",
            )
        if self.reduce_fp16 and self.reduce_buffer_size:
            raise OptionError(
                f"reduce_fp16 has no effect with reduce_buffer_size={self.reduce_buffer_size}.",
                remedy="Set reduce_buffer_size=0, or leave reduce_fp16 out.",
            )
