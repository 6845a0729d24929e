"""What fairscale 0.4.13 needs to run on today's torch where there is no CUDA: the shim, and nothing else.

fairscale's FSDP calls CUDA streams without asking whether there are any, and collectives that gloo refuses.
While a backend is set up on CPU, `HostShim` puts in place:

* for fairscale's FSDP module alone, a ``torch`` whose ``cuda`` has one stream that does nothing;
* ``enable_nccl_base_collectives = False`` in the two modules that read it, as the environment variable
  ``ENABLE_NCCL_BASE_COLLECTIVES=0`` would do before the import;
* a ``torch.Tensor.record_stream`` that does nothing for CPU tensors, which no stream can hold on to.

Its removal takes all of it back. On CUDA nothing is touched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import fairscale.internal.reduce_scatter_bucketer as bucketer
import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp
import torch
from torch import Tensor

STREAMS = ("fp32_to_fp16", "all_gather", "post_backward")
"""The streams that fairscale's FSDP looks up by name."""

_record_stream: Any = Tensor.record_stream
_base_collectives: bool = fsdp.enable_nccl_base_collectives


class NullStream:
    """Work on the host is done when a call returns, so there is nothing to wait for."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _HostCuda:
    """The part of ``torch.cuda`` that fairscale's FSDP uses."""

    _stream = NullStream()

    def is_available(self) -> bool:
        return False

    def current_stream(self) -> NullStream:
        return self._stream

    def stream(self, stream: object) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        return None


class _HostTorch:
    """torch as fairscale's FSDP sees it in a process that computes on the host."""

    cuda = _HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _record_stream_of_devices(tensor: Tensor, stream: Any) -> None:
    if tensor.device.type != "cpu":
        _record_stream(tensor, stream)


class HostShim:
    """The shim, in place for as long as anyone needs it."""

    _users = 0

    @classmethod
    def install(cls) -> NullStream:
        """Put it in place, or count one more who needs it; returns the one stream there is."""
        cls._users += 1
        if cls._users == 1:
            cls._set(_HostTorch(), base_collectives=False, record_stream=_record_stream_of_devices)
        return _HostCuda._stream

    @classmethod
    def remove(cls) -> None:
        """Take it back when nobody needs it any more."""
        cls._users -= 1
        if cls._users == 0:
            cls._set(torch, base_collectives=_base_collectives, record_stream=_record_stream)

    @staticmethod
    def _set(torch_of_fsdp: Any, *, base_collectives: bool, record_stream: Any) -> None:
        fsdp.torch = torch_of_fsdp
        fsdp.enable_nccl_base_collectives = base_collectives
        bucketer.enable_nccl_base_collectives = base_collectives
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
