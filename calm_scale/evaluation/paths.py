"""The tokens a model puts after every true prefix of a sequence: one patch where K ≥ 4, rolled forward where K < 4.

Brier-n needs n sampled tokens after position i's true prefix. With K < 4 a path must run over ⌈4/K⌉ patches.
Only two kinds of paths can still change a score: those that equal the truth so far (their next hidden state is
the teacher-forced one, already computed) and those that equal another sample of their position (they share one
extra forward row). All other paths have diverged for good, every later indicator is 0, and they are not extended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calm_scale.evaluation.brier import ORDERS, EvaluationError
from calm_scale.runtime.noise import stream_seed

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import PatchModel

Key = tuple[int | str, ...]
_DRAW_ELEMENTS = 1 << 26  # logits alive in one draw; a function of the protocol alone, never of the batch
_ROLL_POSITIONS = 8192  # positions in one roll-forward pass


@dataclass(frozen=True)
class Windows:
    """What follows each true prefix of one sequence. W = 4.

    Attributes:
        samples: ids ``[S, T, W]``; a negative id is one that cannot match anything (a diverged path).
        truth: ids ``[T, W]``, −1 beyond the end of the sequence.
        valid: bool ``[T, W]``.
        start: int64 ``[T]`` token index of each window's first token.
    """

    samples: Tensor
    truth: Tensor
    valid: Tensor
    start: Tensor


@dataclass
class Level:
    """State of all paths before their t-th patch is drawn: hidden rows and which of them each alive path reads."""

    alive: Tensor  # bool [S, T]
    hidden: Tensor  # [R, d]
    row: Tensor  # int64 [S, T], index into hidden where alive


def true_windows(tokens: Tensor, patch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Truth ``[T, 4]``, valid ``[T, 4]`` and start ``[T]`` of the windows at patch boundaries 1, 2, … of ``[L]``.

    The last, partial patch is scored too: its windows are valid as far as the tokens go.
    """
    start = torch.arange(patch_size, max(patch_size, len(tokens)), patch_size, device=tokens.device)
    index = start[:, None] + torch.arange(ORDERS, device=tokens.device)
    valid = index < len(tokens)
    truth = torch.where(valid, tokens[index.clamp(max=len(tokens) - 1)], -1)
    return truth, valid, start


def sample_windows(model: PatchModel, tokens: Tensor, hidden: Tensor, num_samples: int, key: Key) -> Windows:
    """Draws S continuations after every patch boundary of one sequence.

    Args:
        model: the law being scored.
        tokens: ids ``[L]`` on the model's device.
        hidden: teacher-forced states ``[P, d]`` of its P = ⌊L/K⌋ full patches.
        num_samples: S.
        key: names the random stream; the draws depend on it and on the sequence alone.
    """
    truth, valid, start = true_windows(tokens, model.patch_size)
    patches = list(roll_forward(model, tokens, hidden, num_samples, key))
    samples = torch.cat(patches, dim=-1)[..., :ORDERS]
    return Windows(samples, truth, valid, start)


def roll_forward(
    model: PatchModel,
    tokens: Tensor,
    hidden: Tensor,
    num_samples: int,
    key: Key,
    watch: Callable[[int, Tensor, Level], None] | None = None,
) -> Iterator[Tensor]:
    """Yields the paths' patches ``[S, T, K]`` level by level until they span 4 tokens.

    ``watch(t, paths [S, T, t·K], level)`` sees the hidden rows each alive path stands on before patch t is drawn.
    """
    k = model.patch_size
    num_targets = len(range(k, len(tokens), k))
    depth = -(-ORDERS // k)
    paths = tokens.new_empty(num_samples, num_targets, 0)
    first = torch.arange(num_targets, device=tokens.device).expand(num_samples, num_targets)
    level = Level(torch.ones_like(first, dtype=torch.bool), hidden[:num_targets], first)
    for t in range(depth):
        if t > 0:
            level = _next_level(model, tokens, hidden, paths, level.alive)
        if watch is not None:
            watch(t, paths, level)
        patches = _draw_level(model, level, t, (*key, t))
        yield patches
        paths = torch.cat([paths, patches], dim=-1)


def _draw_level(model: PatchModel, level: Level, t: int, key: Key) -> Tensor:
    """The next patch of every alive path, ``[S, T, K]``; dead ones get ids −1−s, which equal nothing."""
    num_samples, num_targets = level.alive.shape
    k = model.patch_size
    device = level.hidden.device
    if t == 0:
        return torch.cat(
            [
                draw(model, level.hidden[rows], num_samples, (*key, rows.start))
                for rows in _chunks(num_targets, num_samples * k * model.vocab_size)
            ]
            or [torch.empty(num_samples, 0, k, dtype=torch.int64, device=device)],
            dim=1,
        )
    dead = -1 - torch.arange(num_samples, device=device)
    patches = dead[:, None, None].expand(num_samples, num_targets, k).clone()
    rows = level.row[level.alive]
    drawn = [
        draw(model, level.hidden[rows[part]], 1, (*key, part.start))[0]
        for part in _chunks(len(rows), k * model.vocab_size)
    ]
    if drawn:
        patches[level.alive] = torch.cat(drawn)
    return patches


def draw(model: PatchModel, hidden: Tensor, num_samples: int, key: Key) -> Tensor:
    """``model.draw`` from the stream named by ``key``; refuses ids outside the vocabulary (padded rows)."""
    generator = torch.Generator(hidden.device)
    generator.manual_seed(stream_seed("evaluation", *key))
    ids = model.draw(hidden, num_samples, generator)
    if ids.numel() and (int(ids.max()) >= model.vocab_size or int(ids.min()) < 0):
        raise EvaluationError(
            f"the model drew id {int(ids.max())}, the vocabulary has {model.vocab_size}: padded rows of the "
            "output must be cut off before the argmax"
        )
    return ids


def _next_level(model: PatchModel, tokens: Tensor, hidden: Tensor, paths: Tensor, alive: Tensor) -> Level:
    """Which paths go on after t patches, and the hidden state each of them stands on."""
    num_samples, num_targets, length = paths.shape
    k = model.patch_size
    done = length // k
    device = tokens.device
    position = torch.arange(num_targets, device=device)
    more = (position + 1) * k + length < len(tokens)  # a token is left to be scored after the path
    padded = torch.nn.functional.pad(tokens, (0, length), value=-1)
    truth = padded[((position + 1) * k)[:, None] + torch.arange(length, device=device)]
    alive = alive & more
    true_so_far = alive & (paths == truth).all(-1)
    same = (paths[:, None] == paths[None]).all(-1) & alive[:, None] & alive[None]  # [S, S, T]
    leader = same.long().argmax(0)  # the first sample with this path
    met = same.sum(0) > 1
    astray = alive & met & ~true_so_far
    leads = astray & (leader == torch.arange(num_samples, device=device)[:, None])
    position_of, sample_of = leads.T.nonzero(
        as_tuple=True
    )  # positions ascend: rows of like length are neighbours
    extra = _hidden_after(model, tokens, paths[sample_of, position_of], position_of)
    row = (position + done).clamp(max=len(hidden) - 1).expand(num_samples, num_targets).clone()
    number = torch.zeros(num_samples, num_targets, dtype=torch.int64, device=device)
    number[sample_of, position_of] = len(hidden) + torch.arange(len(position_of), device=device)
    row[astray] = number.gather(0, leader)[astray]
    return Level(true_so_far | astray, torch.cat([hidden, extra]) if len(extra) else hidden, row)


def _hidden_after(model: PatchModel, tokens: Tensor, path: Tensor, position: Tensor) -> Tensor:
    """State after ``tokens[:(i+1)·K]`` and a sampled path ``[R, t·K]``; rows of like length share a pass."""
    k = model.patch_size
    length = path.shape[1]
    out: list[Tensor] = []
    begin = 0
    while begin < len(position):
        end = begin + 1
        while (
            end < len(position)
            and (int(position[end]) + 1 + length // k) * (end + 1 - begin) <= _ROLL_POSITIONS
        ):
            end += 1
        rows = position[begin:end]
        width = (int(rows[-1]) + 1) * k + length
        batch = torch.nn.functional.pad(tokens, (0, length))[:width].repeat(len(rows), 1)
        at = ((rows + 1) * k)[:, None] + torch.arange(length, device=tokens.device)
        batch.scatter_(1, at, path[begin:end])
        states = model.hidden(batch)  # what stands right of a row's path is causal future: it changes nothing
        out.append(states[torch.arange(len(rows), device=tokens.device), rows + length // k])
        begin = end
    return torch.cat(out) if out else tokens.new_empty(0)


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    size = max(1, _DRAW_ELEMENTS // elements_each)
    for begin in range(0, count, size):
        yield slice(begin, min(count, begin + size))
