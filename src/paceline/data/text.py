"""Text as bytes, cut into pieces to learn the next byte from, and a generated stand-in."""

import random
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.folders import existing_folder
from paceline.data.options import SYNTHETIC
from paceline.exceptions import DataError

__all__ = ["TextPieces", "generated_text", "text_pieces"]

ENDINGS = (".txt", ".md", ".rst")


class TextPieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of `length` bytes, one behind the other, and the same bytes one further: inputs and targets."""

    def __init__(self, content: bytes, length: int) -> None:
        self.tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        piece = self.tokens[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


def text_pieces(data: str | Path, length: int, *, test_share: float = 0.1) -> tuple[TextPieces, TextPieces]:
    """The training and the test part (the end) of a text.

    Args:
        data: a text file, or a directory whose files (.txt, .md, .rst) are read in the order of their names;
            or "synthetic".
        length: bytes of a piece.
        test_share: for testing.

    Raises:
        DataError: no text, or too little.
    """
    if data == SYNTHETIC:
        content, source = generated_text(400_000).encode(), "the generated text"
    elif Path(data).is_file():
        content, source = Path(data).read_bytes(), str(data)
    else:
        root = existing_folder(data)
        files = sorted(file for file in root.rglob("*") if file.suffix in ENDINGS and file.is_file())
        if not files:
            raise DataError(f"{root} has no text files ({', '.join(ENDINGS)}).")
        content = b"\n".join(file.read_bytes() for file in files)
        source = f"the {len(files)} text files of {root}"
    cut = int(len(content) * (1 - test_share))
    if min(cut, len(content) - cut) <= length:
        raise DataError(
            f"{source}: {len(content):,} bytes are too few for pieces of {length:,} to train and to test."
        )
    return TextPieces(content[:cut], length), TextPieces(content[cut:], length)


_WORDS = {
    "animal": ("cat", "dog", "horse", "bird", "hen", "crow", "whale", "goat", "seal", "snail"),
    "place": ("forest", "harbour", "village", "market", "garden", "river", "tower", "bridge"),
    "quality": ("old", "young", "tired", "clever", "hungry", "quiet", "lonely", "brave"),
    "verb": ("watches", "follows", "greets", "avoids", "remembers", "invites"),
    "way": ("slowly", "gladly", "often", "rarely", "secretly", "at night"),
}


def generated_text(length: int, *, seed: int = 0) -> str:
    """About `length` characters of sentences that follow a few rules, among them some over a distance.

    A sentence repeats the animal that it began with, and sums are right: a model that has learned only which
    letters follow each other does worse than one that looks further back.
    """
    dice = random.Random(seed)

    def word(kind: str) -> str:
        return dice.choice(_WORDS[kind])

    lines, count = [], 0
    while count < length:
        animal, other = dice.sample(_WORDS["animal"], 2)
        a, b = dice.randrange(10), dice.randrange(10)
        old, new = word("quality"), word("quality")
        sentences = (
            f"The {old} {animal} {word('verb')} the {other}, and the {animal} is {new}.",
            f"In the {word('place')} the {animal} {word('verb')} the {old} {other} {word('way')}.",
            f"{a} {animal}s and {b} {animal}s are {a + b} {animal}s.",
        )
        lines.append(dice.choice(sentences))
        count += len(lines[-1]) + 1
    return "\n".join(lines)
