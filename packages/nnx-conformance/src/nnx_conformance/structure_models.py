"""The modules of the group `structure`: what models are made of, beyond plain layers.

Each is trained by checks of `structure` and compared with one process, so none has chance or statistics
of its own share of a batch in what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data import default_collate as collate

from nnx_conformance.task import (
    BLOCKS,
    FEATURES,
    WIDTH,
    Block,
    ConsecutiveSampler,
    Plain,
    Task,
    dataset,
    share_of,
)

# --- shapes -------------------------------------------------------------------------------------------


class Uneven(Plain):
    """Prime dimensions, and some smaller than any world size."""

    def build(self) -> None:
        """Layers that no number of ranks divides."""
        widths = (FEATURES, 7, 13, 1, 5, FEATURES)
        self.layers = nn.ModuleList(
            nn.Linear(before, after, bias=after != 13) for before, after in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Layer by layer."""
        for layer in self.layers:
            x = torch.tanh(layer(x)) if layer is not self.layers[-1] else layer(x)
        return x


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Scalars(Plain):
    """Parameters without a dimension and of one element, on the root itself and below it."""

    def build(self) -> None:
        """A factor, an offset, and one of each in a layer."""
        super().build()
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.full((1,), 0.25))
        self.scaled = _Scaled()

    def forward(self, x: Tensor) -> Tensor:
        """The plain output, scaled."""
        return super().forward(self.scaled(x)) * self.factor + self.offset


class Empty(Plain):
    """A parameter without elements, as an optional part of width zero leaves behind."""

    def build(self) -> None:
        """A second embedding of no features."""
        super().build()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The parameter takes part in the sum."""
        return super().forward(x) + (x[:, :0] @ self.nothing).sum()


class Strided(Plain):
    """Parameters whose elements do not lie in order, as after ``.to(memory_format=torch.channels_last)``."""

    def build(self) -> None:
        """A convolution over channels that lie last, and a transposed matrix."""
        super().build()
        self.convolution = nn.Conv2d(3, 4, kernel_size=2)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(FEATURES, 5).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        """The inputs make a small image; the convolution's output is spread over them again."""
        image = x.reshape(len(x), 3, 1, 2).expand(-1, -1, 2, -1)
        pixels = self.convolution(image).flatten(1).mean(1, keepdim=True)
        return super().forward(x + pixels) + torch.tanh(x @ self.turned.t()) @ self.turned


class MixedDtypes(Plain):
    """Trained parameters of two dtypes."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.head.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """The head computes in float64."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.double()).float()  # type: ignore[no-any-return]


class Quantized(Plain):
    """A layer whose weight is held in integers, and one in bfloat16, both frozen, with an adapter beside."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        levels = torch.arange(FEATURES * WIDTH).reshape(WIDTH, FEATURES) % 11 - 5
        self.levels = nn.Parameter(levels.to(torch.int8), requires_grad=False)
        self.halves = nn.Parameter((levels / 7).to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The frozen matrices are added to the embedding's."""
        frozen = self.levels.to(x.dtype) / 9 + self.halves.to(x.dtype)
        hidden = self.embed(x) + x @ frozen.t()
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class Large(Plain):
    """Repeated layers large enough to be chosen as units by engines that choose."""

    width = 136

    def build(self) -> None:
        """As the plain one, wider."""
        self.embed = nn.Linear(FEATURES, self.width)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(BLOCKS))
        self.head = nn.Linear(self.width, FEATURES)


# --- which parameters ---------------------------------------------------------------------------------


class Tied(Plain):
    """Two layers share a weight, each with a bias of its own."""

    def build(self) -> None:
        """`again` has the weight of `embed`."""
        super().build()
        self.again = nn.Linear(FEATURES, WIDTH)
        self.again.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Uses both."""
        return super().forward(x) + self.head(torch.tanh(self.again(x)))  # type: ignore[no-any-return]


class TiedBlocks(Plain):
    """Two of the repeated layers share a weight."""

    def build(self) -> None:
        """The blocks have one weight of their own each, and one together."""
        super().build()
        first, second = (block.up for block in self.blocks if isinstance(block, Block))
        second.weight = first.weight


class Frozen(Plain):
    """A layer, and a part of another, that are not trained although the optimizer has them and decays."""

    def build(self) -> None:
        """Freezes the embedding and half a block."""
        super().build()
        self.embed.requires_grad_(False)
        self.get_submodule("blocks.0.up").requires_grad_(False)

    def configure_optimizers(self) -> Any:
        """Over all parameters."""
        return self.optimizer(self.parameters(), weight_decay=0.1)


class Unused(Plain):
    """A layer that no step uses."""

    def build(self) -> None:
        """`spare` is there in vain."""
        super().build()
        self.spare = nn.Linear(WIDTH, 3)


class Alternating(Plain):
    """A layer that only every second step uses."""

    def build(self) -> None:
        """`sometimes` is for the odd steps."""
        super().build()
        self.sometimes = nn.Linear(FEATURES, FEATURES)
        self.odd = False

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Odd or even."""
        self.odd = index % 2 == 1
        return super().training_step(batch, index)

    def forward(self, x: Tensor) -> Tensor:
        """With the layer or without."""
        outputs = super().forward(x)
        return outputs + self.sometimes(x) if self.odd else outputs


class Reusing(Plain):
    """Applies the same layers twice in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Every block twice, the head on its own output once more."""
        hidden = self.embed(x)
        for block in (*self.blocks, *self.blocks):
            hidden = block(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs + self.head(torch.tanh(self.embed(outputs)))  # type: ignore[no-any-return]


# --- kinds of layers ----------------------------------------------------------------------------------


class Nested(Plain):
    """Containers in containers, of modules and of parameters."""

    def build(self) -> None:
        """Lists, dicts and sequences."""
        self.parts = nn.ModuleDict(
            {
                "enter": nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ModuleList([nn.Tanh()])[0]),
                "middle": nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])}),
            }
        )
        self.weights = nn.ParameterList([torch.randn(WIDTH, FEATURES) / 3, torch.zeros(FEATURES)])
        self.scales = nn.ParameterDict({"inner": torch.ones(WIDTH), "outer": torch.ones(FEATURES)})

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        hidden = self.parts["enter"](x)
        middle: Any = self.parts["middle"]
        for block in middle["blocks"]:
            hidden = block(hidden * self.scales["inner"])
        matrix, bias = self.weights
        return (hidden @ matrix + bias) * self.scales["outer"]  # type: ignore[no-any-return]


class Convolving(Plain):
    """Embeds integers, convolves and normalises in groups."""

    def build(self) -> None:
        """A small text model."""
        self.tokens = nn.Embedding(9, WIDTH, padding_idx=0)
        self.convolution = nn.Conv1d(WIDTH, 2 * WIDTH, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Rounds the inputs to nine tokens."""
        tokens = (x.detach() * 2).round().clamp(-4, 4).long() + 4
        hidden = torch.tanh(self.norm(self.convolution(self.tokens(tokens).transpose(1, 2))))
        return self.head(hidden.transpose(1, 2)).squeeze(-1)  # type: ignore[no-any-return]


class Recurrent(Plain):
    """A recurrent layer, which keeps a list of its weights beside the parameters."""

    def build(self) -> None:
        """Two layers, in both directions."""
        self.cells = nn.LSTM(1, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Over the features as a sequence."""
        hidden, _ = self.cells(x.unsqueeze(-1))
        return self.head(hidden).squeeze(-1)  # type: ignore[no-any-return]


class Attending(Plain):
    """A transformer's encoder layer, which uses its output projection's weight without calling it."""

    def build(self) -> None:
        """No dropout."""
        self.embed = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Over the features as a sequence."""
        return self.head(self.layer(self.embed(x.unsqueeze(-1)))).squeeze(-1)  # type: ignore[no-any-return]


class Parametrized(Plain):
    """A weight that is computed from two others by `torch.nn.utils.parametrizations`."""

    def build(self) -> None:
        """Normalises the weight of a layer in the first block."""
        super().build()
        nn.utils.parametrizations.weight_norm(self.get_submodule("blocks.0.up"))


class Recomputing(Plain):
    """Recomputes its blocks in backward, as a user writes it.

    Their dropout has to drop the same elements the second time.
    """

    recompute = True

    def build(self) -> None:
        """A dropout follows each block."""
        super().build()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Block by block."""
        hidden = self.embed(x)
        for block in self.blocks:
            part = nn.Sequential(block, self.dropout)
            hidden = checkpoint(part, hidden, use_reentrant=False) if self.recompute else part(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class StructuredBatches(Plain):
    """Batches are dicts with dicts and tuples in them; forward takes keywords and returns a dict."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Collates into a nested structure."""
        data = dataset(self.task)
        sampler = ConsecutiveSampler(len(data), **share_of(self.trainer))
        return DataLoader(data, batch_sampler=sampler, collate_fn=_structured)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def dummy_forward_args_fn(self, batch: Any) -> dict[str, Any]:
        """For engines that trace the forward."""
        return {"inputs": batch["inputs"], "scale": 2.0}

    def forward(self, *, inputs: Mapping[str, Any], scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        """The plain output in a structure."""
        left, right = inputs["halves"]
        outputs = super().forward(torch.cat([left, right], dim=1) * scale)
        return {"outputs": outputs, "parts": (outputs[:, :2], [outputs[:, 2:]])}

    def loss(self, batch: Any) -> Tensor:
        """Of the parts together."""
        outputs = self(inputs=batch["inputs"], scale=2.0)
        first, (second,) = outputs["parts"]
        return mse_loss(torch.cat([first, second], dim=1), batch["targets"])


def _structured(samples: list[Any]) -> dict[str, Any]:
    inputs, targets = collate(samples)
    return {"inputs": {"halves": (inputs[:, :4], inputs[:, 4:])}, "targets": targets, "note": "as text"}
