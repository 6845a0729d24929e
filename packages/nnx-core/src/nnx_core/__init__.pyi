"""The types of nnx-core; `nnx_core.__init__` imports each name on first use."""

from nnx_conformance.diff.loop import record as record
from nnx_core.backend import Backend as Backend
from nnx_core.backend import ParallelContext as ParallelContext
from nnx_core.errors import (
    CheckpointError as CheckpointError,
)
from nnx_core.errors import (
    NnxError as NnxError,
)
from nnx_core.errors import (
    OptionError as OptionError,
)
from nnx_core.errors import (
    PlanError as PlanError,
)
from nnx_core.errors import (
    PluginError as PluginError,
)
from nnx_core.errors import (
    StrategyNotFoundError as StrategyNotFoundError,
)
from nnx_core.errors import (
    StrategyNotInstalledError as StrategyNotInstalledError,
)
from nnx_core.errors import (
    UnsupportedError as UnsupportedError,
)
from nnx_core.lightning.callbacks import compare_ranks as compare_ranks
from nnx_core.lightning.checkpoint import CheckpointIO as CheckpointIO
from nnx_core.lightning.factory import strategy as strategy
from nnx_core.lightning.loading import load_from_checkpoint as load_from_checkpoint
from nnx_core.names.plugins import hookimpl as hookimpl
from nnx_core.names.registry import StrategyRegistry as StrategyRegistry
from nnx_core.names.spec import (
    Capabilities as Capabilities,
)
from nnx_core.names.spec import (
    CheckpointFormatSpec as CheckpointFormatSpec,
)
from nnx_core.names.spec import (
    LauncherSpec as LauncherSpec,
)
from nnx_core.names.spec import (
    StrategySpec as StrategySpec,
)
from nnx_core.planning.planner import plan as plan
from nnx_core.random_state import RandomState as RandomState
from nnx_lite import LightningLite as LightningLite
from nnx_lite import Lite as Lite

__version__: str
