"""Decentralised training on Hivemind: peers come and go, without a server."""

from nnx_hivemind.options import HivemindOptions

__all__ = ["HivemindOptions"]
