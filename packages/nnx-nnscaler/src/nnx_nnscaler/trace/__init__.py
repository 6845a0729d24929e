"""Trace the user's module on a sample, to a graph."""

from nnx_nnscaler.trace.fingerprint import fingerprint
from nnx_nnscaler.trace.forward import trace_forward
from nnx_nnscaler.trace.structure import TraceError

__all__ = ["TraceError", "fingerprint", "trace_forward"]
