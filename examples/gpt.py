"""A small GPT learns text, byte by byte.

python examples/gpt.py --data book.txt                           # alone; without --data on made sentences
paceline run --workers 2 --mode local:4 examples/gpt.py
"""

import argparse
import math
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.options import data_options, ends_with_message, marks_of, source_of
from paceline.data.pictures import save_text
from paceline.data.text import TextPieces, text_pieces


class SmallGpt(nn.Module):
    """A decoder-only transformer over bytes: 0.47 million parameters."""

    def __init__(self, length: int, width: int = 96, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte, at every place."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.norm(x) @ self.tokens.weight.T  # type: ignore[no-any-return]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of a byte, in nats."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def perplexity(model: nn.Module, test: TextPieces) -> float:
    """Among how many bytes the model hesitates, on average."""
    model.eval()
    losses = [
        float(loss_of(model, *batch)) for batch in DataLoader(test, batch_size=32, drop_last=len(test) > 32)
    ]
    model.train()
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def written(model: nn.Module, length: int, count: int = 500) -> str:
    """Text that the model writes by itself, beginning with a new line."""
    model.eval()
    text = torch.tensor([[ord("\n")]])
    for _ in range(count):
        chances = (model(text[:, -length:])[:, -1] / 0.7).softmax(1)
        text = torch.cat([text, torch.multinomial(chances, 1)], 1)
    model.train()
    return bytes(text[0, 1:].tolist()).decode("utf-8", errors="replace")


@ends_with_message
def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description="A small GPT on text")
    data_options(parser, epochs=2, batch_size=16, data="a text file, or a directory with text files")
    parser.add_argument("--length", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()
    train, test = text_pieces(args.data, args.length)

    torch.manual_seed(0)
    model = SmallGpt(args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    for _ in paceline.epochs(1 if args.steps else args.epochs):
        for tokens, targets in islice(loader, args.steps):
            loss = loss_of(model, tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            paceline.log(loss=loss.item())
    if paceline.is_main():
        with paceline.run_parameters():
            score = perplexity(model, test)
            if args.picture:
                save_text(args.picture, written(model, args.length).splitlines()[:12])
        paceline.log(perplexity=score, **marks_of(args.data))
        print(f"gpt, {source_of(args.data)}: perplexity {score:.3f} a byte")


if __name__ == "__main__":
    main()
