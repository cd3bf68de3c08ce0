"""The trained language model as evaluation and sampling see it: hidden states in, patches out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.parallel import ParallelConfig
from calm_scale.lm.attention import LayerCache, attached
from calm_scale.lm.backbone import core_attentions
from calm_scale.lm.build import build_models, language_model_stage
from calm_scale.lm.heads import GenerativeHead
from calm_scale.lm.model import CalmModel
from calm_scale.lm.sharded import read_weights
from calm_scale.lm.targets import LatentCodec, input_latents
from calm_scale.lm.vocabulary import VocabularyOutput
from calm_scale.runtime.megatron import Layout, Precision, Ranks, initialize


class PatchModel(Protocol):
    """A law of the next patch given the patches before it, known through samples.

    Attributes:
        patch_size: K. vocab_size: V, without padding.
    """

    patch_size: int
    vocab_size: int

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Teacher-forced: tokens [B, P·K] → hidden states [B, P, d]; state i conditions patch i+1."""
        ...

    def draw(self, hidden: torch.Tensor, num_samples: int, generator: torch.Generator) -> torch.Tensor:
        """Independent next patches for hidden [..., d] → ids [num_samples, ..., K]."""
        ...

    def begin(self, batch_size: int, max_patches: int) -> Any:
        """An empty state for B sequences of up to ``max_patches`` patches."""
        ...

    def advance(self, state: Any, patches: torch.Tensor) -> torch.Tensor:
        """Append patches [B, n, K] to the state → hidden state of the last position [B, d]."""
        ...


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
    """A ``PatchModel`` over the Megatron model on one rank (TP 1, PP 1).

    It also shows its parts: ``draw_latents``, ``encode`` and ``decode_ids`` for a generative head, ``log_probs``
    for the autoregressive baseline.
    """

    def __init__(self, model: CalmModel, run: RunConfig, codec: LatentCodec | None) -> None:
        if not (model.pre_process and model.post_process):
            raise ConfigError(
                "a patch model needs the whole language model on one rank: load it at TP 1, PP 1"
            )
        self.patch_size = run.patch_size
        self.vocab_size = run.vocab_size
        self.device = next(model.parameters()).device
        self._backbone = language_model_stage(run).backbone
        self._model = model.eval()
        self._codec = codec
        self._attentions = core_attentions(model.decoder)

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ``PatchModel``."""
        tokens = tokens.to(self.device)
        out: torch.Tensor = self._model(tokens, input_latents(self._model, self._codec, tokens))
        return out

    @torch.no_grad()
    def draw(self, hidden: torch.Tensor, num_samples: int, generator: torch.Generator) -> torch.Tensor:
        """See ``PatchModel``. The decoder's most likely ids, or one sampled token for the baseline."""
        if not self._model.is_autoregressive:
            return self.decode_ids(self.draw_latents(hidden, num_samples, generator))
        law = self.log_probs(hidden).exp().reshape(-1, self.vocab_size)
        drawn = torch.multinomial(law, num_samples, replacement=True, generator=generator)
        return drawn.T.reshape(num_samples, *hidden.shape[:-1], 1)

    @torch.no_grad()
    def draw_latents(
        self, hidden: torch.Tensor, num_samples: int, generator: torch.Generator
    ) -> torch.Tensor:
        """The head's samples [num_samples, ..., l] for hidden [..., d]."""
        head = self._model.head
        if not isinstance(head, GenerativeHead):
            raise ConfigError("the autoregressive baseline has no latents")
        return head.sample(hidden.to(self.device), num_samples, generator)

    @torch.no_grad()
    def decode_ids(self, latents: torch.Tensor) -> torch.Tensor:
        """The frozen decoder's most likely ids [..., K] of latents [..., l]."""
        return self._autoencoder().decode_ids(latents)

    @torch.no_grad()
    def encode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The frozen encoder's posterior (mean, log σ) [..., l] of patches [..., K]."""
        return self._autoencoder().encode(tokens.to(self.device))

    @torch.no_grad()
    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """log p(next token) [..., V] over the true vocabulary (autoregressive baseline only)."""
        head = self._model.head
        if not isinstance(head, VocabularyOutput):
            raise ConfigError("only the autoregressive baseline knows the probability of a token")
        logits = head(hidden.to(self.device).reshape(-1, 1, hidden.shape[-1]))[:, 0, : self.vocab_size]
        return torch.log_softmax(logits, dim=-1).view(*hidden.shape[:-1], self.vocab_size)

    def begin(self, batch_size: int, max_patches: int) -> CachedPrefix:
        """See ``PatchModel``."""
        shape = (batch_size, self._backbone.query_groups, max_patches, self._backbone.head_dim)
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
            return self._model.continue_from(state.length, tokens, latents)[:, -1]

    def _autoencoder(self) -> LatentCodec:
        if self._codec is None:
            raise ConfigError("this model decodes latents: it needs the frozen autoencoder, none was given")
        return self._codec


def load_patch_model(
    run: RunConfig,
    directory: Path,
    world: Ranks,
    codec: LatentCodec | None,
    precision: Precision | None = None,
) -> MegatronPatchModel:
    """The model of a checkpoint written in any layout, whole on each rank of the world.

    Args:
        run: the run that was trained (its parallel section is not used).
        directory: the engine's folder in the checkpoint.
        codec: the frozen autoencoder on ``world.device``; None for the autoregressive baseline.
        precision: of the arithmetic; by default as trained on a GPU, fp32 on a CPU.

    Raises:
        CheckpointMismatchError: the checkpoint holds another model.
    """
    single, layout = single_rank_layout(run, world)
    if precision is None and world.device.type == "cpu":
        precision = "fp32"
    models = build_models(single, layout, precision, for_inference=True)
    read_weights(models, directory)
    return MegatronPatchModel(models[0], single, codec)


def single_rank_layout(run: RunConfig, world: Ranks) -> tuple[RunConfig, Layout]:
    """The run with its language model unsplit, and the process groups for it."""
    stage = language_model_stage(run)
    parallel = ParallelConfig(pipeline_layout="even")
    single = run.model_copy(update={"lm": stage.model_copy(update={"parallel": parallel})})
    return single, initialize(parallel, world)
