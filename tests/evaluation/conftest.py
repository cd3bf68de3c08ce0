"""Small exact laws that fit the PatchModel protocol; their Brier-n are known in closed form."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch


class CategoricalModel:
    """Patches are iid from ``law [V**K]``, whatever came before; ids of a patch are its base-V digits."""

    def __init__(self, law: torch.Tensor, vocab_size: int, patch_size: int):
        self.law, self.vocab_size, self.patch_size = law.double(), vocab_size, patch_size
        self.device, self.shows = torch.device("cpu"), "samples"
        self.num_hidden_rows = 0

    def hidden(self, tokens):
        self.num_hidden_rows += tokens.shape[0]
        return torch.zeros(tokens.shape[0], tokens.shape[1] // self.patch_size, 1)

    def draw(self, hidden, num_samples, generator):
        shape = (num_samples, *hidden.shape[:-1])
        flat = torch.multinomial(self.law, int(torch.tensor(shape).prod()), True, generator=generator)
        digits = [flat // self.vocab_size**j % self.vocab_size for j in reversed(range(self.patch_size))]
        return torch.stack(digits, -1).reshape(*shape, self.patch_size)

    def begin(self, batch_size, max_patches):
        return None

    def advance(self, state, patches):
        return torch.zeros(patches.shape[0], 1)


class MarkovModel:
    """A first-order chain ``transition [V, V]`` cut into patches of K; hidden is the last token, one-hot."""

    def __init__(self, transition: torch.Tensor, patch_size: int):
        self.transition = transition.double()
        self.vocab_size, self.patch_size = len(transition), patch_size
        self.device, self.shows = torch.device("cpu"), "probabilities"
        self.num_hidden_rows = 0

    def hidden(self, tokens):
        self.num_hidden_rows += tokens.shape[0]
        last = tokens.reshape(tokens.shape[0], -1, self.patch_size)[..., -1]
        return torch.nn.functional.one_hot(last, self.vocab_size).float()

    def draw(self, hidden, num_samples, generator):
        lead = hidden.shape[:-1]
        token = hidden.argmax(-1).expand(num_samples, *lead).reshape(-1)
        out = []
        for _ in range(self.patch_size):
            token = torch.multinomial(self.transition[token], 1, generator=generator)[:, 0]
            out.append(token)
        return torch.stack(out, -1).reshape(num_samples, *lead, self.patch_size)

    def log_probs(self, hidden):
        return self.transition[hidden.argmax(-1)].log()

    def begin(self, batch_size, max_patches):
        return {}

    def advance(self, state, patches):
        return torch.nn.functional.one_hot(patches[:, -1, -1], self.vocab_size).float()

    def sequences(self, count, length, seed=0):
        generator = torch.Generator().manual_seed(seed)
        token = torch.randint(self.vocab_size, (count,), generator=generator)
        out = [token]
        for _ in range(length - 1):
            token = torch.multinomial(self.transition[token], 1, generator=generator)[:, 0]
            out.append(token)
        return list(torch.stack(out, -1).numpy())

    def exact_brier(self, sequences, patch_size=None):
        """Σ of exact Brier-n over the windows at patch boundaries, divided by their number; list of four."""
        k = patch_size or self.patch_size
        t = self.transition
        collide = [torch.ones(self.vocab_size).double()]
        for _ in range(4):
            collide.append((t**2) @ collide[-1])
        totals = []
        for n in range(1, 5):
            values = []
            for seq in sequences:
                for start in range(k, len(seq) - n + 1, k):
                    chain = seq[start - 1 : start + n]
                    p = float(torch.stack([t[int(a), int(b)] for a, b in pairwise(chain)]).prod())
                    values.append(2 * p - float(collide[n][int(seq[start - 1])]))
            totals.append(sum(values) / len(values))
        return totals


@pytest.fixture
def categorical():
    return CategoricalModel


@pytest.fixture
def markov():
    return MarkovModel


@pytest.fixture
def chain():
    """A transition matrix over 3 tokens whose Brier-1..4 are all well above zero."""
    return torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.3, 0.1, 0.6]])
