"""Data prep against its peers, both sides in one run: ``python benchmarks/prep.py [--data DIR] [--tokenizer FILE]``.

One line ``name: value`` per figure. The corpus is ``DIR/pile-sample/*.jsonl.zst``, topped up to 64 MB with the
sources of the installed Python packages; without ``--data`` it is those alone. The Llama 3 tokenizer (PyPI's
``llama-models``) and ``gigatoken`` are fetched with pip into a temporary folder unless given. One-worker runs, ours
and theirs, are pinned to one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parent))
from _measure import ratios, say_ratio
from _prep_peers import run_peer, timed

from calm_scale.config.data import TokenizerConfig
from data_prep.inputs.records import iterate_texts
from data_prep.shards import HEADER_BYTES
from data_prep.shards.manifest import Manifest
from data_prep.shards.order import SampleOrder
from data_prep.shards.reading import ShardDataset
from data_prep.shards.staging import stage_split
from data_prep.tokenizer.definition import read_spec

REPOSITORY = Path(__file__).resolve().parent.parent
EOS = 128_001
LARGE_MEGABYTES = 230.0


@dataclass(frozen=True)
class Run:
    """One whole ``prep`` command: wall seconds, and what its log says of the work itself."""

    wall: float
    steady_seconds: float
    tokens: int
    peak_megabytes: float
    data_dir: Path


class Bench:
    """Inputs, tokenizer and scratch space of one benchmark run."""

    def __init__(self, scratch: Path, arguments: argparse.Namespace) -> None:
        self.scratch, self.repeats, self.cpu = scratch, arguments.repeats, arguments.clock == "cpu"
        self.core = sorted(os.sched_getaffinity(0))[0]
        self.model = arguments.tokenizer or self._fetch_tokenizer()
        self.packages = arguments.packages or self._fetch_gigatoken()
        self.data = arguments.data
        self.files = self.corpus(arguments.megabytes)
        self.tiny = [self._write(scratch / "tiny/0.jsonl.zst", ["a", "b", "c", "hello world " * 8000])]
        self.text_bytes = sum(len(t.encode()) for t in iterate_texts(self.files))
        self.definition = scratch / "tokenizer.json"
        spec = read_spec(TokenizerConfig(), self.model)
        plain = {**json.loads(spec.json), "added_tokens": [], "post_processor": None}
        self.definition.write_text(json.dumps(plain, ensure_ascii=False), encoding="utf-8")

    def _fetch_tokenizer(self) -> Path:
        self._pip("download", "--no-deps", "--dest", str(self.scratch / "wheel"), "llama-models")
        wheel = next((self.scratch / "wheel").glob("*.whl"))
        shutil.unpack_archive(wheel, self.scratch / "wheel", "zip")
        return next((self.scratch / "wheel").rglob("llama3/tokenizer.model"))

    def _fetch_gigatoken(self) -> Path:
        self._pip("install", "--quiet", "--target", str(self.scratch / "packages"), "gigatoken", "awkward")
        for shadow in (self.scratch / "packages").glob(
            "numpy*"
        ):  # the environment's own numpy is the one to use
            shutil.rmtree(shadow, ignore_errors=True)
        return self.scratch / "packages"

    def _pip(self, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
            check=True,
            stdout=sys.stderr,
        )

    def corpus(self, megabytes: float) -> list[Path]:
        """The sample, and distinct source files in files of 16 MB until there is enough text (or no more)."""
        files = sorted((self.data / "pile-sample").glob("*.jsonl.zst")) if self.data is not None else []
        have = sum(len(t.encode()) for t in iterate_texts(files)) if files else 0
        texts: list[str] = []
        size = 0
        for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")) + sorted(
            Path(sysconfig.get_path("stdlib")).rglob("*.py")
        ):
            if have >= megabytes * 1e6:
                break
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if 200 < len(text) < 200_000:
                texts.append(text)
                size += len(text)
                have += len(text)
            if size > 16e6 or have >= megabytes * 1e6:
                files.append(
                    self._write(self.scratch / f"corpus-{megabytes:.0f}/{len(files):02d}.jsonl.zst", texts)
                )
                texts, size = [], 0
        return files

    def _write(self, path: Path, texts: list[str]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = b"".join(
            json.dumps({"text": t, "meta": {"pile_set_name": "x"}}).encode() + b"\n" for t in texts
        )
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
        return path

    def prep(self, files: list[Path], *, workers: int = 1, encoder: str = "auto", pinned: bool = True) -> Run:
        """The whole command on ``files``."""
        out = self.scratch / "prep"
        shutil.rmtree(out, ignore_errors=True)
        document = {
            "name": "bench",
            "workdir": str(out),
            "vocab_size": 128_256,
            "tokenizer": {"path": str(self.model), "encoder": encoder},
            "prep": {"sources": [{"paths": [str(f) for f in files]}], "sequence_length": 8192},
        }
        config = self.scratch / "prep.yaml"
        config.write_text(json.dumps(document), encoding="utf-8")
        command = [sys.executable, "-m", "calm_scale", "prep", str(config), "--workers", str(workers)]
        if pinned:
            command = ["taskset", "-c", str(self.core), *command]
        wall, _ = timed(command, self._environment(), cpu=self.cpu)
        data = out / "data"
        done = json.loads((data / "prep.log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        steady = done["steady_cpu_seconds" if self.cpu else "steady_seconds"]
        return Run(wall, steady, done["tokens"]["stored"], done["peak_megabytes"], data)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.scratch / "cache")}

    def peer(self, name: str, files: list[Path]) -> float:
        """Seconds of a peer's whole command."""
        out = self.scratch / "peer"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        arguments = [*map(str, files), str(self.definition), str(out / "corpus"), str(EOS)]
        packages = str(self.packages) if name.startswith("gigatoken") else ""
        return run_peer(self.core, name, *arguments, extra_path=packages, cpu=self.cpu)[0]

    def copies(self, files: list[Path], count: int = 3) -> list[Path]:
        """Each of ``files``, ``count`` times over."""
        folder = self.scratch / f"copies-of-{len(files)}"
        folder.mkdir(exist_ok=True)
        return [
            Path(shutil.copyfile(file, folder / f"{i}-{file.name}")) for i in range(count) for file in files
        ]

    def rate(self, run: Run) -> float:
        """Steady MB of text per second."""
        return self.text_bytes / run.steady_seconds / 1e6


def say(name: str, value: float, digits: int = 3) -> None:
    """One figure."""
    print(f"{name}: {value:.{digits}f}", flush=True)


def against_peers(bench: Bench) -> None:
    """Whole commands: ours, Megatron's recipe, the fastest recipe."""
    bench.prep(bench.tiny)  # fills the file cache and the tokenizer's verification record
    peers = {"fastest": "gigatoken", "flat_gigatoken": "gigatoken-flat"}
    for peer in peers.values():
        bench.peer(peer, bench.tiny)
    ours: list[Run] = []
    start_ups: list[float] = []
    theirs: dict[str, list[float]] = {label: [] for label in peers}
    for _ in range(max(5, bench.repeats)):  # a round runs every side, so that other load meets all of them
        start_ups.append(bench.prep(bench.tiny).wall)
        ours.append(bench.prep(bench.files))
        for label, peer in peers.items():
            start_up = bench.peer(peer, bench.tiny)
            theirs[label].append(bench.peer(peer, bench.files) - start_up)
    net = [run.wall - start_up for run, start_up in zip(ours, start_ups, strict=True)]
    wall = statistics.median(run.wall for run in ours)
    say("corpus_mb", bench.text_bytes / 1e6, 1)
    say("prep_seconds", wall)
    say("prep_startup_seconds", statistics.median(start_ups))
    say_ratio("prep_net_mb_per_s", ratios([bench.text_bytes / 1e6] * len(net), net), 1)
    say("prep_peak_rss_mb", max(run.peak_megabytes for run in ours), 0)
    for label, of_peer in theirs.items():
        say_ratio(f"{label}_net_mb_per_s", ratios([bench.text_bytes / 1e6] * len(of_peer), of_peer), 1)
        say_ratio(f"prep_vs_{label}", ratios(of_peer, net))
    bench.peer("megatron", bench.tiny)
    megatron = bench.peer("megatron", bench.files)
    say("megatron_seconds", megatron)
    say_ratio("prep_vs_megatron", [megatron / run.wall for run in ours])


def against_stages(bench: Bench) -> None:
    """Our steady rate against the sum of the bare stages, alternating, on one core."""
    limits = []
    for _ in range(max(3, bench.repeats)):
        arguments = (*map(str, bench.files), str(bench.model), str(bench.scratch / "stages.out"))
        seconds = sum(run_peer(bench.core, "stages", *arguments, cpu=bench.cpu)[1].values())
        run = bench.prep(bench.files)
        limits.append(seconds / run.steady_seconds)
        say("stages_mb_per_s", bench.text_bytes / seconds / 1e6, 1)
        say("prep_steady_mb_per_s", bench.rate(run), 1)
    say_ratio("prep_stage_limit", limits, 3)


def against_tiktoken(bench: Bench) -> None:
    """With tiktoken as the encoder, against tiktoken alone in one thread: as one worker runs (its reader beside it),
    and with all of it held to one core. Alternating."""
    free, pinned = [], []
    for _ in range(max(5, bench.repeats)):
        arguments = (*map(str, bench.files), str(bench.model))
        raw = run_peer(bench.core, "tiktoken", *arguments, cpu=bench.cpu)[1]["tokens_per_second"]
        say("tiktoken_raw_mtok_per_s", raw / 1e6)
        for rates, hold in ((free, False), (pinned, True)):
            run = bench.prep(bench.files, encoder="tiktoken", pinned=hold)
            rates.append(run.tokens / run.steady_seconds / raw)
    say_ratio("prep_vs_tiktoken", free, 3)
    say_ratio("prep_vs_tiktoken_one_core", pinned, 3)


def two_workers(bench: Bench) -> None:
    """Two workers on two cores against one on one, alternating, by the wall clock whatever --clock says.

    Each worker's encoder first fills a word cache of its own, which for two is done twice, and at both ends one waits
    for the other. Copies of a larger corpus make it long enough for the steady rate.
    """
    if bench.cpu:
        print("prep_two_workers: skipped, it needs the wall clock", flush=True)
        return
    if len(os.sched_getaffinity(0)) < 2:
        print("prep_two_workers: skipped, one core", flush=True)
        return
    files = bench.copies(bench.corpus(LARGE_MEGABYTES), 6)
    pairs = [(bench.prep(files), bench.prep(files, workers=2, pinned=False)) for _ in range(bench.repeats)]
    say_ratio("prep_two_workers", [one.steady_seconds / two.steady_seconds for one, two in pairs])


def memory_growth(bench: Bench) -> None:
    """Peak memory on the corpus and on three times the corpus."""
    once, thrice = bench.prep(bench.files), bench.prep(bench.copies(bench.files))
    say("prep_peak_rss_mb_three_times_the_corpus", thrice.peak_megabytes, 0)
    say("prep_peak_rss_growth", thrice.peak_megabytes / once.peak_megabytes)


def reading(bench: Bench) -> None:
    """Gathering batches in shuffled order: ShardDataset against one bare memmap of the same sequences."""
    # Both sides are copied the same way, so that their pages lie alike in memory.
    split = stage_split(bench.prep(bench.files).data_dir / "train", bench.scratch / "staged").place
    manifest = Manifest.read(split)
    dataset = ShardDataset(split, manifest.sequence_length)
    flat = bench.scratch / "flat.bin"
    with flat.open("wb") as out:
        for shard in manifest.shards:
            out.write((split / shard.name).read_bytes()[HEADER_BYTES:])
    bare = np.memmap(flat, manifest.dtype, "r").reshape(-1, manifest.sequence_length)
    order = SampleOrder(len(dataset), 0)(np.arange(len(dataset))).reshape(-1)
    batches = [order[i : i + 32] for i in range(0, len(order), 32)]
    for batch in batches:  # both from warm pages
        np.testing.assert_array_equal(dataset.gather(batch), bare[batch])
    clock = time.process_time if bench.cpu else time.perf_counter
    theirs, ours = [], []
    for _ in range(15):
        begin = clock()
        for batch in batches:
            bare[batch]
        middle = clock()
        for batch in batches:
            dataset.gather(batch)
        theirs.append(middle - begin)
        ours.append(clock() - middle)
    say("read_sequences_per_s", len(order) / min(ours), 0)
    say_ratio("read_vs_memmap", ratios(theirs, ours))


def order() -> None:
    """An order of 10^9 sequences."""
    SampleOrder(7, 1)(np.arange(3))  # numpy loads its parts on first use
    begin = time.perf_counter()
    SampleOrder(10**9, 1)(np.arange(512))
    say("order_first_batch_ms", 1e3 * (time.perf_counter() - begin))
    tracemalloc.start()
    SampleOrder(10**9, 1)(np.arange(512))
    say("order_memory_mb", tracemalloc.get_traced_memory()[1] / 1e6)
    tracemalloc.stop()


def main() -> None:
    """Run every part, or the parts named."""
    parts = {
        "peers": against_peers,
        "stages": against_stages,
        "tiktoken": against_tiktoken,
        "workers": two_workers,
        "memory": memory_growth,
        "reading": reading,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a folder that holds pile-sample/*.jsonl.zst")
    parser.add_argument("--tokenizer", type=Path, help="Llama 3's tokenizer.model")
    parser.add_argument("--packages", type=Path, help="a folder with gigatoken and awkward installed")
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a machine with other load"
    )
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--only", nargs="*", choices=[*parts, "order"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        if not arguments.only or "order" in arguments.only:
            order()
        wanted = [name for name in parts if not arguments.only or name in arguments.only]
        bench = Bench(Path(folder), arguments) if wanted else None
        for name in wanted:
            if bench is not None:
                parts[name](bench)


if __name__ == "__main__":
    main()
