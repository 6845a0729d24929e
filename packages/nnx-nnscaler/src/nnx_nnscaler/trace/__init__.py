"""From the user's module and a sample to a graph."""

from nnx_nnscaler.trace.errors import GraphFormatError, TraceError
from nnx_nnscaler.trace.forward import trace_forward

__all__ = ["GraphFormatError", "TraceError", "trace_forward"]
