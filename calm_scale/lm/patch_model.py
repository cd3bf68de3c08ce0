"""The trained language model as evaluation and sampling see it: hidden states in, patches out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from calm_scale.config import ConfigError, RunConfig
from calm_scale.lm.backbone import LayerCache, attached, core_attentions
from calm_scale.lm.build import build_models
from calm_scale.lm.heads.base import GenerativeHead
from calm_scale.lm.model import CalmModel
from calm_scale.lm.sharded import read_weights
from calm_scale.lm.targets import LatentCodec, gather_all, input_latents, owned_positions
from calm_scale.lm.token_layers import VocabularyOutput
from calm_scale.runtime.finite import require_finite
from calm_scale.runtime.megatron import Layout, Precision, initialize
from calm_scale.runtime.noise import Randomness, categorical
from calm_scale.runtime.world import World

Shown = Literal["samples", "latents", "law", "probabilities"]
"""``latents``: also ``draw_latents``, ``encode`` and ``decode_ids``; ``law``: these and ``stated_law``.
``probabilities``: also ``log_probs``."""


class PatchModel(Protocol):
    """A law of the next patch given the patches before it, known through samples.

    Attributes:
        patch_size: K. vocab_size: V, without padding. device: where its states are.
        shows: what it gives of its law beside samples.
    """

    patch_size: int
    vocab_size: int
    device: torch.device
    shows: Shown

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Teacher-forced: tokens [B, P·K] → hidden states [B, P, d]; state i conditions patch i+1."""
        ...

    def draw(self, hidden: torch.Tensor, num_samples: int, generator: Randomness) -> torch.Tensor:
        """Independent next patches for hidden [..., d] → ids [num_samples, ..., K].

        ``generator``: with a stream for each row, hidden is [R, d].
        """
        ...

    def begin(self, batch_size: int, max_patches: int) -> Any:
        """An empty state for B sequences of up to ``max_patches`` patches."""
        ...

    def advance(self, state: Any, patches: torch.Tensor) -> torch.Tensor:
        """Append patches [B, n, K] to the state → hidden state of the last position [B, d]."""
        ...


class LatentModel(PatchModel, Protocol):
    """A patch model that shows its latents."""

    def draw_latents(
        self, hidden: torch.Tensor, num_samples: int, generator: Randomness, noise_scale: float = 1.0
    ) -> torch.Tensor:
        """The head's samples [num_samples, ..., l] for hidden [..., d]; ``noise_scale`` below 1 draws them nearer."""
        ...

    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The frozen autoencoder's (mean, log σ) [..., l] of patches [..., K]."""
        ...

    def decode_ids(self, latents: torch.Tensor) -> torch.Tensor:
        """The frozen decoder's most likely ids [..., K] of latents [..., l]."""
        ...


class StatedLaw(LatentModel, Protocol):
    """A patch model that states its whole law, as ``num_listed`` patches and their probabilities."""

    num_listed: int

    def stated_law(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For hidden [..., d]: ids [..., C, K], of which some may be equal, and probabilities [..., C]."""
        ...


class TokenModel(PatchModel, Protocol):
    """A patch model with K = 1 that shows its probabilities."""

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """log p(next token) [..., V] over the true vocabulary, for hidden [..., d]."""
        ...


@runtime_checkable
class CountedSampler(Protocol):
    """A patch model that sharpens another one's law: by which rule, at which temperature, after how many draws."""

    sampler: str
    temperature: float
    tally: Any


@dataclass
class CachedPrefix:
    """Keys and values of what was read so far: one cache a layer, all of the same length."""

    caches: list[LayerCache]
    max_patches: int

    @property
    def length(self) -> int:
        """Patches read."""
        return self.caches[0].length


class MegatronPatchModel:
    """A ``PatchModel`` over the Megatron model on one rank, or split over tensor-parallel ranks (PP 1).

    It also shows its parts: ``draw_latents``, ``encode`` and ``decode_ids`` for a generative head, ``log_probs``
    for the autoregressive baseline.

    Tensor-parallel ranks make the same calls in the same order, with generators of the same seed. Each holds its
    attention heads, their keys and values, and draws the same noise; the frozen decoder's rows are shared out and
    its ids gathered, so all ranks go on with the same ids.
    """

    def __init__(self, model: CalmModel, run: RunConfig, codec: LatentCodec | None) -> None:
        if not (model.pre_process and model.post_process):
            raise ConfigError("a patch model needs every layer of the language model here: load it at PP 1")
        self.patch_size = run.patch_size
        self.vocab_size = run.vocab_size
        self.device = next(model.parameters()).device
        stage = run.require_lm()
        self.num_listed = stage.head.num_listed
        of_latents: Shown = "law" if self.num_listed else "latents"
        self.shows: Shown = "probabilities" if stage.predicts_tokens else of_latents
        self._backbone, self._tensor_size = stage.backbone, stage.parallel.tensor
        self._model = model.eval()
        self._codec = codec
        self._attentions = core_attentions(model.decoder)

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``PatchModel``."""
        tokens = tokens.to(self.device)
        out: torch.Tensor = self._model(tokens, input_latents(self._model, self._codec, tokens))
        return require_finite(out, "hidden states")

    @torch.no_grad()
    def draw(self, hidden: torch.Tensor, num_samples: int, generator: Randomness) -> torch.Tensor:
        """See ``PatchModel``. The decoder's most likely ids, or one sampled token for the baseline."""
        if not self._model.is_autoregressive:
            return self.decode_ids(self.draw_latents(hidden, num_samples, generator))
        law = self.log_probs(hidden).exp().reshape(-1, self.vocab_size)
        drawn = categorical(law, num_samples, generator)
        return drawn.T.reshape(num_samples, *hidden.shape[:-1], 1)

    @torch.no_grad()
    def draw_latents(
        self, hidden: torch.Tensor, num_samples: int, generator: Randomness, noise_scale: float = 1.0
    ) -> torch.Tensor:
        """See ``LatentModel``."""
        head, hidden = self._model.head, hidden.to(self.device)
        if not isinstance(head, GenerativeHead):
            raise ConfigError("the autoregressive baseline has no latents")
        if noise_scale == 1:
            return require_finite(head.sample(hidden, num_samples, generator), "latents")
        return require_finite(head.sample_nearer(hidden, num_samples, generator, noise_scale), "latents")

    @torch.no_grad()
    def stated_law(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``StatedLaw``."""
        head = self._model.head
        if not isinstance(head, GenerativeHead):
            raise ConfigError("the autoregressive baseline has no latents")
        latents, weights = head.law(hidden.to(self.device))
        return self.decode_ids(require_finite(latents, "latents")), require_finite(weights, "weights")

    @torch.no_grad()
    def decode_ids(self, latents: torch.Tensor) -> torch.Tensor:
        """See ``LatentModel``."""
        if self._tensor_size == 1:
            return self._autoencoder().decode_ids(latents)
        rows = latents.flatten(0, -2)
        size = self._tensor_size
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % size))
        own = owned_positions(len(padded), _tensor_rank(), size)
        ids = gather_all(self._autoencoder().decode_ids(padded[own.start : own.stop]))
        return ids[: len(rows)].view(*latents.shape[:-1], self.patch_size)

    @torch.no_grad()
    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``LatentModel``."""
        mean, log_std = self._autoencoder().encode(tokens.to(self.device))
        return require_finite(mean, "posterior means"), require_finite(log_std, "posterior deviations")

    @torch.no_grad()
    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """log p(next token) [..., V] over the true vocabulary (autoregressive baseline only)."""
        head = self._model.head
        if not isinstance(head, VocabularyOutput):
            raise ConfigError("only the autoregressive baseline knows the probability of a token")
        logits = head.whole(hidden.to(self.device).reshape(-1, 1, hidden.shape[-1]))[:, 0]
        law = require_finite(torch.log_softmax(logits, dim=-1), "log-probabilities")
        return law.view(*hidden.shape[:-1], self.vocab_size)

    def begin(self, batch_size: int, max_patches: int) -> CachedPrefix:
        """See ``PatchModel``."""
        groups = self._backbone.query_groups // self._tensor_size
        shape = (batch_size, groups, max_patches, self._backbone.head_dim)
        dtype = next(self._model.parameters()).dtype
        caches = [
            LayerCache(
                torch.empty(shape, dtype=dtype, device=self.device),
                torch.empty(shape, dtype=dtype, device=self.device),
            )
            for _ in self._attentions
        ]
        return CachedPrefix(caches, max_patches)

    @torch.no_grad()
    def advance(self, state: CachedPrefix, patches: torch.Tensor) -> torch.Tensor:
        """See ``PatchModel``.

        Raises:
            ValueError: more patches than the state was begun for.
        """
        if state.length + patches.shape[1] > state.max_patches:
            raise ValueError(
                f"{state.length} + {patches.shape[1]} patches exceed the {state.max_patches} the state holds"
            )
        tokens = patches.to(self.device).flatten(1)
        latents = input_latents(self._model, self._codec, tokens)
        with attached(self._attentions, state.caches):
            last = self._model.continue_from(state.length, tokens, latents)[:, -1]
        return require_finite(last, "hidden states")

    def _autoencoder(self) -> LatentCodec:
        if self._codec is None:
            raise ConfigError("this model decodes latents: it needs the frozen autoencoder, none was given")
        return self._codec


def load_patch_model(
    run: RunConfig,
    directory: Path,
    world: World,
    codec: LatentCodec | None,
    precision: Precision | None = None,
    tensor: int = 1,
) -> MegatronPatchModel:
    """The model of a checkpoint written in any layout, on each rank or split over every ``tensor`` ranks.

    Args:
        run: the run that was trained (its parallel section is not used).
        directory: the engine's folder in the checkpoint.
        codec: the frozen autoencoder on ``world.device``; None for the autoregressive baseline.
        precision: of the arithmetic; by default as trained on a GPU, fp32 on a CPU.
        tensor: tensor-parallel size; divides the number of ranks. Consecutive ranks share a model.

    Raises:
        CheckpointMismatchError: the checkpoint holds another model.
        ConfigError: the model or the ranks cannot be split so.
    """
    single, layout = inference_layout(run, world, tensor)
    if precision is None and world.device.type == "cpu":
        precision = "fp32"
    models = build_models(single, layout, precision, for_inference=True)
    read_weights(models, directory)
    return MegatronPatchModel(models[0], single, codec)


def inference_layout(run: RunConfig, world: World, tensor: int = 1) -> tuple[RunConfig, Layout]:
    """The run with its language model whole, or split over ``tensor`` ranks, and the process groups for it."""
    stage = run.require_lm().for_inference(tensor)
    return run.model_copy(update={"lm": stage}), initialize(stage.parallel, world)


def _tensor_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())
