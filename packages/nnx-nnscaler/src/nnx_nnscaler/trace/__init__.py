"""From the user's module and a sample to a graph."""

from nnx_nnscaler.trace.fingerprint import fingerprint
from nnx_nnscaler.trace.forward import trace_forward
from nnx_nnscaler.trace.serialize import graph_from_json, graph_to_json
from nnx_nnscaler.trace.structure import GraphFormatError, TraceError

__all__ = [
    "GraphFormatError",
    "TraceError",
    "fingerprint",
    "graph_from_json",
    "graph_to_json",
    "trace_forward",
]
