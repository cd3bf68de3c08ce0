"""Who am I: one precedence, every contradiction refused with its values."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launchers.environment import facts, port_candidates, refuse_unknown_interface
from launchers.errors import ContradictionError, LaunchError
from launchers.meeting import derive_ports, ephemeral_start

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_JOB_NODELIST": "n[01-09]",
    "SLURM_RESTART_COUNT": "2",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}


def somewhere(_: str) -> str | None:
    return "10.0.0.1"


def test_bare_process_is_alone() -> None:
    found = facts({})
    assert (found.rank, found.world_size, found.launcher, found.job_id) == (0, 1, "none", None)
    assert found.master_addr == "127.0.0.1"


def test_torchrun_alone() -> None:
    found = facts(TORCHRUN, somewhere)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.node_rank, found.num_nodes, found.master_addr, found.master_port) == (1, 2, "n1", 29500)
    assert (found.launcher, found.restart_count) == ("torchrun", 1)


def test_step_smaller_than_the_job() -> None:
    found = facts({**STEP, "SLURM_JOB_NUM_NODES": "9", "SLURM_TASKS_PER_NODE": "8(x9)"}, somewhere)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (2, 3, 0, 1)
    assert (found.node_rank, found.num_nodes, found.master_addr) == (1, 2, "n01")
    assert (found.launcher, found.job_id, found.restart_count) == ("slurm", "77", 2)


def test_one_torchrun_per_node_under_srun_is_no_contradiction() -> None:
    step = {**STEP, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    found = facts({**step, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **TORCHRUN}, somewhere)
    assert (found.rank, found.world_size, found.launcher) == (5, 8, "torchrun")
    assert found.restart_count == 3


def test_one_world_per_task_is_refused_with_all_values() -> None:
    lonely = {
        **TORCHRUN,
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    with pytest.raises(ContradictionError) as caught:
        facts({**STEP, **lonely})
    for value in ("WORLD_SIZE=4", "GROUP_WORLD_SIZE=1", "SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=3"):
        assert value in str(caught.value)


def test_stale_rank_under_srun_is_refused() -> None:
    stale = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(ContradictionError, match=r"(?s)env says rank 0 of 2.*slurm says rank 2 of 3.*RANK=0"):
        facts({**STEP, **stale})


@pytest.mark.parametrize("stale", [{"RANK": "3"}, {"WORLD_SIZE": "4"}])
def test_half_set_rank_is_refused(stale: dict[str, str]) -> None:
    with pytest.raises(ContradictionError, match=next(iter(stale))):
        facts(stale)


def test_agreeing_layers_are_fine() -> None:
    same = {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n01",
        "MASTER_PORT": "5",
    }
    assert facts({**STEP, **same}, somewhere).rank == 2


def test_interactive_allocation_with_a_bare_process_is_alone() -> None:
    shell = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}
    found = facts(shell)
    assert (found.world_size, found.job_id, found.launcher) == (1, "5", "none")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_tasks_without_a_step_are_refused(rank: str) -> None:
    with pytest.raises(ContradictionError, match=r"(?s)2 tasks.*SLURM_NTASKS=2"):
        facts({"SLURM_PROCID": rank, "SLURM_NTASKS": "2"})


def test_alone_on_request() -> None:
    assert facts({**STEP, "CALM_SCALE_LAUNCHER": "none"}).world_size == 1


def test_mpi_and_what_prep_leaves_behind() -> None:
    found = facts(OMPI)
    assert (found.rank, found.world_size, found.launcher) == (1, 2, "mpi")
    other = facts({**OMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert other.master_port == found.master_port
    singleton = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert facts({**TORCHRUN, **singleton}, somewhere).world_size == 8


def test_mpirun_of_torchruns_is_refused() -> None:
    inner = {
        **TORCHRUN,
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    with pytest.raises(ContradictionError, match="mpi says rank 1 of 2"):
        facts({**OMPI, **inner})


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(LaunchError, match="no address on this node"):
        facts(STEP, lambda _: None)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_loopback_is_refused_for_several_nodes(address: str) -> None:
    with pytest.raises(LaunchError, match="loopback"):
        facts(STEP, lambda _: address)
    assert facts({**STEP, "CALM_SCALE_ALLOW_LOOPBACK": "1"}, lambda _: address).num_nodes == 2
    assert facts({**STEP, "CALM_SCALE_MASTER_ADDR": "10.0.0.1"}, lambda a: a).master_addr == "10.0.0.1"


@pytest.mark.parametrize(
    "bad",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "tcp"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ],
)
def test_impossible_values_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(LaunchError):
        facts(bad)


def test_ports_are_agreed_and_below_the_ephemeral_range() -> None:
    on_rank_2, on_rank_0 = (
        port_candidates(STEP),
        port_candidates({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}),
    )
    assert on_rank_0 == on_rank_2
    assert facts(STEP, somewhere).master_port == on_rank_2[0]
    assert len(set(on_rank_2)) == len(on_rank_2)
    for job in range(200):
        assert all(1024 <= port < ephemeral_start() for port in derive_ports(str(job)))


def test_neighbouring_jobs_do_not_share_ports() -> None:
    first, second = set(derive_ports("1000.0.0")), set(derive_ports("1001.0.0"))
    assert not first & second


def test_importing_brings_no_torch() -> None:
    code = "import launchers.environment, launchers.local, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_interface_that_this_node_lacks_is_named_before_anything_joins() -> None:
    from launchers.errors import InterfaceError
    from launchers.local import launch

    refuse_unknown_interface({"GLOO_SOCKET_IFNAME": "lo"})
    refuse_unknown_interface({})
    with pytest.raises(
        InterfaceError, match=r"GLOO_SOCKET_IFNAME=lo,ib77: .* no network interface ib77; it has .*lo"
    ):
        launch(["true"], 2, {"GLOO_SOCKET_IFNAME": "lo,ib77"})
    assert InterfaceError.exit_code == 2
