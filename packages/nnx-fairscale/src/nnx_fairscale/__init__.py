"""fairscale's engines as nnx strategies: ``fairscale_fsdp``, ``fairscale_oss`` and ``fairscale_sharded``.

Importing this package imports neither torch nor Lightning nor fairscale.
"""

from __future__ import annotations

__all__: list[str] = []
