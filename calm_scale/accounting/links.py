"""How long collectives take: bandwidth of a group from the links its ranks share, and what every call costs beside.

A ring over g ranks of each node uses g of the node's network ports at once, so its bandwidth per rank is g times one
port, up to the link inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from calm_scale.accounting.communication import Group, Traffic
from calm_scale.accounting.hardware import Device

LINK_SHARE = 0.8
"""Bus bandwidth of large ring collectives inside a node over the link's datasheet figure (nccl-tests: A100 235 of 300
GB/s, H100 365 of 450, B200 682 of 900)."""

NETWORK_SHARE = 0.93
"""The same over a network port (nccl-tests: 46-48 of 50 GB/s, 24 of 25)."""

HOP_SECONDS = 34e-6
HOP_GROWTH = 0.7
"""A call over n nodes costs ``HOP_SECONDS · n^HOP_GROWTH`` beside its bytes (EFA: 55 µs on 2 nodes, 235 on 16)."""


@dataclass(frozen=True)
class Ring:
    """One group of ranks: over how many nodes it reaches, its bytes/s and the seconds a call costs beside its bytes."""

    nodes: int
    bandwidth: float
    call_seconds: float

    def seconds(self, wire: float, calls: float) -> float:
        """``calls`` collectives that send ``wire`` bytes from each rank in all."""
        return wire / self.bandwidth + calls * self.call_seconds


def ring(size: int, stride: int, device: Device, gpus_per_node: int) -> Ring:
    """The group of ``size`` ranks that stand ``stride`` ranks apart, nodes filled in rank order."""
    in_node = min(size, max(1, gpus_per_node // stride))
    nodes = ceil(size / in_node)
    link = LINK_SHARE * device.link
    if nodes == 1:
        return Ring(1, link, device.call_seconds)
    ports = NETWORK_SHARE * device.network * in_node
    return Ring(nodes, min(link, ports), device.call_seconds + HOP_SECONDS * nodes**HOP_GROWTH)


def rings(tensor: int, data: int, pipeline: int, device: Device, gpus_per_node: int) -> dict[Group, Ring]:
    """The groups of a layout; ranks are numbered tensor first, then data, then pipeline."""
    world = tensor * data * pipeline
    neighbours = min(2, pipeline)
    return {
        "tensor": ring(tensor, 1, device, gpus_per_node),
        "data": ring(data, tensor, device, gpus_per_node),
        "pipeline": ring(neighbours, world // pipeline, device, gpus_per_node),
    }


def collective_seconds(traffic: list[Traffic], group: Group, over: Ring) -> float:
    """All collectives of one group in one step."""
    mine = [item for item in traffic if item.group == group]
    return over.seconds(sum(item.wire for item in mine), sum(item.count for item in mine))
