"""The types of the public API."""

import nnx_checkpoint
import nnx_conformance
from nnx import lite as lite
from nnx_core import *  # noqa: F403

checkpoint = nnx_checkpoint
testing = nnx_conformance
