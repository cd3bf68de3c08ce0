"""Ranks under mpirun: facts, signals and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from launchers.errors import LaunchError
from launchers.mpi import Host, command, parse_hosts

pytestmark = pytest.mark.ranks
RANK = """
import dataclasses, json, pathlib, signal, sys, time
from launchers.environment import facts
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
me = facts()
folder = pathlib.Path(sys.argv[1])
(folder / f".{me.rank}").write_text(json.dumps(dataclasses.asdict(me)))
(folder / f".{me.rank}").rename(folder / f"{me.rank}.json")
end = time.monotonic() + 20
while not got and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(0.5)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
sys.exit(75 if got else 1)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_ranks_know_themselves_and_hear_signals(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "RANK": "7",
        "WORLD_SIZE": "9",
    }
    line = [sys.executable, "-m", "launchers.mpi", "--hosts", "localhost:2", "--"]
    process = subprocess.Popen([*line, sys.executable, str(program), str(tmp_path)], env=env)
    end = time.monotonic() + 30
    while len(list(tmp_path.glob("[01].json"))) < 2:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.05)
    while process.poll() is None:  # until the end: the ranks are slow to leave
        process.send_signal(number)
        time.sleep(0.1)
        assert time.monotonic() < end + 30, "the ranks did not end"
    assert process.returncode == 75
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(f["rank"], f["world_size"], f["local_rank"], f["launcher"]) for f in found] == [
        (0, 2, 0, "mpi"),
        (1, 2, 1, "mpi"),
    ]
    assert found[0]["master_port"] == found[1]["master_port"]


def test_hosts_and_what_is_exported() -> None:
    assert parse_hosts("a:8, b") == [Host("a", 8), Host("b", 1)]
    line = command(
        ["x"], parse_hosts("a:8,b:8"), {"NCCL_DEBUG": "INFO", "PYTHONSAFEPATH": "1", "SECRET": "1"}
    )
    assert line[line.index("-n") + 1] == "16"
    assert line[line.index("--host") + 1] == "a:8,b:8"
    assert "NCCL_DEBUG" in line
    assert "PYTHONSAFEPATH" in line, (
        "ranks on other machines keep the current folder out of their imports too"
    )
    assert "SECRET" not in line


@pytest.mark.parametrize(
    "name",
    [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TRITON_CACHE_DIR",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "CUBLAS_WORKSPACE_CONFIG",
        "UCX_TLS",
        "FI_PROVIDER",
        "https_proxy",
        "NO_PROXY",
        "PYTHONSAFEPATH",
    ],
)
def test_settings_of_the_libraries_reach_every_host(name: str) -> None:
    line = command(["x"], parse_hosts("a:8,b:8"), {name: "1", "TORCHELASTIC_RUN_ID": "none", "SECRET": "1"})
    assert [word for option, word in pairwise(line) if option == "-x"] == [name]


@pytest.mark.parametrize("text", ["", "a:0", "a:x", ":4"])
def test_malformed_hosts_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="NAME"):
        parse_hosts(text)


@pytest.mark.parametrize("module", ["launchers.mpi", "launchers.local"])
def test_help_is_printed_in_any_encoding(module: str) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", module, "--help"], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"the command, after --" in done.stdout
