"""A small GAN on handwritten digits: two models and two optimizers in one prepare().

python examples/gan.py                                   # alone
paceline run --workers 2 --servers 2 examples/gan.py     # with servers and workers
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.digits import digits

NOISE = 16


def make_models() -> tuple[nn.Module, nn.Module]:
    """A generator of 8×8 images, and a discriminator."""
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    return generator, discriminator


def main() -> None:
    """Train, and tell how far the generated digits' mean image is from the real ones'."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator, discriminator = make_models()
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    data = digits(train=True)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    generator, discriminator, g_optimizer, d_optimizer, loader = paceline.prepare(
        generator, discriminator, g_optimizer, d_optimizer, loader
    )

    for epoch in paceline.epochs(args.epochs):
        for images, _ in loader:
            real = images.flatten(1)
            noise = torch.randn(len(real), NOISE)

            d_optimizer.zero_grad()
            fake = generator(noise).detach()
            d_loss = nn.functional.softplus(-discriminator(real)).mean()
            d_loss = d_loss + nn.functional.softplus(discriminator(fake)).mean()
            d_loss.backward()
            d_optimizer.step()

            g_optimizer.zero_grad()
            g_loss = nn.functional.softplus(-discriminator(generator(noise))).mean()
            g_loss.backward()
            g_optimizer.step()
            paceline.log(d_loss=d_loss.item(), g_loss=g_loss.item())
        if paceline.is_main():
            with torch.no_grad():
                made = generator(torch.randn(1000, NOISE)).mean(0)
            gap = float((made - data.tensors[0].flatten(1).mean(0)).abs().mean())
            print(f"epoch {epoch + 1}: mean image of the generated digits is {gap:.3f} from the real ones'")


if __name__ == "__main__":
    main()
