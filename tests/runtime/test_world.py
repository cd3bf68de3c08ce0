"""A world of one, threads, and ranks that never come."""

from __future__ import annotations

import os
import resource
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from calm_scale.runtime import world as room
from calm_scale.runtime.torch_settings import threads_per_rank
from calm_scale.runtime.world import WorldError, init_world
from launchers import meeting
from launchers.environment import RankFacts
from launchers.errors import LaunchError
from launchers.process import available_cores


def alone() -> RankFacts:
    return RankFacts(0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "none", None, 0)


def test_a_world_of_one_needs_nothing() -> None:
    world = init_world(device="cpu", facts=alone())
    assert (world.rank, world.world_size, world.is_first, world.backend) == (0, 1, True, "gloo")
    assert world.maximum([3, 1]) == [3, 1] and world.agree(True) and not world.agree(False)
    assert world.gather_objects("a") == ["a"] and world.broadcast_object(5) == 5
    world.barrier()
    world.close()


def test_an_interface_that_this_machine_lacks_is_named_to_a_rank_alone_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib77")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME=ib77: .* no network interface ib77"):
        init_world(device="cpu", facts=alone())


def test_threads_are_the_ranks_share_of_the_cores() -> None:
    cores = available_cores()
    assert threads_per_rank(1, {}) == cores
    assert threads_per_rank(2, {}) == max(1, cores // 2)
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "1"}) == 1
    assert threads_per_rank(cores, {"OMP_NUM_THREADS": "64"}) == 1
    init_world(device="cpu", facts=alone())
    assert torch.get_num_threads() == threads_per_rank(1, os.environ)


def test_ranks_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    store.set("calm_scale/0/rank2", "here")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    with pytest.raises(WorldError, match="2 of 4 ranks have not joined after 0 s: 1, 3"):
        room._roll_call(store, 0, 4, timedelta(seconds=0.2))


class CountingStore:
    """Counts the calls of each rank on a store that the ranks share."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("world_size", [8, 128])
def test_a_rank_asks_the_store_equally_often_in_any_world(world_size: int) -> None:
    import torch.distributed as dist

    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(world_size)]
    ranks = [
        threading.Thread(target=room._roll_call, args=(store, rank, world_size, timedelta(seconds=30)))
        for rank, store in enumerate(stores)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert {store.calls for store in stores} == {3}


def test_the_first_rank_to_run_out_of_time_speaks_for_all() -> None:
    import torch.distributed as dist

    shared = dist.HashStore()
    limit = timedelta(seconds=0.5)
    shared.set_timeout(limit)
    said: list[str] = []

    def rank(number: int) -> None:
        with pytest.raises(WorldError) as refused:
            room._roll_call(shared, number, 3, limit)
        said.append(str(refused.value))

    ranks = [threading.Thread(target=rank, args=(number,)) for number in (0, 2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    rank(1)  # too late: it does not wait for ranks that have gone
    assert len(said) == 3 and len(set(said)) == 1
    assert "1 of 3 ranks have not joined after 0 s: 1" in said[0]


def test_gpus_that_were_asked_for_and_cannot_be_used_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("CALM_SCALE_GPUS", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert init_world(facts=alone()).device.type == "cpu"
    with pytest.raises(WorldError, match=r"device is cuda, but torch .* Driver: .* CUDA_VISIBLE_DEVICES"):
        init_world(device="cuda", facts=alone())
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    with pytest.raises(WorldError, match="the job asked for 8 GPUs a node, but torch"):
        init_world(facts=alone())
    monkeypatch.setenv("CALM_SCALE_GPUS", "0")  # the job's script knows better
    assert init_world(facts=alone()).device.type == "cpu"


@pytest.mark.parametrize(
    ("launcher", "count", "index"), [("slurm", 1, 0), ("mpi", 1, 0), ("local", 4, 3), ("slurm", 4, 3)]
)
def test_the_only_visible_gpu_is_taken_where_each_task_sees_its_own(
    launcher: str, count: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    facts = replace(alone(), local_rank=3, local_world_size=4, launcher=launcher)
    assert room.choose_device("auto", facts) == torch.device("cuda", index)


def test_two_ranks_of_the_local_launcher_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(WorldError, match=r"local rank 1 has no GPU.*device=cpu"):
        room.choose_device("auto", replace(alone(), local_rank=1, launcher="local"))


def test_ranks_started_by_hand_say_what_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        by_hand = RankFacts(0, 2, 0, 2, 0, 1, "127.0.0.1", port, "env", None, 0)
        with pytest.raises(LaunchError, match=f"taken on this node.*{port}.*MASTER_PORT"):
            init_world(device="cpu", facts=by_hand)
        with pytest.raises(LaunchError, match=f"rank 1: rank 0 .* answers on none of the ports .{port}"):
            init_world(device="cpu", facts=replace(by_hand, rank=1))
    with pytest.raises(LaunchError, match="1 of 2 ranks have not joined after 0 s: 1"):
        init_world(device="cpu", facts=by_hand)


def test_the_limit_on_open_files_is_raised_for_the_ranks_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    room._raise_file_limit(8)
    assert given == []
    room._raise_file_limit(1024)
    assert given == [(2560, 4096)]
    with pytest.raises(WorldError, match=r"2048 ranks need 4608 open files each.* 4096 \(`ulimit -Hn`\)"):
        room._raise_file_limit(2048)


@pytest.mark.parametrize(("kind", "lazy"), [("cuda", "1"), ("cpu", None)])
def test_gloo_beside_nccl_connects_only_ranks_that_talk(
    kind: str, lazy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(room, "choose_device", lambda *_: torch.device(kind))
    monkeypatch.setattr(room, "_join", lambda *_: seen.append(os.environ.get("TORCH_GLOO_LAZY_INIT")))
    init_world(facts=replace(alone(), world_size=2, launcher="slurm"))
    assert seen == [lazy]
