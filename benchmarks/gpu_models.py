"""The models that are trained on a GPU, and the one loop that every side times.

bfloat16 autocast, channels last for images, fused optimizers, inputs that stay on the GPU: only the training
step is measured. A round is CHUNK steps, at whose end the CPU waits for the GPU; its time is that of a step.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WARM_UP = 15
CHUNK = 20
SHAPES = {"resnet50": 224, "vgg16": 224, "resnet18": 32, "gpt": 512}
"""Pixels of a side, or tokens."""
CLASSES, VOCABULARY = 1000, 50304


class Block(nn.Module):
    """A transformer's."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        done: Tensor = x + self.mlp(self.before_mlp(x))
        return done


class Gpt(nn.Module):
    """124 million parameters."""

    def __init__(self, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        places = self.positions(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.norm(self.blocks(self.tokens(x) + places)) @ self.tokens.weight.T
        return logits


def build(name: str) -> nn.Module:
    """A fresh model on the GPU, the same weights in every process."""
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    if name == "gpt":
        return Gpt().cuda()
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES)
    return model.cuda().to(memory_format=torch.channels_last)


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for the transformer, SGD with momentum for the others; fused, as a user of a GPU would."""
    if name == "gpt":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)


def inputs(name: str, batch: int) -> tuple[Tensor, Tensor]:
    """Random samples and labels on the GPU."""
    size = SHAPES[name]
    if name == "gpt":
        tokens = torch.randint(0, 50000, (batch, size), device="cuda")
        return tokens, torch.randint(0, 50000, (batch * size,), device="cuda")
    images = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    return images, torch.randint(0, CLASSES, (batch,), device="cuda")


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, samples: Tensor, labels: Tensor
) -> Callable[[], Any]:
    """One training step."""

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(samples)
            loss = F.cross_entropy(out.view(-1, out.shape[-1]), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], Any], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a step in each round, after a warm-up; and when each round ended."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    seconds, ends = [], []
    began = time.perf_counter()
    for _ in range(rounds):
        for _ in range(CHUNK):
            step()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        seconds.append((ended - began) / CHUNK)
        ends.append(time.monotonic())
        began = ended
    return seconds, ends
