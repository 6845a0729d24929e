"""Options of the fairscale strategies. Standard library only, so that `nnx show` need not import torch."""

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
    """``torch.float16`` as ``"float16"``; names and None as they are."""
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else value


@dataclass(frozen=True, kw_only=True)
class FairscaleFSDPOptions:
    """What changes how fairscale's FSDP is applied to a model."""

    cpu_offload: bool = option(
        False,
        help="Keep shards, gradients and optimizer state in host memory. On CPU it changes nothing.",
        types=(bool,),
    )
    flatten_parameters: bool = option(
        True,
        help="Accepted for old code: a unit's parameters are communicated as one flat tensor either way.",
        types=(bool,),
    )
    reshard_after_forward: bool = option(
        True,
        help="Free what a unit has gathered after its forward; False keeps it until backward (faster, more "
        "memory). The root always keeps it.",
        types=(bool,),
    )
    move_grads_to_cpu: bool | None = option(
        None,
        help="Keep reduced gradients in host memory; by default as cpu_offload. On CPU it changes nothing.",
        types=(bool,),
    )
    fp32_reduce_scatter: bool | None = option(
        None,
        help="With compute_dtype, reduce gradients in float32 all the same. Any value that is not None also "
        "turns on fairscale's own mixed precision, in float16 unless compute_dtype says otherwise.",
        types=(bool,),
    )
    compute_dtype: str | None = option(
        None,
        help="Gather and compute in this dtype with float32 shards: fairscale's own mixed precision, on top "
        "of `precision=`, which autocasts.",
        choices=(None, *_DTYPES),
    )
    bucket_cap_mb: int = option(
        25, help="Gradients are reduced in buckets of this size; 0 reduces each by itself.", types=(int,)
    )
    min_num_params: int = option(
        100_000_000,
        help="Modules with so many parameters that are in no other unit become a unit of their own.",
        types=(int, float),
    )
    auto_wrap: bool = option(
        True,
        help="Choose units by min_num_params or auto_wrap_policy where `wrap()` has chosen none.",
        types=(bool,),
    )
    auto_wrap_policy: LayerClasses | Callable[..., bool] | None = option(
        None,
        help="What becomes a unit in place of large modules: a layer class or several, or their names, or a "
        "policy function as `fairscale.nn.auto_wrap` takes it.",
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
        help="Accepted for old code: state is described where it lies, and goes to disk without a copy.",
        types=(bool,),
    )
    sync_module_states: bool = option(
        True,
        help="Start every rank from rank 0's weights and buffers, whatever the others were seeded with.",
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
    """What changes how OSS shares out the optimizer."""

    broadcast_fp16: bool = option(
        False,
        help="Send updated parameters to the other ranks in float16: half the traffic, and every rank, the "
        "owner too, continues from the rounded values.",
        types=(bool,),
    )
    bucket_cap_mb: int = option(
        25, help="Gradients are averaged in buckets of about this size, after backward.", types=(int,)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.bucket_cap_mb < 1:
            raise OptionError(
                f"bucket_cap_mb={self.bucket_cap_mb} is not positive.", remedy="Pass a number of megabytes."
            )


@dataclass(frozen=True, kw_only=True)
class ShardedOptions:
    """What changes how ShardedDataParallel reduces gradients."""

    reduce_buffer_size: int = option(
        2**23,
        help="Most elements of the buffer that small gradients of one owner are reduced in; 0 reduces each "
        "gradient by itself.",
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
