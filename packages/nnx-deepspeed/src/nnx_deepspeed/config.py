"""Make the DeepSpeed config of a run, and refuse models and optimizers that DeepSpeed cannot train."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer, SparseAdam

from nnx_core.errors import OptionError, UnsupportedError
from nnx_core.optimizers.optimizer_probe import Trial, try_optimizer
from nnx_deepspeed._deepspeed_compat import is_tested_optimizer
from nnx_deepspeed.options import DeepSpeedOptions

# These checks run before DeepSpeed's engine is created, which would fail later or train wrong numbers.
#
# A check reads the module, the optimizer and the config. It changes nothing and never communicates: every
# rank has the same input, so all ranks raise the same error.


_CPU_OPTIMIZERS = "DeepSpeedCPU"
"""The prefix of the names of DeepSpeed's CPU-only optimizers."""


def refuse_unfit(optimizer: Optimizer, *, config: Mapping[str, Any], device: torch.device) -> None:
    """Refuse an optimizer whose step would be wrong on flat partitions, or cannot run under this config.

    Args:
        optimizer: The user's optimizer.
        config: The config for ``deepspeed.initialize``.
        device: The device of the module.

    Raises:
        UnsupportedError: The optimizer does not fit. The error names an alternative.
    """
    name, offloads = type(optimizer).__name__, _offloads(config)
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedError(
            f"{name} cannot work on DeepSpeed's flat partitions: it takes sparse gradients alone.",
            remedy="Use Adam or AdamW and layers with sparse=False, or strategy 'nnscaler_zero'.",
        )
    wrapped = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if wrapped is not None:
        raise UnsupportedError(
            f"{name} wraps {type(wrapped).__name__}, which would step the module's parameters in place of "
            "DeepSpeed's partitions.",
            remedy="Return the wrapped optimizer and use a callback for the rest, or use 'fsdp_auto'.",
        )
    if not name.startswith(_CPU_OPTIMIZERS):  # DeepSpeed's own operators do not accept a trial's tensors
        _refuse_dependence(name, try_optimizer(optimizer))
    if isinstance(optimizer, Adagrad) and len(optimizer.param_groups) > 1:
        raise UnsupportedError(
            f"DeepSpeed rebuilds Adagrad with one param group; this one has {len(optimizer.param_groups)}.",
            remedy="Use one param group, or another optimizer.",
        )
    if name.startswith(_CPU_OPTIMIZERS) and device.type != "cpu" and not offloads:
        raise UnsupportedError(
            f"{name} steps on the host, and the optimizer state of this run is on {device}.",
            remedy="Use offload_optimizer=True or 'nnx_deepspeed_3_cpu', or an optimizer of torch.optim.",
        )
    if config.get("zero_force_ds_cpu_optimizer") and offloads and not name.startswith(_CPU_OPTIMIZERS):
        raise UnsupportedError(
            f"the config forces DeepSpeed's own optimizers where they are offloaded; this one is {name}.",
            remedy="Use deepspeed.ops.adam.DeepSpeedCPUAdam, or zero_force_ds_cpu_optimizer=False.",
        )
    if not config.get("zero_allow_untested_optimizer", True) and not is_tested_optimizer(optimizer):
        raise UnsupportedError(
            f"DeepSpeed has not tested {name} with ZeRO, and zero_allow_untested_optimizer is False.",
            remedy="Use Adam, AdamW or Adagrad, or zero_allow_untested_optimizer=True.",
        )


def _refuse_dependence(name: str, trial: Trial) -> None:
    """Refuse an optimizer that needs more than one flat partition at a time, or more than one evaluation."""
    if trial.dependence == "element" and trial.evaluations <= 1:
        return
    if trial.error is not None:
        found = f"a trial of its step failed: {trial.error}"
    elif trial.evaluations > 1:
        found = f"its step evaluates its closure {trial.evaluations} times, DeepSpeed's step only once"
    else:
        found = f"the update of an element depends on the full {trial.dependence}, not on the element alone"
    raise UnsupportedError(
        f"{name} cannot work on DeepSpeed's flat partitions: {found}.",
        remedy="Use an elementwise optimizer (Adam, AdamW, SGD, ...), or strategy 'fsdp_auto'.",
    )


def _offloads(config: Mapping[str, Any]) -> bool:
    section = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(section.get("device", "none") != "none")


def refuse_other_dtypes(module: nn.Module) -> None:
    """Refuse trained parameters that are not float32, the dtype of DeepSpeed's masters.

    Raises:
        UnsupportedError: A parameter has another dtype. The error names the first one.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"DeepSpeed trains float32 parameters; {name} is {dtype}.",
                remedy="Convert it to float32, with precision='bf16-mixed' if need be, or use 'fsdp_auto'.",
            )


def refuse_sparse(module: nn.Module) -> None:
    """Refuse layers with sparse gradients, because flat partitions are dense.

    Raises:
        UnsupportedError: A layer has sparse gradients. The error names the first one.
    """
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) is True and isinstance(
            submodule, (nn.Embedding, nn.EmbeddingBag)
        ):
            raise UnsupportedError(
                f"DeepSpeed's flat partitions hold no sparse gradients; {name or 'the model'} is a "
                f"{type(submodule).__name__} with sparse=True.",
                remedy="Use sparse=False, or a strategy with sparse gradients, such as 'nnscaler_zero'.",
            )


class FixedModel:
    """A record of a model's parameters and their ``requires_grad``, which must not change under DeepSpeed.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (name, sub, dict(sub._parameters), _identities(sub._parameters))
            for name, sub in module.named_modules()
        ]
        self._trains = [(name, p, p.requires_grad) for name, p in module.named_parameters()]

    def refuse_changes(self) -> None:
        """Refuse a change of the parameters or of ``requires_grad``.

        Raises:
            UnsupportedError: Something has changed. The error names the first change.
        """
        for name, submodule, parameters, identities in self._held:
            if _identities(submodule._parameters) != identities:
                raise UnsupportedError(
                    f"the parameters of {name or 'the model'} were exchanged since training began: "
                    f"{', '.join(parameters) or 'none'} before, {', '.join(submodule._parameters) or 'none'} "
                    "now; DeepSpeed's partitions are fixed.",
                    remedy="Prune or parametrize before training, or use strategy 'fairscale_oss' or 'ddp'.",
                )
        for name, parameter, trains in self._trains:
            if parameter.requires_grad != trains:
                raise UnsupportedError(
                    f"{name} was {'unfrozen' if parameter.requires_grad else 'frozen'} while training; "
                    "DeepSpeed's partitions are fixed.",
                    remedy="Freeze in `configure_model` or `__init__`, or use strategy 'fsdp_auto'.",
                )


def _identities(parameters: Mapping[str, nn.Parameter | None]) -> list[tuple[str, int]]:
    """Return names and ids of parameters. A comparison of tensors would compare their values."""
    return [(name, id(parameter)) for name, parameter in parameters.items()]


# The config of a run combines the options, the user's own config, and the settings of Trainer.
#
# Trainer (or Fabric) owns the batch, accumulation, clipping, precision, optimizer and scheduler. A config
# that contradicts Trainer is refused, because one of the two would be ignored silently.


_AUTO = "auto"
_OWNED = {
    "optimizer": "Return the optimizer from `configure_optimizers`; it may be `DeepSpeedCPUAdam`.",
    "scheduler": "Return the scheduler from `configure_optimizers`.",
    "train_batch_size": "Leave it out: your DataLoader sets the batch size.",
    "amp": "Leave it out; precision= of Trainer or Fabric chooses the types.",
    "torch_autocast": "Leave it out; precision= of Trainer or Fabric chooses the types.",
    "tensor_parallel": "Leave it out: nnx runs DeepSpeed's ZeRO alone.",
    "sequence_parallel_size": "Leave it out: nnx runs DeepSpeed's ZeRO alone.",
}
"""Keys of the config that another API owns, and how to use that API."""


def make_config(options: DeepSpeedOptions, *, bf16: bool) -> dict[str, Any]:
    """Return the config for ``deepspeed.initialize``.

    Args:
        options: The options of the strategy.
        bf16: True if weights and activations are bfloat16, and masters float32.

    Raises:
        OptionError: The user's config cannot be read, or contradicts the options or Trainer.
    """
    config = _defaults(options)
    if bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.config is not None:
        users = _read(options.config)
        _refuse_contradictions(users, options, bf16)
        _merge(config, users)
    return config


def with_fitting_buckets(config: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return the config with buckets no larger than the trained parameters.

    DeepSpeed allocates the buckets in each backward, and torch fills them in deterministic mode.
    """
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    zero = dict(config["zero_optimization"])
    zero["reduce_bucket_size"] = int(min(zero["reduce_bucket_size"], max(trained, 1)))
    return {**config, "zero_optimization": zero}


def _defaults(options: DeepSpeedOptions) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # only DeepSpeed's own throughput report uses it
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**62,
        "zero_allow_untested_optimizer": options.zero_allow_untested_optimizer,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(options),
        "aio": {
            "block_size": options.block_size,
            "queue_depth": options.queue_depth,
            "single_submit": options.single_submit,
            "overlap_events": options.overlap_events,
            "thread_count": options.thread_count,
        },
        "activation_checkpointing": {
            "partition_activations": options.partition_activations,
            "cpu_checkpointing": options.cpu_checkpointing,
            "contiguous_memory_optimization": options.contiguous_memory_optimization,
            "synchronize_checkpoint_boundary": options.synchronize_checkpoint_boundary,
        },
    }


def _zero(options: DeepSpeedOptions) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": options.stage,
        "contiguous_gradients": options.contiguous_gradients,
        "overlap_comm": options.overlap_comm,
        "allgather_partitions": options.allgather_partitions,
        "reduce_scatter": options.reduce_scatter,
        "allgather_bucket_size": options.allgather_bucket_size,
        "reduce_bucket_size": options.reduce_bucket_size,
        "sub_group_size": options.sub_group_size,
        "stage3_param_persistence_threshold": options.persistence_threshold,
    }
    if options.offload_optimizer:
        zero["offload_optimizer"] = {
            "device": options.offload_optimizer_device,
            "nvme_path": options.nvme_path,
            "buffer_count": options.optimizer_buffer_count,
            "pin_memory": options.pin_memory,
        }
    if options.offload_parameters:
        zero["offload_param"] = {
            "device": options.offload_params_device,
            "nvme_path": options.nvme_path,
            "buffer_count": options.params_buffer_count,
            "buffer_size": options.params_buffer_size,
            "max_in_cpu": options.max_in_cpu,
            "pin_memory": options.pin_memory,
        }
    return zero


def _read(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"the DeepSpeed config {os.fspath(config)!r} cannot be read: {error}.",
            remedy="Pass the path of a JSON file, or the dict itself.",
        ) from error
    if not isinstance(content, dict):
        raise OptionError(
            f"the DeepSpeed config {os.fspath(config)!r} holds a {type(content).__name__}.",
            remedy="It must be a JSON object.",
        )
    return content


def _refuse_contradictions(users: Mapping[str, Any], options: DeepSpeedOptions, bf16: bool) -> None:
    for key, remedy in _OWNED.items():
        if _is_set(users.get(key, _AUTO)):
            raise OptionError(
                f"the DeepSpeed config has {key!r}, which Trainer or nnx decides.", remedy=remedy
            )
    _must_be(users, "gradient_accumulation_steps", (1,), "Use Trainer(accumulate_grad_batches=...).")
    _must_be(users, "gradient_clipping", (0, 0.0), "Use Trainer(gradient_clip_val=...).")
    zero = _section(users, "zero_optimization")
    _must_be(zero, "stage", (options.stage,), f"This strategy is stage {options.stage}; choose another name.")
    offload = _section(zero, "offload_optimizer")
    _must_be(offload, "ratio", (1, 1.0), "Leave it out: nnx offloads an optimizer completely or not at all.")
    _must_be(zero, "mics_shard_size", (-1,), "nnx shards over all ranks; 'fsdp_hybrid' shards over some.")
    for name in ("bf16", "bfloat16"):
        enabled = _section(users, name).get("enabled", _AUTO)
        if enabled != _AUTO and bool(enabled) != bf16:
            raise OptionError(
                f"the DeepSpeed config says {name}.enabled={enabled}; the run's precision contradicts it.",
                remedy="Leave it out; precision='bf16-mixed' of Trainer or Fabric turns it on.",
            )
    if _section(users, "fp16").get("enabled", _AUTO) not in (_AUTO, False):
        raise OptionError(
            "the DeepSpeed config turns fp16 on; its loss scale would multiply the gradients to clip.",
            remedy="Use precision='16-mixed', which computes in float16, or 'bf16-mixed'.",
        )
    _refuse_other_values(users, _defaults(options), _defaults(DeepSpeedOptions(stage=options.stage)))


def _is_set(value: Any) -> bool:
    """Return True if a config sets a value other than ``"auto"`` or a section that is turned off."""
    if isinstance(value, Mapping) and "enabled" in value:
        value = value["enabled"]
    return value not in (_AUTO, None, False)


def _section(users: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = users.get(name, {})
    if section == _AUTO:
        return {}
    if not isinstance(section, Mapping):
        raise OptionError(
            f"the DeepSpeed config says {name}={section!r}, expected a section.",
            remedy=f'Write {{"{name}": {{...}}}}, with the keys of DeepSpeed\'s documentation.',
        )
    return section


def _refuse_other_values(users: Mapping[str, Any], ours: Mapping[str, Any], unset: Mapping[str, Any]) -> None:
    """Refuse a value of the config that contradicts an option which is not at its default."""
    for key, value in users.items():
        mine, default = ours.get(key), unset.get(key)
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            _refuse_other_values(value, mine, default if isinstance(default, Mapping) else {})
        elif mine != default and value not in (_AUTO, mine):
            raise OptionError(
                f"the DeepSpeed config says {key}={value!r}, an option of the strategy says {mine!r}.",
                remedy="Set it in the config or by the option, not in both.",
            )


def _must_be(section: Mapping[str, Any], key: str, allowed: tuple[Any, ...], remedy: str) -> None:
    value = section.get(key, _AUTO)
    if value != _AUTO and value not in allowed:
        raise OptionError(
            f"the DeepSpeed config says {key}={value!r}, expected {allowed[0]!r}.", remedy=remedy
        )


def _merge(into: dict[str, Any], users: Mapping[str, Any]) -> None:
    """Merge the user's config into ours, section by section; ``"auto"`` leaves the default."""
    for key, value in users.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif value != _AUTO:
            into[key] = value
