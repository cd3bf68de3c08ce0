"""One rank under srun: ``python -m launchers.slurm.rank MODULE ARGUMENTS…`` runs ``python -m MODULE ARGUMENTS…``.

SLURM delivers a signal to every process of a step: the rank, but also its data workers and the writers of a
checkpoint, which die of USR1 in the middle of the save it was meant to start. And a rank that is still importing
torch dies of it too. So USR1 is blocked here, which every process started from here inherits, and one thread waits
for it: it hands the rank a TERM once the rank has a handler for that.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence

_POLL_SECONDS = 0.2


def hold_notices() -> None:
    """Block USR1 in this process and its children; relay it as TERM to this process alone. Main thread, first thing."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=_relay, name="notices", daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """Run a module as the main program with notices held."""
    if not arguments:
        sys.exit("usage: python -m launchers.slurm.rank MODULE [ARGUMENT …]")
    hold_notices()
    module, *rest = arguments
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _relay() -> None:
    while True:
        signal.sigwait({signal.SIGUSR1})
        while signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN, None):
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
