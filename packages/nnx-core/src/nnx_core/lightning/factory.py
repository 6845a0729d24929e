"""`nnx.strategy`: build any strategy by its name, with options.

Importing this module imports Lightning: LightningCLI accepts ``class_path: nnx.strategy`` only if the return
annotation is a real class of the tree in use. So annotations are not postponed here.
"""

import importlib
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from nnx_core.errors import OptionError
from nnx_core.launch.launcher import Launcher, make_launcher
from nnx_core.lightning.checkpoint import CheckpointIO
from nnx_core.lightning.namespaces import NAMESPACES, Namespace, get_namespace
from nnx_core.lightning.registration import build, explain_missing
from nnx_core.names.discovery import inventory
from nnx_core.names.registry import StrategyRegistry

KnownName = Literal[
    "bagua", "bagua_async", "bagua_bytegrad", "bagua_decentralized", "bagua_low_precision_decentralized",
    "bagua_qadam", "colossalai", "colossalai_auto", "colossalai_cpu", "colossalai_cuda", "diloco",
    "diloco_streaming", "fairscale_fsdp", "fairscale_oss", "fairscale_sharded", "fsdp_auto",
    "fsdp_hybrid", "fsdp_hybrid_compressed", "fsdp_manual", "fsdp_offload", "hivemind", "localsgd",
    "nnscaler", "nnscaler_deduped", "nnscaler_dp", "nnscaler_hybrid", "nnscaler_pp", "nnscaler_tp",
    "nnscaler_zero", "nnx_deepspeed_1", "nnx_deepspeed_2", "nnx_deepspeed_3", "nnx_deepspeed_3_cpu",
    "powersgd", "torchft_ddp", "torchft_hsdp",
]  # fmt: skip
"""The names of nnx's own packages, for completion in editors; all other names of plugins work, too."""


def default_namespace() -> str:
    """Return the tree of Lightning in use: the first imported one, Trainer's before Fabric's."""
    return next((name for name in NAMESPACES if f"{name}.strategies" in sys.modules), next(iter(NAMESPACES)))


if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = importlib.import_module(f"{default_namespace()}.strategies").Strategy


def strategy(
    name: KnownName | str,
    *,
    namespace: str | None = None,
    launcher: str | Launcher | None = None,
    **overrides: Any,
) -> Strategy:
    """Build a strategy by its name, with options.

    Args:
        name: A name that `nnx list` shows, or one of Lightning's own.
        namespace: ``lightning.pytorch``, ``lightning.fabric``, ``pytorch_lightning`` or
            ``lightning_fabric``; by default the imported one, Trainer's before Fabric's.
        launcher: The launcher that starts the processes, such as ``"ray"``; by default Lightning's.
        **overrides: Options of the strategy, which take precedence over registered ones, and options of the
            launcher.

    Raises:
        StrategyNotInstalledError: The catalog knows the name, but its distribution is missing.
        StrategyNotFoundError: The name is unknown; the message suggests the nearest one.
        OptionError: An option, the namespace or the launcher is unknown or not valid.
        LaunchError: A package that the launcher needs is not installed.

    Example:
        >>> type(strategy("ddp", find_unused_parameters=True)).__name__
        'DDPStrategy'
    """
    space = get_namespace(namespace or default_namespace())
    if launcher is None:
        return _build(name, space, overrides)
    found, rest = make_launcher(launcher, overrides) if isinstance(launcher, str) else (launcher, overrides)
    try:
        built = _build(name, space, rest)
    except (OptionError, TypeError) as error:
        raise OptionError(
            f"{getattr(error, 'message', error)}",
            remedy=f"{getattr(error, 'remedy', '')} The launcher's own options are "
            f"{', '.join(item.name for item in fields(found.Options))}.".strip(),
        ) from error
    return _launched(built, name, found, space=space, gather=rest.get("gather_at_end"))


def _build(name: str, space: Namespace, overrides: dict[str, Any]) -> Strategy:
    module = importlib.import_module(f"{space.name}.strategies")
    registry = module.STRATEGY_REGISTRY if space.is_fabric else module.StrategyRegistry
    if name not in StrategyRegistry and name in registry:
        data = registry[name]
        options = {**data["init_params"], **_with_copies(overrides, space)}
        return data["strategy"](**options)  # type: ignore[no-any-return]
    if name not in StrategyRegistry:
        raise explain_missing(name, registry)
    return build(StrategyRegistry.get(name), namespace=space.name, overrides=overrides)  # type: ignore[no-any-return]


def _with_copies(overrides: dict[str, Any], space: Namespace) -> dict[str, Any]:
    """Replace the options of copies in memory, for Lightning's own strategies, by an IO that has them."""
    rest = dict(overrides)
    wanted = {name: rest.pop(name) for name in ("memory_checkpoint", "memory_directory") if name in rest}
    if not wanted:
        return rest
    if space.is_fabric or rest.get("checkpoint_io") is not None:
        raise OptionError(
            f"{next(iter(wanted))} needs a Trainer, whose checkpoints nnx writes.",
            remedy="Pass the option to your own nnx.CheckpointIO, or leave `checkpoint_io` out.",
        )
    return {**rest, "checkpoint_io": CheckpointIO(**wanted)}


def _launched(
    built: Strategy, name: str, launcher: Launcher, *, space: Namespace, gather: str | None
) -> Strategy:
    from nnx_core.lightning.launcher import use_launcher

    packages = ["torch", "lightning" if space.name.startswith("lightning.") else "pytorch-lightning"]
    packages += ["nnx-core", "nnx-checkpoint"]
    if name in StrategyRegistry:
        shards = StrategyRegistry.get(name).capabilities.shards_parameters
        packages += [inventory().owners[name].partition(" ")[0]] if name in inventory().owners else []
    else:
        shards = not name.startswith("ddp")
    gathers = None if gather is None else gather != "none"
    return use_launcher(  # type: ignore[no-any-return]
        built, launcher, root=space.name, shards=shards, gathers=gathers, packages=tuple(packages)
    )
