"""Known laws over patches, a counting model and a toy tokenizer."""

from __future__ import annotations

import pytest
import torch

from calm_scale.runtime.noise import categorical, uniform


class LawModel:
    """Row r of the hidden states holds its own categorical law over the V**K patches (base-V digits)."""

    def __init__(self, vocab_size: int, patch_size: int):
        self.vocab_size, self.patch_size = vocab_size, patch_size
        self.device, self.shows = torch.device("cpu"), "samples"
        self.num_draws = 0

    def ids(self, code):
        k, v = self.patch_size, self.vocab_size
        return torch.stack([code // v**j % v for j in reversed(range(k))], -1)

    def code(self, ids):
        place = torch.tensor([self.vocab_size**j for j in reversed(range(self.patch_size))])
        return (ids * place).sum(-1)

    def draw(self, hidden, num_samples, generator):
        rows = hidden.reshape(-1, hidden.shape[-1]).double()
        self.num_draws += num_samples * len(rows)
        flat = categorical(rows, num_samples, generator).T
        return self.ids(flat).reshape(num_samples, *hidden.shape[:-1], self.patch_size)

    def hidden(self, tokens):
        raise NotImplementedError

    begin = advance = hidden


class ScriptModel:
    """Continues the sequence 0, 1, 2, … modulo V: after a patch ending in t comes t+1, t+2, ….

    With probability ``slip`` a patch starts one later. Every ``advance`` and its width is recorded.
    """

    def __init__(self, vocab_size: int, patch_size: int, slip: float = 0.0):
        self.vocab_size, self.patch_size, self.slip = vocab_size, patch_size, slip
        self.device, self.shows = torch.device("cpu"), "samples"
        self.widths = []
        self.seen = []

    def begin(self, batch_size, max_patches):
        self.max_patches_asked = max_patches
        return

    def advance(self, state, patches):
        self.widths.append(patches.shape[1])
        self.seen.append(patches)
        return patches[:, -1, -1:].float()

    def draw(self, hidden, num_samples, generator):
        u = uniform((*hidden.shape[:-1], num_samples), generator).movedim(-1, 0)
        start = hidden[..., 0].long() + 1 + (u < self.slip).long()
        return (start[..., None] + torch.arange(self.patch_size)) % self.vocab_size

    def hidden(self, tokens):
        raise NotImplementedError


class LetterTokenizer:
    """Ids 0..25 are letters, 26 is BOS, 27 is EOS."""

    bos_id, eos_id = 26, 27
    before_document, boundary_id = (26,), 26

    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


@pytest.fixture
def law_model():
    return LawModel


@pytest.fixture
def script():
    return ScriptModel


@pytest.fixture
def letters():
    return LetterTokenizer()


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20)
