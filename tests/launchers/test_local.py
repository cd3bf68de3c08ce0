"""The local launcher with plain stand-in ranks: signals, failures, exit codes and orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.errors import LaunchError
from launchers.local import launch, rank_environment
from launchers.meeting import PortLease

pytestmark = pytest.mark.ranks

RANK_PROGRAM = """
import json, os, signal, subprocess, sys, time
rank, folder, mode = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
got = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) if mode != "starting" else ():
    signal.signal(number, lambda n, _: got.append(n))
helper = subprocess.Popen(["sleep", "600"])
with open(f"{folder}/{rank}.json.tmp", "w") as file:
    json.dump({"pid": os.getpid(), "helper": helper.pid, "env": dict(os.environ)}, file)
os.rename(f"{folder}/{rank}.json.tmp", f"{folder}/{rank}.json")
print(f"rank {rank} says hello", file=sys.stderr, flush=True)
while mode in ("crash", "killed") and rank == 1 and not os.path.exists(f"{folder}/0.json"):
    time.sleep(0.01)
if mode == "crash" and rank == 1:
    time.sleep(0.1)
    print("boom on purpose", file=sys.stderr)
    sys.exit(7)
if mode == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "done":
    sys.exit(0)
end = time.monotonic() + 30
while time.monotonic() < end:
    if got and mode != "stubborn":
        time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
        open(f"{folder}/{rank}.saved", "w").write(str(got[0]))
        sys.exit(75)
    time.sleep(0.02)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK_PROGRAM)
    return path


def start(
    program: Path, mode: str, *more: str, nproc: int = 2, options: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    folder = program.parent
    command = [sys.executable, "-m", "launchers.local", "--nproc", str(nproc), *options, "--"]
    command += [sys.executable, str(program), str(folder), mode, *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: all((folder / f"{rank}.json").exists() for rank in range(nproc)))
    return process


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    facts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [fact[key] for fact in facts for key in ("pid", "helper")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_all_done_is_zero_and_leaves_nothing(program: Path) -> None:
    process = start(program, "done")
    assert process.wait(120) == 0
    wait_for(lambda: not any(alive(pid) for pid in pids(program.parent)))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_every_rank_and_a_slow_save_is_awaited(program: Path, number: signal.Signals) -> None:
    process = start(program, "run", "1.0")
    process.send_signal(number)
    assert process.wait(120) == 75
    for rank in range(2):
        heard = signal.SIGTERM if number == signal.SIGHUP else number
        assert (program.parent / f"{rank}.saved").read_text() == str(int(heard))


def test_ranks_that_end_at_once_when_told_are_no_failure_to_report(program: Path) -> None:
    process = start(program, "starting")
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == "ended by SIGTERM as asked, before the ranks had anything to save"
    assert "failed first" not in said


SAVING = """
import os, signal, sys, time
from calm_scale.runtime.departure import StopSignals
stop = StopSignals().install()
class Leaving:
    def __del__(self, sleep=time.sleep, write=os.write):
        write(2, b"leaving\\n")
        sleep(0.6)
kept = Leaving()
sys.stderr.write("ready\\n")
while not stop.received:
    time.sleep(0.01)
time.sleep(0.4 * int(os.environ["RANK"]))
os.write(2, b"saved\\n")
sys.exit(75)
"""


def test_a_signal_every_moment_until_the_end_leaves_the_exit_code(tmp_path: Path) -> None:
    """Python shuts down slowly where a large library is loaded; signals then hit ranks and launcher as they leave."""
    program = tmp_path / "rank.py"
    program.write_text(SAVING)
    command = [sys.executable, "-m", "launchers.local", "--nproc", "2", "--log-dir", str(tmp_path), "--"]
    process = subprocess.Popen([*command, sys.executable, str(program)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "ready" not in process.stderr.readline():
        assert process.poll() is None
    wait_for(lambda: "ready" in (tmp_path / "rank_0001.log").read_text())
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    said = process.stderr.read()
    assert process.returncode == 75, said
    assert "leaving" in said and "before the ranks had anything to save" not in said


def test_first_failing_rank_is_named_with_its_last_lines(program: Path) -> None:
    process = start(program, "crash", options=("--end-others-within", "1"))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 7
    assert "rank 1 on" in said
    assert "boom on purpose" in said
    assert "rank 0 says hello" in said  # rank 0 is streamed


def test_others_are_ended_within_the_set_time_even_when_deaf(program: Path) -> None:
    began = time.monotonic()
    process = start(program, "crash", options=("--end-others-within", "0.5"))
    assert process.wait(120) == 7
    code = launch([sys.executable, "-c", DEAF], 2, end_others_within=0.5)
    assert code == 128 + signal.SIGKILL
    assert time.monotonic() - began < 500


DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def test_grace_bounds_a_save_that_never_ends(program: Path) -> None:
    process = start(program, "stubborn", options=("--grace", "0.5"))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 50


def test_no_orphans_when_the_launcher_is_killed(program: Path) -> None:
    process = start(program, "run")
    everyone = pids(program.parent)
    assert all(alive(pid) for pid in everyone)
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in everyone))


def test_a_killed_rank_is_called_so(program: Path) -> None:
    process = start(program, "killed", options=("--end-others-within", "0.5"))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 on" in said
    assert "SIGKILL" in said


def test_environment_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = {"GROUP_RANK": "4", "TORCHELASTIC_RUN_ID": "old", "RANK": "9", "HOME": "/h"}
    env = rank_environment(stale, 1, 2, 20_000, 3)
    assert (env["RANK"], env["WORLD_SIZE"], env["OMP_NUM_THREADS"], env["HOME"]) == ("1", "2", "3", "/h")
    assert "GROUP_RANK" not in env
    assert "TORCHELASTIC_RUN_ID" not in env
    assert rank_environment({"OMP_NUM_THREADS": "7"}, 0, 1, 1, 3)["OMP_NUM_THREADS"] == "7"


def test_a_taken_port_starts_again_on_another(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; seen = pathlib.Path(sys.argv[1]);"
        "first = not seen.exists(); seen.open('a').write(os.environ['MASTER_PORT'] + '\\n');"
        "first and sys.exit('EADDRINUSE: address already in use')"
    )
    seen = tmp_path / "seen"
    assert launch([sys.executable, "-c", code, str(seen)], 1) == 0
    assert len(set(seen.read_text().split())) == 2


def test_leases_never_meet() -> None:
    leases = [PortLease() for _ in range(20)]
    assert len({lease.port for lease in leases}) == 20
    for lease in leases:
        lease.close()


@pytest.mark.parametrize("argv", [["no-such-command-anywhere"]])
def test_a_missing_command_is_named(argv: list[str]) -> None:
    with pytest.raises(LaunchError, match="no-such-command"):
        launch(argv, 1)
    with pytest.raises(LaunchError, match="at least 1"):
        launch([sys.executable], 0)


def test_logs_of_other_ranks_land_where_asked(tmp_path: Path) -> None:
    code = "import os; print('I am', os.environ['RANK'])"
    assert launch([sys.executable, "-c", code], 3, env=dict(os.environ), log_dir=tmp_path / "logs") == 0
    assert (tmp_path / "logs" / "rank_0002.log").read_text() == "I am 2\n"
