"""Ranks meet on the first port that rank 0 can take, whoever listens on the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launchers import meeting
from launchers.environment import port_candidates, world_identity
from launchers.errors import LaunchError
from launchers.meeting import ephemeral_start

ROOT = Path(__file__).resolve().parents[2]


def taken() -> socket.socket:
    """Somebody else's port: it accepts connections and never says a word."""
    return socket.create_server(("", 0))


def free_port() -> int:
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


def test_every_rank_finds_rank_0_behind_a_silent_port_and_another_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.3)
    with taken() as silent, meeting.take_port([free_port()]) as other, ThreadPoolExecutor() as pool:
        candidates = [silent.getsockname()[1], other.getsockname()[1], free_port()]
        elsewhere = pool.submit(meeting.welcome, other, "job 2", 2, 3.0)
        ranks = [
            pool.submit(meeting.find_port, "127.0.0.1", candidates, "job 1", rank, 20.0) for rank in (1, 2, 3)
        ]
        with meeting.take_port(candidates) as mine:
            assert mine.getsockname()[1] == candidates[2]
            meeting.welcome(mine, "job 1", 4, 20.0)
        assert [rank.result() for rank in ranks] == [candidates[2]] * 3
        with pytest.raises(LaunchError, match="have not joined"):
            elsewhere.result()


def test_missing_ranks_are_named() -> None:
    with meeting.take_port([free_port()]) as listener:
        port = listener.getsockname()[1]
        caller = threading.Thread(target=meeting.find_port, args=("127.0.0.1", [port], "x", 2, 5.0))
        caller.start()
        with pytest.raises(LaunchError, match="2 of 4 ranks have not joined after 1 s: 1, 3"):
            meeting.welcome(listener, "x", 4, 1.0)
        caller.join()
    with pytest.raises(LaunchError, match=rf"rank 1: rank 0 .* \[{port}\] of 127\.0\.0\.1"):
        meeting.find_port("127.0.0.1", [port], "x", 1, 0.3)


def test_hundreds_of_slow_ranks_are_answered_side_by_side_and_at_the_first_try() -> None:
    num_ranks, talks = 300, []

    def slow_rank(rank: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            talks.append(rank)
            connection.sendall(f"calm-scale x {rank} 0.0\n".encode())
            assert meeting._line(connection) == "here x"
            time.sleep(0.2)  # one after the other these would take a minute
            connection.sendall(b"coming\n")

    with meeting.take_port([free_port()]) as listener, ThreadPoolExecutor(num_ranks) as pool:
        port = listener.getsockname()[1]
        started = time.monotonic()
        ranks = [pool.submit(slow_rank, rank) for rank in range(1, num_ranks)]
        meeting.welcome(listener, "x", num_ranks, 60.0)
        assert time.monotonic() - started < 30
        for rank in ranks:
            rank.result()
    assert sorted(talks) == list(range(1, num_ranks))


def test_the_time_to_join_counts_from_the_first_rank_that_came() -> None:
    with meeting.take_port([free_port()]) as listener:
        port = listener.getsockname()[1]
        caller = threading.Thread(target=meeting._asked, args=("127.0.0.1", port, "x", 1, 29.0, 1.0))
        caller.start()
        started = time.monotonic()
        with pytest.raises(LaunchError, match="1 of 3 ranks have not joined after 30 s: 2"):
            meeting.welcome(listener, "x", 3, 30.0)
        assert time.monotonic() - started < 25
        caller.join()


def test_what_comes_after_the_meeting_is_left_for_the_store() -> None:
    """A rank that came early connects to the store at once: not before the last rank is here, nor to the meeting."""
    with meeting.take_port([free_port()]) as listener:
        port = listener.getsockname()[1]
        connected: list[socket.socket] = []

        def rank(number: int, after: float) -> None:
            time.sleep(after)
            meeting.find_port("127.0.0.1", [port], "x", number, 30.0)
            connected.append(socket.create_connection(("127.0.0.1", port), timeout=120))
            connected[-1].sendall(b"store")

        ranks = [threading.Thread(target=rank, args=(1, 0.0)), threading.Thread(target=rank, args=(2, 1.0))]
        for thread in ranks:
            thread.start()
        meeting.welcome(listener, "x", 3, 30.0)
        listener.settimeout(10)
        for _ in ranks:
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.recv(5) == b"store"
        for thread in ranks:
            thread.join()
        for client in connected:
            client.close()


def test_when_all_candidates_are_taken() -> None:
    with taken() as one, pytest.raises(LaunchError, match=r"taken on this node.*another port"):
        meeting.take_port([one.getsockname()[1]])


def test_candidates_are_shared_bounded_and_below_the_ephemeral_range() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    ranks = [{**step, "SLURM_PROCID": str(rank), "CALM_SCALE_MASTER_PORT": "15001"} for rank in (0, 1)]
    found = port_candidates(ranks[0])
    assert found == port_candidates(ranks[1])
    assert world_identity(ranks[0]) == world_identity(ranks[1])
    assert found[0] == 15001
    assert len(found) == len(set(found)) == 16
    assert all(port < max(ephemeral_start(), 15002) for port in found)
    assert world_identity({**ranks[0], "SLURM_RESTART_COUNT": "1"}) != world_identity(ranks[0])


PROGRAM = """
from calm_scale.runtime.world import init_world
world = init_world(device="cpu")
print("met", world.rank, world.gather_objects(world.rank), __import__("os").environ["MASTER_PORT"])
world.close()
"""


@pytest.mark.ranks
def test_two_ranks_of_a_step_train_on_another_port_when_the_first_is_taken() -> None:
    with taken() as silent:
        first = silent.getsockname()[1]
        step = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_NODEID": "0",
            "CALM_SCALE_MASTER_PORT": str(first),
            "OMP_NUM_THREADS": "1",
        }
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**clean, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    second = port_candidates({**step, "SLURM_PROCID": "0"})[1]
    assert f"met 0 [0, 1] {second}" in said[0][0]
    assert f"met 1 [0, 1] {second}" in said[1][0]
    assert f"port {first} is taken on this node: meeting on {second}" in said[0][1]
