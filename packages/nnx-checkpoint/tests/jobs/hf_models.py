"""Models of transformers with random weights, in modules that prefix their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import nnx_checkpoint
from nnx_checkpoint.storage.files import FileReader
from nnx_test_helpers.live_bytes import LiveBytes
from nnx_test_helpers.training import Run, make_trainer

_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
_SIZES |= {"vocab_size": 37, "num_attention_heads": 2}
_ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 37, "n_positions": 32, **_ENDS},
    ),
    "llama": ("LlamaForCausalLM", {**_SIZES, "num_key_value_heads": 1}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {**_SIZES, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True, **_ENDS},
    ),
    "bert": ("BertForMaskedLM", _SIZES),
    "mixtral": ("MixtralForCausalLM", {**_SIZES, "num_key_value_heads": 1, "num_local_experts": 3}),
}


def build(kind: str, **more: Any) -> Any:
    """The model of a kind, always with the same weights."""
    architecture, options = CONFIGS[kind]
    torch.manual_seed(7)
    made = getattr(transformers, architecture)
    return made(made.config_class(**{**options, **more})).eval()


def save_config(model: Any, directory: Path) -> Path:
    """A directory with the configuration of a model, and a file of a tokenizer."""
    directory.mkdir()
    content = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def logits(model: Any) -> Tensor:
    """The model's output for fixed tokens."""
    with torch.no_grad():
        found: Tensor = model(torch.arange(10).view(1, 10)).logits
    return found


class Held(nn.Module):
    """A model as an attribute, beside a tensor of the training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model
        self.scale = nn.Parameter(torch.ones(2))


class Lit(LightningModule):
    """A model of transformers in training (in evaluation mode, so without dropout)."""

    def __init__(self, kind: str, rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = build(kind)
        self.rate = rate
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)

    def train_dataloader(self) -> DataLoader[Any]:
        data: Any = torch.randint(0, 37, (12, 8), generator=torch.Generator().manual_seed(3))
        world = self.trainer.world_size
        sampler = DistributedSampler[Any](
            data, num_replicas=world, rank=self.trainer.global_rank, shuffle=False
        )
        return DataLoader(data, batch_size=12 // world, sampler=sampler)


def train(run: Run, kind: str) -> list[float]:
    """Train a model, from a checkpoint if the run names one; return the mean losses of all ranks."""
    module = Lit(kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)  # a checkpoint has to replace these
    trainer = make_trainer(run)
    trainer.fit(module, ckpt_path=run.resume)
    if run.save:
        trainer.save_checkpoint(run.save)
    mean = torch.tensor(module.losses)
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.tolist()


class _Under(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, tokens: Tensor) -> Any:
        return self.net(tokens)


def memory_of_reading(path: str, options: dict[str, Any], dim: int) -> dict[str, Any]:
    """Load a directory into a sharded module; return what it cost this rank, in bytes."""
    model = build("llama", **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    held = _Under(model)
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
    fully_shard(held)
    own = sum(parameter.to_local().nbytes for parameter in held.parameters())
    largest = max(parameter.numel() * parameter.element_size() for parameter in held.parameters())
    read = []
    real = FileReader.read_into

    def counted(self: FileReader, position: int, target: memoryview) -> None:
        read.append(target.nbytes)
        real(self, position, target)

    FileReader.read_into = counted  # type: ignore[method-assign]
    try:
        with LiveBytes() as live:
            nnx_checkpoint.load(path, model=held)
    finally:
        FileReader.read_into = real  # type: ignore[method-assign]
    full = {name: parameter.full_tensor() for name, parameter in held.named_parameters()}
    source = build("llama", **options)
    same = all(
        torch.equal(full[f"net.{name}"], value.bfloat16().to(full[f"net.{name}"].dtype))
        for name, value in source.named_parameters()
    )
    return {
        "own": own,
        "largest": largest,
        "tensors": live.most,
        "buffer": max(read),  # tracemalloc may crash in Python 3.11 while other threads allocate
        "read": sum(read),
        "same": same,
    }
