"""The tools prep is measured against, as faithful loops, each a whole process: ``python _prep_peers.py PEER …``.

``megatron``   Megatron's ``preprocess_data`` recipe: JSON lines → Hugging Face ``tokenizers``, one document at a
               time, EOS appended → ``megatron.core`` ``IndexedDatasetBuilder``. It cannot read zstd, so the
               files are decompressed first, as its users do.
``gigatoken``  the fastest existing recipe (``preprocess_data_fast``): decompressed JSON lines → gigatoken over
               whole files → EOS joined as a column → Megatron's builder, a document at a time → ``.bin``/``.idx``.
``gigatoken-flat``  the same encoder with every cost around it taken out: no tool does this; it shows the distance
               to the best that could be written around gigatoken.
``stages``     the bare stages of prep one after the other over the same files; prints ``stage: seconds``.
``tiktoken``   tiktoken's own rate over the texts in memory; prints tokens per second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

BATCH = 512


def decompress(files: list[Path], folder: Path) -> list[Path]:
    """``.jsonl.zst`` → ``.jsonl`` with the streaming decompressor, to disk."""
    import zstandard

    folder.mkdir(parents=True, exist_ok=True)
    plain = []
    for file in files:
        target = folder / file.name.removesuffix(".zst")
        with file.open("rb") as source, target.open("wb") as out:
            zstandard.ZstdDecompressor().copy_stream(source, out, read_size=1 << 20, write_size=1 << 20)
        plain.append(target)
    return plain


def megatron(files: list[Path], definition: Path, out: Path, eos: int) -> None:
    """One document at a time through ``tokenizers`` and the indexed-dataset builder."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(definition))
    builder = IndexedDatasetBuilder(f"{out}.bin", dtype=np.int32)
    for file in decompress(files, out.parent / "plain"):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
                ids.append(eos)
                builder.add_document(ids, [len(ids)])
    builder.finalize(f"{out}.idx")


def gigatoken(files: list[Path], definition: Path, out: Path, eos: int) -> None:
    """Whole files through gigatoken, one thread; EOS joined to the ragged array, documents added to the builder."""
    import awkward as ak
    import gigatoken as giga
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = giga.Tokenizer(definition)
    builder = IndexedDatasetBuilder(f"{out}.bin", dtype=DType.optimal_dtype(eos + 1))
    for file in decompress(files, out.parent / "plain"):
        documents = tokenizer.encode_files(giga.JsonlFileSource([file], field="text"), parallel=False)
        ends = ak.singletons(ak.Array(np.full(len(documents), eos, np.uint32)))
        for document in ak.concatenate([documents, ends], axis=1):
            builder.add_document(document, [len(document)])
    builder.finalize(f"{out}.idx")


def gigatoken_flat(files: list[Path], definition: Path, out: Path, eos: int) -> None:
    """The same encoder in the best loop we can write around it: no object per document, one write per file."""
    import awkward as ak
    import gigatoken as giga
    import numpy as np

    from data_prep.prep.megatron import write_megatron

    tokenizer = giga.Tokenizer(definition)
    lengths = []
    with Path(f"{out}.bin").open("wb") as data:
        for file in decompress(files, out.parent / "plain"):
            rows = tokenizer.encode_files(giga.JsonlFileSource([file], field="text"), parallel=False)
            ids, counts = ak.to_numpy(ak.flatten(rows)), np.asarray(ak.num(rows))
            framed = np.insert(ids, np.cumsum(counts), eos).astype(np.int32)
            data.write(framed.tobytes())
            lengths.append((counts + 1).astype(np.int32))
        os.fsync(data.fileno())
    joined = np.concatenate(lengths)
    write_megatron(out, np.dtype("<i4"), joined, np.arange(len(joined) + 1, dtype=np.int64))


def stages(files: list[Path], model: Path, out: Path, clock: Callable[[], float]) -> None:
    """zstd, JSON, encode, pack, checksum and write, each timed alone over all files."""
    import msgspec
    import numpy as np
    import xxhash
    import zstandard

    from calm_scale.config.data import TokenizerConfig
    from data_prep.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(TokenizerConfig(add_bos=False), model, verified=True)
    seconds = dict.fromkeys(("zstd", "json", "encode", "pack", "checksum", "write"), 0.0)
    decoder = msgspec.json.Decoder(msgspec.defstruct("Record", [("text", str)], gc=False))
    digest = xxhash.xxh64()
    with out.open("wb", buffering=0) as target:
        for file in files:
            mark = clock()

            def lap(stage: str) -> None:
                nonlocal mark
                now = clock()
                seconds[stage] += now - mark
                mark = now

            frame, pieces = zstandard.ZstdDecompressor().decompressobj(), []
            with file.open("rb") as source:
                while packed := source.read(1 << 18):
                    pieces.append(frame.decompress(packed))
            lap("zstd")
            data = b"".join(pieces)
            mark = clock()
            texts = [record.text for record in decoder.decode_lines(data)]
            lap("json")
            coded = [tokenizer.encode_documents(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
            lap("encode")
            packs = [np.insert(ids, offsets[:-1], 128_000) for ids, offsets in coded]
            lap("pack")
            for ids in packs:
                digest.update(ids.view(np.uint8).data)
            lap("checksum")
            for ids in packs:
                target.write(ids.data)
            lap("write")
        os.fsync(target.fileno())
        lap("write")
    for stage, value in seconds.items():
        print(f"{stage}: {value:.6f}")


def tiktoken_rate(files: list[Path], model: Path, clock: Callable[[], float]) -> None:
    """tiktoken's ``encode_to_numpy`` over texts in memory."""
    from calm_scale.config.data import TokenizerConfig
    from data_prep.inputs.records import iterate_texts
    from data_prep.tokenizer.definition import read_spec
    from data_prep.tokenizer.encoders import TiktokenEncoder

    native = TiktokenEncoder(read_spec(TokenizerConfig(), model))._native
    texts = list(iterate_texts(files))
    begin = clock()
    tokens = sum(len(native.encode_to_numpy(text, disallowed_special=())) for text in texts)
    print(f"tokens_per_second: {tokens / (clock() - begin):.1f}")


def timed(command: list[str], environment: dict[str, str], *, cpu: bool) -> tuple[float, str]:
    """(seconds, output) of a command: wall seconds, or the CPU seconds of it and its children."""
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return (usage.ru_utime + usage.ru_stime if cpu else time.perf_counter() - begin), output


def run_peer(
    core: int, peer: str, *arguments: str, extra_path: str = "", cpu: bool = False
) -> tuple[float, dict[str, float]]:
    """Run a peer in a process of its own, on one core; (seconds, what it printed)."""
    command = ["taskset", "-c", str(core), sys.executable, str(Path(__file__)), peer, *arguments]
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    seconds, output = timed(
        command,
        {**os.environ, **threads, "PYTHONPATH": extra_path, "CLOCK": "cpu" if cpu else "wall"},
        cpu=cpu,
    )
    pairs = (line.split(": ") for line in output.splitlines() if line.count(": ") == 1)
    return seconds, {name: float(value) for name, value in pairs}


if __name__ == "__main__":
    chosen, *rest = sys.argv[1:]
    ticks = time.process_time if os.environ.get("CLOCK") == "cpu" else time.perf_counter
    paths = [Path(p) for p in rest if p.endswith(".zst")]
    others = [p for p in rest if not p.endswith(".zst")]
    if chosen == "megatron":
        megatron(paths, Path(others[0]), Path(others[1]), int(others[2]))
    elif chosen == "gigatoken":
        gigatoken(paths, Path(others[0]), Path(others[1]), int(others[2]))
    elif chosen == "gigatoken-flat":
        gigatoken_flat(paths, Path(others[0]), Path(others[1]), int(others[2]))
    elif chosen == "stages":
        stages(paths, Path(others[0]), Path(others[1]), ticks)
    else:
        tiktoken_rate(paths, Path(others[0]), ticks)
