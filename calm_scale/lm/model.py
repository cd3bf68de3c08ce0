"""The pipeline-aware language model: compressor on the first stage, backbone everywhere, head on the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from calm_scale.config import RunConfig
from calm_scale.lm.backbone import Rotary, build_backbone
from calm_scale.lm.heads.base import GenerativeHead
from calm_scale.lm.targets import Targets, gather_all, mark_position_parallel, take_owned
from calm_scale.lm.token_layers import Compressor, PlainEmbedding, VocabularyOutput
from calm_scale.runtime.megatron import for_own_linears

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class CalmModel(nn.Module):
    """One pipeline stage (or virtual stage) of the language model.

    Args:
        run: the run; ``run.lm`` must be present.
        config: Megatron's configuration of the backbone.
        head: the generative head, on the last stage; None elsewhere and for the autoregressive baseline.
        pre_process: this is the first stage. post_process: this is the last one.
    """

    def __init__(
        self,
        run: RunConfig,
        config: TransformerConfig,
        head: GenerativeHead | None,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        device: torch.device,
        for_inference: bool = False,
    ) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        stage = run.require_lm()
        self.config = config
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        self.patch_size = run.patch_size
        self.is_autoregressive = stage.predicts_tokens
        self.splits_positions = not self.is_autoregressive and stage.parallel.head_parallelism == "position"
        own_linears = for_own_linears(config)
        self.rotary = Rotary(stage.backbone, device)
        self.compressor: Compressor | PlainEmbedding | None = None
        if pre_process and self.is_autoregressive:
            self.compressor = PlainEmbedding(own_linears, run.vocab_size)
        elif pre_process:
            self.compressor = Compressor(
                own_linears, run.vocab_size, run.patch_size, run.latent_size, stage.input_mode
            )
        self.decoder = build_backbone(
            config,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            for_inference=for_inference,
        )
        self.head: nn.Module | None = None
        if post_process:
            self.head = VocabularyOutput(own_linears, run.vocab_size) if self.is_autoregressive else head
            if self.splits_positions and head is not None:
                mark_position_parallel(head)

    def set_input_tensor(self, input_tensor: torch.Tensor | Sequence[torch.Tensor | None]) -> None:
        """Called by Megatron's schedules with the previous stage's output [P(/TP), b, d]."""
        tensor = input_tensor[0] if isinstance(input_tensor, list | tuple) else input_tensor
        self.decoder.set_input_tensor(tensor)

    def forward(
        self, tokens: torch.Tensor, latents: torch.Tensor | None = None, targets: Targets | None = None
    ) -> torch.Tensor:
        """Tokens [b, P·K] → this stage's output.

        Before the last stage: hidden states [P(/TP), b, d] for the next one. On the last stage: the loss of
        each of this rank's positions [b, p], or, without targets, the final hidden states [b, P, d].
        """
        num_positions = tokens.shape[1] // self.patch_size
        hidden = self._stage(tokens, latents, 0, num_positions)
        if not self.post_process:
            return hidden
        if targets is None:
            whole = gather_all(hidden) if self.config.sequence_parallel else hidden
            return whole.transpose(0, 1)
        return self._loss(hidden, targets)

    def continue_from(self, start: int, tokens: torch.Tensor, latents: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [b, n, d] of n further patches behind ``start`` cached ones (one rank, caches attached)."""
        num_positions = tokens.shape[1] // self.patch_size
        return self._stage(tokens, latents, start, start + num_positions).transpose(0, 1)

    def _stage(
        self, tokens: torch.Tensor, latents: torch.Tensor | None, start: int, stop: int
    ) -> torch.Tensor:
        inputs = self.compressor(tokens, latents) if self.compressor is not None else None
        return cast(
            torch.Tensor,
            self.decoder(hidden_states=inputs, attention_mask=None, rotary_pos_emb=self.rotary(start, stop)),
        )

    def _loss(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        if isinstance(self.head, VocabularyOutput):
            if targets.ids is None:
                raise ValueError("the autoregressive baseline needs target ids")
            return self.head.loss(hidden, targets.ids)
        if targets.mean is None or targets.log_std is None or targets.noise is None:
            raise ValueError("the generative head needs the posterior of the next patch and its noise")
        if self.splits_positions and not self.config.sequence_parallel:
            hidden = take_owned(hidden)
        elif self.config.sequence_parallel and not self.splits_positions:
            hidden = gather_all(hidden)
        head = cast(GenerativeHead, self.head)
        return head.loss(hidden.transpose(0, 1), targets.mean, targets.log_std, targets.noise)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's checkpoint description of this stage's weights, one key per layer and weight."""
        from megatron.core.transformer.utils import (
            ensure_metadata_has_dp_cp_group,
            sharded_state_dict_default,
        )

        metadata = ensure_metadata_has_dp_cp_group({**(metadata or {}), "non_homogeneous_layers": True})
        described: dict[str, Any] = {}
        for name, module in self.named_children():
            if any(True for _ in module.parameters()):
                described |= _describe(module, f"{prefix}{name}.", metadata, sharded_state_dict_default)
        return described


def _describe(module: Any, prefix: str, metadata: dict[str, Any], default: Any) -> dict[str, Any]:
    """Ask the innermost modules that know how they are sharded; the rest is replicated."""
    from megatron.core import parallel_state

    if hasattr(module, "sharded_state_dict"):
        return dict(module.sharded_state_dict(prefix, (), metadata))
    described: dict[str, Any] = {}
    for name, child in module.named_children():
        described |= _describe(child, f"{prefix}{name}.", metadata, default)
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if own:
        whole = default(
            module, prefix, (), metadata, tp_group=parallel_state.get_tensor_model_parallel_group()
        )
        described |= {key: value for key, value in whole.items() if key.removeprefix(prefix) in own}
    return described
