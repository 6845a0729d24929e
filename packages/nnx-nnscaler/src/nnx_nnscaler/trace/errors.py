"""What tracing raises: always with the line of the user's code that it is about."""

from __future__ import annotations

from nnx.errors import UnsupportedError

__all__ = ["GraphFormatError", "TraceError"]


class TraceError(UnsupportedError):
    """The forward cannot be turned into a graph; the message names the submodule and the source line."""


class GraphFormatError(UnsupportedError):
    """A stored graph cannot be read: damaged, of another version, or not a graph at all."""
