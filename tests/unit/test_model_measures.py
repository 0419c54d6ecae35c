"""Top-k accuracy and perplexity, against values that can be worked out by hand."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.data.accuracy import accuracy
from paceline.data.perplexity import perplexity


def test_accuracy_counts_labels_among_the_highest() -> None:
    scores = torch.tensor([[3.0, 2, 1], [1, 2, 3], [2, 3, 1], [1, 3, 2]])
    data = TensorDataset(scores, torch.tensor([0, 0, 0, 0]))
    model = nn.Identity()
    assert [accuracy(model, data, top=k, batch_size=3) for k in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert model.training


def test_perplexity_of_a_uniform_guess_is_the_size_of_the_vocabulary() -> None:
    class Uniform(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 7)

    tokens = torch.zeros(5, 4, dtype=torch.long)
    assert perplexity(Uniform(), TensorDataset(tokens, tokens), batch_size=2) == pytest.approx(7)
    nothing = TensorDataset(tokens, tokens - 100)
    assert math.isnan(perplexity(Uniform(), nothing))


def test_perplexity_leaves_out_what_is_ignored() -> None:
    scores = torch.log(torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]))
    targets = torch.tensor([[0, -100]])
    assert perplexity(nn.Identity(), TensorDataset(scores, targets)) == pytest.approx(2)
