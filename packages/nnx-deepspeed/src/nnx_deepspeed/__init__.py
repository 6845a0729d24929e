"""DeepSpeed's ZeRO engines as nnx strategies: ``nnx_deepspeed_1``, ``_2``, ``_3`` and ``_3_cpu``."""

from __future__ import annotations

__all__: list[str] = []
