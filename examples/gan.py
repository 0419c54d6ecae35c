"""A small GAN draws digits: two models and two optimizers in one prepare().

python examples/gan.py                                   # alone, on scikit-learn's digits
paceline run --workers 2 --servers 2 examples/gan.py     # with servers and workers
"""

import argparse
import math
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.digits import digits
from paceline.data.mnist import mnist
from paceline.data.options import EMBEDDED, data_options, ends_with_message, marks_of, source_of
from paceline.data.pictures import save_images

NOISE = 16


def make_models(pixels: int) -> tuple[nn.Module, nn.Module]:
    """A generator of flat images, and a discriminator."""
    generator = nn.Sequential(nn.Linear(NOISE, 256), nn.ReLU(), nn.Linear(256, pixels), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(pixels, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    return generator, discriminator


@torch.no_grad()
def digits_drawn(generator: nn.Module, real: Tensor, labels: Tensor) -> int:
    """How many of the ten digits it draws: those that 2 % or more of its images resemble most."""
    made = generator(torch.randn(1000, NOISE))
    nearest = labels[torch.cdist(made, real).argmin(1)]
    return int((torch.bincount(nearest, minlength=10) >= 20).sum())


@ends_with_message
def main() -> None:
    """Train, and tell how many different digits the generator draws."""
    parser = argparse.ArgumentParser(description="A GAN on digits")
    data_options(
        parser, epochs=30, batch_size=32, data="a directory with MNIST's four IDX files", default=EMBEDDED
    )
    args = parser.parse_args()
    data = digits(train=True) if args.data == EMBEDDED else mnist(args.data, train=True)
    real, labels = data.tensors[0][:2000].flatten(1), data.tensors[1][:2000]

    torch.manual_seed(0)
    generator, discriminator = make_models(real.shape[1])
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    generator, discriminator, g_optimizer, d_optimizer, loader = paceline.prepare(
        generator, discriminator, g_optimizer, d_optimizer, loader
    )

    for _ in paceline.epochs(1 if args.steps else args.epochs):
        for images, _ in islice(loader, args.steps):
            noise = torch.randn(len(images), NOISE)

            d_optimizer.zero_grad()
            fake = generator(noise).detach()
            d_loss = nn.functional.softplus(-discriminator(images.flatten(1))).mean()
            d_loss = d_loss + nn.functional.softplus(discriminator(fake)).mean()
            d_loss.backward()
            d_optimizer.step()

            g_optimizer.zero_grad()
            g_loss = nn.functional.softplus(-discriminator(generator(noise))).mean()
            g_loss.backward()
            g_optimizer.step()
            paceline.log(d_loss=d_loss.item(), g_loss=g_loss.item())
    if paceline.is_main():
        with paceline.run_parameters():
            drawn = digits_drawn(generator, real, labels)
            if args.picture:
                side = math.isqrt(real.shape[1])
                with torch.no_grad():
                    made = generator(torch.randn(24, NOISE)).view(24, 1, side, side)
                save_images(args.picture, made, [""] * 24, [True] * 24)
        paceline.log(digits_drawn=drawn, **marks_of(args.data))
        print(f"gan, {source_of(args.data)}: draws {drawn} of the 10 digits")


if __name__ == "__main__":
    main()
