"""The built-in replica check: what must be the same bytes on several ranks is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from calm_scale.config import CalmScaleError
from calm_scale.lm.model import CalmModel
from calm_scale.runtime.megatron import Layout


class ReplicaMismatchError(CalmScaleError):
    """Copies of one weight have drifted apart."""

    may_pass = True


def check_replicas(models: Sequence[CalmModel], layout: Layout) -> None:
    """Compare every weight over its data-parallel replicas, and every unsplit one over tensor-parallel ranks.

    Raises:
        ReplicaMismatchError: on every rank of the group that disagrees, naming the first weights and the ranks.
    """
    digests = {
        f"{index}.{name}": (_digest(parameter), bool(getattr(parameter, "tensor_model_parallel", False)))
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }
    whole = {name: digest for name, (digest, _) in digests.items()}
    unsplit = {name: digest for name, (digest, split) in digests.items() if not split}
    _compare(whole, layout.data_group, "data-parallel")
    _compare(unsplit, layout.tensor_group, "tensor-parallel")


def _compare(mine: dict[str, str], group: dist.ProcessGroup, kind: str) -> None:
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    drifted = [name for name in mine if len({theirs[name] for theirs in everyone}) > 1]
    if drifted:
        ranks = dist.get_process_group_ranks(group)
        raise ReplicaMismatchError(
            f"{len(drifted)} weights differ between the {kind} ranks {ranks}, first {', '.join(drifted[:3])}: "
            "a gradient was not reduced over this group, or a rank computes wrongly"
        )


def _digest(parameter: torch.Tensor) -> str:
    raw = parameter.detach().contiguous().cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
