"""A notice reaches the rank, not its helpers, and not before the rank can hear it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MODULE = """
import multiprocessing, os, signal, subprocess, sys, time
print("importing", flush=True)
time.sleep(1.0)  # what importing torch takes
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
print("ready", helper.pid, sys.argv[1:], __name__, flush=True)
while not got:
    time.sleep(0.05)
print("told", got == [signal.SIGTERM], "helper lives", helper.poll() is None, flush=True)
helper.kill()
sys.exit(75)
"""


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "pretend.py").write_text(MODULE)
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{folder}:{root}"}
    command = [sys.executable, "-m", "launchers.slurm.rank", "pretend", "a", "b"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, process_group=0)


def test_a_notice_to_the_whole_step_stops_only_the_rank(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    ready = process.stdout.readline()
    assert ready.endswith("['a', 'b'] __main__\n")
    os.killpg(process.pid, signal.SIGUSR1)  # as SLURM does: every process of the step
    assert process.stdout.readline() == "told True helper lives True\n"
    assert process.wait(10) == 75


def test_a_notice_during_the_imports_waits_for_a_handler(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGUSR1)
    assert process.stdout.readline().startswith("ready")
    assert process.stdout.readline() == "told True helper lives True\n"
    assert process.wait(10) == 75
