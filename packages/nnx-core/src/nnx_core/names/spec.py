"""Declarations of plugins: a strategy's name, the import path of its class, and its capabilities.

Specs are data. This module needs the standard library only, so that listing strategies never
imports torch, Lightning or an engine. It never loads a plugin (see `nnx_core.names.plugins`) and never builds
a strategy (see `nnx_core.lightning`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nnx_checkpoint.format.declaration import (
    API_VERSION,
    CheckpointFormatSpec,
    check_name,
    check_reference,
    check_version,
    import_reference,
)
from nnx_core.errors import PluginError

__all__ = [
    "API_VERSION",
    "LIGHTNING_NAMES",
    "Capabilities",
    "CheckpointFormatSpec",
    "LauncherSpec",
    "StrategySpec",
    "import_reference",
    "name_remarks",
]

LIGHTNING_NAMES = frozenset(
    ["auto", "dp", "fsdp", "fsdp_cpu_offload", "single_device", "single_tpu", "single_xla"]
    + ["xla", "xla_debug", "xla_fsdp", "deepspeed", "deepspeed_stage_3_offload_nvme"]
    + [f"deepspeed_stage_{stage}{where}" for stage in (1, 2, 3) for where in ("", "_offload")]
    + [
        f"ddp{how}{unused}"
        for how in ("", "_spawn", "_fork", "_notebook")
        for unused in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
    ]
)
"""Names that Lightning 2.6 owns, in Trainer or in Fabric; a test compares them with its registries."""

# Lightning 2.6: fabric/cli.py hides matching names from the choices of `fabric run --strategy`.
_HIDDEN_FROM_FABRIC_RUN = re.compile("spawn|fork|notebook|xla|tpu|offload")


def _capability(default: bool | tuple[str, ...], meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a strategy, which the conformance suite tests.

    Each field carries its meaning as ``metadata["help"]``, which `nnx show` prints.

    Example:
        >>> Capabilities(shards_parameters=True).shards_parameters
        True
    """

    accelerators: tuple[str, ...] = _capability(("cpu", "cuda"), "devices it runs on")
    precisions: tuple[str, ...] = _capability(
        ("32-true",), "values of Lightning's `precision=` that it accepts"
    )
    shards_parameters: bool = _capability(
        False, "a rank stores only its part of the parameters between steps"
    )
    shards_gradients: bool = _capability(False, "a rank stores only its part of the gradients")
    shards_optimizer: bool = _capability(False, "a rank stores only its part of the optimizer state")
    tensor_parallel: bool = _capability(False, "single operators are split over ranks")
    pipeline: bool = _capability(False, "consecutive layers run on different ranks, in stages")
    offload: bool = _capability(False, "states can live in host memory while the device computes")
    manual_wrap: bool = _capability(False, "the user may choose the units that are sharded together")
    activation_checkpointing: bool = _capability(False, "activations of chosen layers can be recomputed")
    meta_initialization: bool = _capability(
        False, "a model built on the meta device is materialised shard by shard"
    )
    torch_compile: bool = _capability(False, "the distributed module can be compiled by torch.compile")
    needs_sample: bool = _capability(False, "it must see example inputs before the first step")
    multiple_optimizers: bool = _capability(True, "more than one optimizer at a time")
    parameter_groups: bool = _capability(True, "optimizers with several parameter groups")
    added_parameter_groups: bool = _capability(
        True, "parameters may be added to an optimizer while it is training"
    )
    exact: bool = _capability(
        True, "losses and weights are those of one process; without it they come near them"
    )
    repeated_closures: bool = _capability(
        True, "an optimizer may evaluate its closure more than once in a step"
    )
    gradient_accumulation: bool = _capability(True, "several backward passes before one optimizer step")
    clip_by_norm: bool = _capability(True, "gradient clipping by the global norm")
    clip_by_value: bool = _capability(True, "gradient clipping by value")
    unused_parameters: bool = _capability(True, "parameters that take no part in a step's loss")
    freezing_while_training: bool = _capability(True, "parameters may be frozen and unfrozen while training")
    mixed_dtypes: bool = _capability(True, "trained parameters may have different dtypes")
    sync_batchnorm: bool = _capability(
        True, "Trainer(sync_batchnorm=True) normalises over the batches of all ranks"
    )
    leaves_no_files: bool = _capability(True, "a run that saves nothing leaves no file behind")
    submodule_hooks: bool = _capability(True, "hooks on submodules run in every step")
    manual_optimization: bool = _capability(True, "LightningModules with automatic_optimization=False")
    refuses: tuple[str, ...] = _capability(
        (), "conformance checks of user patterns that it refuses with a remedy"
    )
    trainer: bool = _capability(True, "usable as Trainer(strategy=...)")
    fabric: bool = _capability(True, "usable as Fabric(strategy=...)")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, is_flag = getattr(self, item.name), isinstance(item.default, bool)
            if not (isinstance(value, bool) if is_flag else _is_strings(value)):
                wanted = "True or False" if is_flag else "a tuple of strings"
                raise PluginError(
                    f"Capabilities({item.name}={value!r}) is not valid: expected {wanted}.",
                    remedy="Correct the declaration in the plugin.",
                )

    def as_dict(self) -> dict[str, bool | list[str]]:
        """Return these capabilities as plain data for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A plugin's declaration of one strategy.

    Attributes:
        name: The string for ``strategy="..."``: lower case letters, digits and underscores.
        target: ``"pkg.module:Class"`` of a `Backend` or of any Lightning `Strategy`. Only
            `StrategyRegistry.register` may put the class object itself here.
        init_params: Keyword arguments that the target always gets; the user's own ones take precedence.
        description: One line that says what it is.
        use_when: One line that says when to choose it.
        docs_url: The address of its documentation.
        capabilities: The capabilities that it promises.
        api_version: The version of this API that the plugin was written for.
        options: ``"pkg.module:Dataclass"`` of its options, in a module that does not import torch.
        checkpoint_io: A Lightning CheckpointIO, or a callable without arguments that makes one, to be
            used in place of the strategy's own.
        option_of: The strategy of which this name is only an option; `nnx list` then shows it with ``--all``.
        memory: ``"pkg.module:Class"`` of the `nnx_core.planning.replay.Replay` that predicts a rank's memory.

    Example:
        >>> StrategySpec("fsdp_auto", "nnx_fsdp.backend:FSDPBackend").name
        'fsdp_auto'
    """

    name: str
    target: str | type[Any]
    init_params: Mapping[str, Any] = field(default_factory=dict, hash=False, kw_only=True)
    description: str = field(default="", kw_only=True)
    use_when: str = field(default="", kw_only=True)
    docs_url: str = field(default="", kw_only=True)
    capabilities: Capabilities = field(default_factory=Capabilities, kw_only=True)
    api_version: tuple[int, int] = field(default=(1, 0), kw_only=True)
    options: str = field(default="", kw_only=True)
    checkpoint_io: Any = field(default=None, kw_only=True, hash=False)
    memory: str = field(default="", kw_only=True)
    option_of: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.target, type):
            check_reference(self.target, name=self.name, what="target")
        if self.options:
            check_reference(self.options, name=self.name, what="options")
        if self.memory:
            check_reference(self.memory, name=self.name, what="memory")
        if self.option_of:
            check_name(self.option_of)
        check_version(self.api_version, name=self.name)
        if not isinstance(self.capabilities, Capabilities):
            raise PluginError(
                f"strategy {self.name!r} declares capabilities={self.capabilities!r}.",
                remedy="Pass an instance of nnx.Capabilities.",
            )
        # A private copy: the plugin's own dict may change later.
        object.__setattr__(self, "init_params", dict(self.init_params))

    @property
    def reference(self) -> str:
        """The target as text, also for a class object."""
        if isinstance(self.target, str):
            return self.target
        return f"{self.target.__module__}:{self.target.__qualname__}"

    def resolve(self) -> Any:
        """Import the target's module and return the class; nothing before this imports an engine."""
        if isinstance(self.target, str):
            return import_reference(self.target, what=f"strategy {self.name!r}")
        return self.target

    def as_dict(self) -> dict[str, Any]:
        """Return this spec as plain data for JSON; values without a JSON form become their repr."""
        return {
            "name": self.name,
            "target": self.reference,
            "init_params": {key: _plain(value) for key, value in self.init_params.items()},
            "description": self.description,
            "use_when": self.use_when,
            "docs_url": self.docs_url,
            "capabilities": self.capabilities.as_dict(),
            "api_version": list(self.api_version),
            "options": self.options,
            "option_of": self.option_of,
        }


@dataclass(frozen=True, slots=True)
class LauncherSpec:
    """A plugin's declaration of a launcher, which starts the processes of a run.

    Attributes:
        name: The string for ``nnx.strategy(..., launcher="...")`` and ``nnx run --on``.
        target: ``"pkg.module:Class"`` of a `nnx_core.launch.launcher.Launcher`.
        description: One line that says what it is.
        needs: The modules that it imports, by the names that ``pip install`` knows them under.
        api_version: The version of this API that the plugin was written for.

    Example:
        >>> LauncherSpec("ray", "nnx_ray.launcher:RayLauncher", needs={"ray": "ray[train]"}).name
        'ray'
    """

    name: str
    target: str
    description: str = field(default="", kw_only=True)
    needs: Mapping[str, str] = field(default_factory=dict, hash=False, kw_only=True)
    api_version: tuple[int, int] = field(default=(1, 0), kw_only=True)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_reference(self.target, name=self.name, what="target")
        check_version(self.api_version, name=self.name)


def name_remarks(name: str) -> list[str]:
    """Return the effect of Lightning's rules on parts of a name.

    Example:
        >>> name_remarks("nnscaler_deduped")
        []
        >>> name_remarks("my_offload")
        ["`fabric run` does not offer names that contain 'offload'; Fabric(strategy=...) accepts it"]
    """
    remarks = []
    if hidden := _HIDDEN_FROM_FABRIC_RUN.search(name):
        remarks.append(
            f"`fabric run` does not offer names that contain {hidden.group()!r}; "
            "Fabric(strategy=...) accepts it"
        )
    if caught := next((part for part in ("ddp", "deepspeed") if part in name), ""):
        remarks.append(f"on a machine with MPS, Lightning refuses names that contain {caught!r}")
    elif "dp" in name:
        remarks.append("on a machine with MPS, Fabric refuses names that contain 'dp'")
    return remarks


def _is_strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
