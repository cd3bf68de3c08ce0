"""One rank of a tiny run whose process groups cannot be closed: ``leave_tiny.py FOLDER OPTIONS FAILING_STEP``.

At FAILING_STEP rank 1 fails and rank 0 waits in a collective that never ends, as NCCL's do. 0: nobody fails.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import train_tiny
from tiny_engine import TinyEngine

from calm_scale.runtime import departure as leaving

leaving.CLEAN_UP_SECONDS = 2.0
FAILING_STEP = int(sys.argv[3])


class FailingEngine(TinyEngine):
    def train_step(self, batch: Any, lr: float) -> Any:
        if batch.step == FAILING_STEP:
            if self.data_rank == 1:
                self.writer.submit(time.sleep, 600)  # a save under way is not waited for
                raise RuntimeError("device lost")
            time.sleep(600)
        return super().train_step(batch, lr)


if __name__ == "__main__":
    train_tiny.TinyEngine = FailingEngine
    dist.destroy_process_group = lambda *_: time.sleep(600)
    folder = Path(sys.argv[1])
    with leaving.joined("lm", folder, 60.0) as departure:
        outcome = train_tiny.run(folder, json.loads(sys.argv[2]), departure.world, departure=departure)
        departure.exit_code = outcome.exit_code
    sys.exit(outcome.exit_code)
