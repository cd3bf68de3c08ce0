"""One thread for torch in every test: several processes with several threads each on few cores crawl."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
