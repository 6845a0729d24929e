"""The options of the strategies for slow links. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from nnx_core.errors import OptionError
from nnx_core.options import check_options, option
from nnx_fsdp.options import FSDPOptions

__all__ = [
    "AsyncOptions",
    "BaguaOptions",
    "Codec",
    "CodecOptions",
    "DecentralizedOptions",
    "DiLoCoOptions",
    "HybridOptions",
    "LocalSGDOptions",
    "LowPrecisionOptions",
    "PowerSGDOptions",
    "ReplicaOptions",
]

Codec = Literal["none", "fp16", "bf16", "int8", "topk"]
_CODECS = ("none", "fp16", "bf16", "int8", "topk")


@dataclass(frozen=True, kw_only=True)
class CodecOptions:
    """The form of numbers on the wire."""

    codec: Codec = option(
        "none",
        help="The form of each number on the wire. In an exchange of n numbers between W ranks, each rank "
        "sends 2(W-1)/W x n x 4 bytes for 'none' in float32, x 2 for 'fp16' and 'bf16', x 1.008 for 'int8'; "
        "and (W-1) x n x density x 8 for 'topk', the largest numbers with their positions.",
        choices=_CODECS,
    )
    error_feedback: bool = option(
        True,
        help="Add to the next exchange what the codec has lost in this one. It takes a tensor of each "
        "parameter's size, and a checkpoint stores it.",
        types=(bool,),
    )
    density: float = option(
        0.01, help="The share of the numbers that the codec 'topk' sends.", types=(int, float)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 < self.density <= 1:
            raise OptionError(
                f"density={self.density!r} is no share of the numbers.", remedy="Pass, say, 0.01."
            )


@dataclass(frozen=True, kw_only=True)
class BaguaOptions(CodecOptions):
    """Options of `bagua`: gradients averaged in each step."""

    algorithm: str = option(
        "gradient_allreduce",
        help="'gradient_allreduce', or 'bytegrad' with the codec 'int8'. Bagua's other algorithms are "
        "strategies: 'bagua_decentralized', 'bagua_low_precision_decentralized', 'bagua_qadam' and "
        "'bagua_async'.",
    )
    flatten: bool = option(
        True, help="Of Bagua's own strategy; gradients are always exchanged as one tensor.", types=(bool,)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm in ("decentralized", "low_precision_decentralized", "qadam", "async"):
            raise OptionError(
                f"algorithm={self.algorithm!r} is a strategy of its own.",
                remedy=f"Pass strategy='bagua_{self.algorithm}'.",
            )
        if self.algorithm not in ("gradient_allreduce", "bytegrad"):
            raise OptionError(
                f"algorithm={self.algorithm!r} is not allowed.",
                remedy="Use one of 'gradient_allreduce', 'bytegrad'.",
            )
        if self.algorithm == "bytegrad" and self.codec not in ("none", "int8"):
            raise OptionError(
                f"codec={self.codec!r} contradicts algorithm='bytegrad', whose codec is 'int8'.",
                remedy=f"Pass algorithm='gradient_allreduce', codec={self.codec!r}.",
            )


@dataclass(frozen=True, kw_only=True)
class HybridOptions(CodecOptions, FSDPOptions):
    """Options of `fsdp_hybrid_compressed`: those of FSDP2, and the codec between nodes."""

    def __post_init__(self) -> None:
        FSDPOptions.__post_init__(self)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """Options of `powersgd`, named as in torch's ``PowerSGDState``."""

    matrix_approximation_rank: int = option(
        4,
        help="The rank r of the two matrices that stand for a gradient of n x m numbers on the wire: each "
        "rank sends 2(W-1)/W x r(n+m) x 4 bytes for it; gradients of vectors travel whole.",
        types=(int,),
    )
    start_powerSGD_iter: int = option(  # noqa: N815 - torch's name
        10, help="The first steps average whole gradients, as under `ddp`.", types=(int,)
    )
    min_compression_rate: float = option(
        2.0,
        help="A gradient travels as two matrices if they are smaller by at least this factor.",
        types=(int, float),
    )
    error_feedback: bool = option(
        True,
        help="Add to the next exchange what the matrices lacked in this one. A checkpoint stores it.",
        types=(bool,),
    )

    def __post_init__(self) -> None:
        check_options(self)
        _check_counts(self, matrix_approximation_rank=1, start_powerSGD_iter=2)


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Options of strategies whose ranks train replicas of their own between exchanges.

    Attributes:
        INTERVAL: The option with the steps between two exchanges, which each subclass has.
    """

    INTERVAL: ClassVar[str] = "interval"

    replicas: Literal["average", "each"] = option(
        "average",
        help="What a checkpoint stores while the replicas differ: 'average' their average, from which every "
        "rank resumes; 'each' also the weights and optimizer state of each replica, so that as many ranks "
        "resume exactly.",
        choices=("average", "each"),
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def steps_between(self) -> tuple[str, int]:
        """The option with the steps between two exchanges, and its value."""
        return self.INTERVAL, getattr(self, self.INTERVAL)


@dataclass(frozen=True, kw_only=True)
class LocalSGDOptions(ReplicaOptions):
    """Options of `localsgd`."""

    interval: int = option(
        20,
        help="Steps between two averages of the weights: every so many steps each rank sends "
        "2(W-1)/W x n x 4 bytes for n numbers in float32.",
        types=(int,),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self, interval=1)


@dataclass(frozen=True, kw_only=True)
class DecentralizedOptions(ReplicaOptions):
    """Options of `bagua_decentralized`, by Bagua's names."""

    INTERVAL: ClassVar[str] = "communication_interval"

    peer_selection_mode: Literal["all", "shift_one"] = option(
        "all",
        help="'all' averages the weights of all ranks: each rank sends 2(W-1)/W x n x 4 bytes. 'shift_one' "
        "averages with one rank, another one in each exchange: each rank sends n x 4 bytes, and the number "
        "of ranks must be even.",
        choices=("all", "shift_one"),
    )
    communication_interval: int = option(1, help="Steps between two exchanges.", types=(int,))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self, communication_interval=1)


@dataclass(frozen=True, kw_only=True)
class LowPrecisionOptions(ReplicaOptions):
    """Options of `bagua_low_precision_decentralized`, by Bagua's names."""

    INTERVAL: ClassVar[str] = "communication_interval"

    communication_interval: int = option(
        1,
        help="Steps between two exchanges, in which each rank sends n x 1.008 bytes to both neighbours on a "
        "ring, or to the other one of two ranks.",
        types=(int,),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self, communication_interval=1)


@dataclass(frozen=True, kw_only=True)
class AsyncOptions(LocalSGDOptions):
    """Options of `bagua_async`."""

    staleness: int = option(
        10,
        help="Steps that a rank trains while its weights travel; then it adds the change to the average of "
        "all ranks. No rank is further ahead of another. At most interval.",
        types=(int,),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self, staleness=1)
        if self.staleness > self.interval:
            raise OptionError(
                f"staleness={self.staleness} is longer than interval={self.interval}: two averages would "
                "travel at once.",
                remedy="Pass a smaller staleness, or a longer interval.",
            )

    @property
    def steps_between(self) -> tuple[str, int]:
        """The options with the steps until the first average counts, and their sum."""
        return "interval + staleness", self.interval + self.staleness


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions(CodecOptions, ReplicaOptions):
    """Options of `diloco` and `diloco_streaming`."""

    interval: int = option(
        20,
        help="Steps between two exchanges of a parameter: a step sends, on average, the bytes of an exchange "
        "(see codec) / interval.",
        types=(int,),
    )
    outer_lr: float = option(
        0.7,
        help="The learning rate of the outer SGD, which steps on the change of the average weights.",
        types=(int, float),
    )
    outer_momentum: float = option(
        0.9, help="The Nesterov momentum of the outer SGD; 0 is none.", types=(int, float)
    )
    fragments: int = option(
        1,
        help="The parameters are exchanged in so many fragments, each at its own step of an interval: the "
        "largest exchange is smaller by this factor, and their sum is the same.",
        types=(int,),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self, interval=1, fragments=1)
        if self.fragments > self.interval:
            raise OptionError(
                f"fragments={self.fragments} do not fit in an interval of {self.interval} steps.",
                remedy="Pass fewer fragments, or a longer interval.",
            )
        if not (self.outer_lr > 0 and 0 <= self.outer_momentum < 1):
            raise OptionError(
                f"outer_lr={self.outer_lr!r}, outer_momentum={self.outer_momentum!r} do not converge.",
                remedy="Pass a positive rate and a momentum from 0 to below 1, such as 0.7 and 0.9.",
            )


def _check_counts(options: object, **least: int) -> None:
    for name, smallest in least.items():
        value = getattr(options, name)
        if type(value) is not int or value < smallest:
            raise OptionError(
                f"{name}={value!r} is not a whole number of at least {smallest}.",
                remedy=f"Pass, say, {max(smallest, 20)}.",
            )
