"""Small models for tests of tracing; each has a feature that a tracer gets wrong."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class Cnn(nn.Module):
    """Batch norm and in-place activations."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(8 * 16, 5)

    def forward(self, image):
        x = F.max_pool2d(self.act(self.norm(self.conv(image))), 2)
        return self.head(x.flatten(1))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        parts = [
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(width, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(
            *parts, is_causal=True, dropout_p=0.1 if self.training else 0.0
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width)))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Tied embeddings, dropout, labels, a dict of results."""

    def __init__(self, layers=2, width=16, heads=2, vocabulary=32, length=8):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits, "rows": ids.shape[0] * 2}
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)
        return {"logits": logits, "loss": loss}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, num_layers=2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        states, (last, _) = self.lstm(x)
        return self.head(states.mean(1)), last


@dataclass
class Answer:
    """The output of `Nested`."""

    sums: list
    parts: dict
    missing: object = None


class Nested(nn.Module):
    """Containers, None, numbers and a keyword-only argument in and out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch, pair, scale=2.0, *, mask=None, mode="sum"):
        a, (b, none) = pair
        assert none is None
        x = self.layer(batch["x"]) * scale + a
        x = x if mask is None else x.masked_fill(mask, 0.0)
        total = x.sum(1) if mode == "sum" else x.mean(1)
        return Answer(sums=[total, b], parts={"size": x.shape[0], "x": (x, batch["name"])})


class Experts(nn.Module):
    """Routes rows by the data."""

    def __init__(self, width=8):
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            result = result.index_add(0, rows, expert(x[rows]))
        return result


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(8, 8), Experts(), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.moe(torch.relu(self.first(x))))


class Branch(nn.Module):
    """Its control flow depends on the data, and it returns a tuple with None."""

    def forward(self, x, factor=1.0):
        if x.sum() > 0:
            return x * 2 * factor, None
        return -x, None


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(8, 8), Branch(), nn.Linear(8, 2)

    def forward(self, x):
        y, _ = self.branch(self.first(x), factor=3.0)
        return self.last(y)


class BranchingRoot(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)
        return x


class Recomputing(nn.Module):
    """Calls torch's checkpoint within its forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class WithRecomputing(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Recomputing(reentrant), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounding(nn.Module):
    def forward(self, x):
        return StraightThrough.apply(x)


class Writes(nn.Module):
    """Writes in place into values and into views of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        y = self.layer(x).clone()
        other = y.view(-1, 2, 3)
        y[:, 0] = 1.0
        y[:, 2:4].mul_(3)
        other[:, 1].add_(x[:, :3])
        flat = y.transpose(0, 1)
        flat[1] = x[:, 0].to(torch.float64)
        with torch.no_grad():
            parts = x.clone().chunk(3, dim=1)
            parts[2].zero_()
            parts[0].unsqueeze(0).permute(2, 0, 1)[1] = 5
        y += 1
        with torch.no_grad():
            self.seen[1:3] += y.mean(0)[1:3]
            self.seen.mul_(0.5)
        return y, other.sum(2), parts[1], F.relu(flat, inplace=True)


class Frozen(nn.Module):
    """Parts of it run without gradients, and a part of that with."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.student(x)
        with torch.no_grad():
            target = self.teacher(x) + y
            with torch.enable_grad():
                extra = self.student(target)
        return y * target, extra, target


class Remembers(nn.Module):
    """Leaves its last result on itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.last = None
        self.calls = []

    def forward(self, x):
        self.last = self.layer(x)
        self.calls.append(x.shape)
        return self.last


class Twice(nn.Module):
    """A submodule that remembers, called twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Remembers(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.inner(self.inner(x)[:, :8]))
