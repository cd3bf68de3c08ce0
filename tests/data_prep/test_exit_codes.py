"""What `calm-scale prep` exits with: 2 for what was asked wrongly, 1 for what went wrong, and a message for both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.cli.app import main
from calm_scale.config import to_yaml
from data_prep.shards.manifest import FolderLock

Prep = Callable[..., tuple[int, str]]


@pytest.fixture
def prep(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Prep:
    """``prep(*arguments)`` runs the command: its exit code and what it printed to stderr."""
    for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["calm-scale", "prep", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        else:
            code = 0
        return int(code), " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture
def document(tmp_path: Path, make_config: Callable, kit: SimpleNamespace) -> Path:
    """A run that works."""
    kit.write_lines(tmp_path / "in/a.jsonl", kit.make_texts(60))
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(make_config(tmp_path / "in/a.jsonl", sequence_length=32)))
    return path


MISTAKES = {
    "no such file": ("prep.sources=[{paths: [/none/*.jsonl]}]", "nothing readable matches"),
    "no such extension": ("prep.sources=[{paths: [RUN]}]", "no known extension"),
    "no tokenizer": ("tokenizer.path=/none/tokenizer.json", "there is no tokenizer at"),
    "not a tokenizer": ("tokenizer.path=RUN", "tiktoken ranks"),
    "no such encoder": ("tokenizer.encoder=quick", "tokenizer.encoder"),
    "an encoder that cannot": ("tokenizer.encoder=tiktoken", "holds no tiktoken ranks"),
    "no such special token": ("tokenizer.bos_token=<none>", "is no special token"),
    "ids do not fit": ("vocab_size=300", "vocab_size"),
    "starved": ("prep.sequence_length=65536", "less than one sequence"),
    "no such place": ("data=/proc/none", "cannot be made"),
    "unknown key": ("prep.sequence=3", "prep.sequence"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_exits_with_2_and_writes_no_split(
    prep: Prep, document: Path, tmp_path: Path, case: str
) -> None:
    setting, message = MISTAKES[case]
    code, said = prep(document, "--set", setting.replace("RUN", str(document)))
    assert (code, message in said) == (2, True), said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("run/data/*/manifest.json"))


def test_the_wrong_launcher_exits_with_2(
    prep: Prep, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    code, said = prep(document)
    assert code == 2
    assert "MPI says 1" in said
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_or_of_another_plan_exits_with_2(prep: Prep, document: Path, tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run/data"):
        code, said = prep(document)
    assert (code, "another command is writing" in said) == (2, True)
    assert prep(document)[0] == 0
    code, said = prep(document, "--set", "prep.packing=concat", "--set", "prep.sequence_length=64")
    assert (code, "sequence_length: 32 → 64" in said) == (2, True)


@pytest.mark.ranks
def test_a_column_that_is_not_there_exits_with_2_from_any_worker(
    prep: Prep, document: Path, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["a", "b"]}), tmp_path / "a.parquet")
    setting = f"prep.sources=[{{paths: [{tmp_path / 'a.parquet'}]}}]"
    for workers in (1, 2):
        code, said = prep(document, "--workers", workers, "--set", setting)
        assert (code, "has no column 'text'" in said) == (2, True), said


def test_a_failure_exits_with_1(prep: Prep, document: Path, tmp_path: Path) -> None:
    source = tmp_path / "in/a.jsonl"
    whole = source.read_bytes()
    source.write_bytes(whole + b"broken\n" * 30)
    code, said = prep(document)
    assert (code, "are bad" in said) == (1, True)
    cut = tmp_path / "in/b.jsonl.gz"
    cut.write_bytes(__import__("gzip").compress(whole)[:-20])
    code, said = prep(document, "--set", f"prep.sources=[{{paths: [{cut}]}}]", "--restart")
    assert (code, "is truncated" in said) == (1, True)


def test_looking_into_shards(prep: Prep, document: Path, tmp_path: Path) -> None:
    assert prep(document)[0] == 0
    data = tmp_path / "run/data"
    assert prep("verify", data)[0] == 0
    assert prep("verify", tmp_path / "none")[0] == 2
    assert prep("inspect", tmp_path / "none")[0] == 2
    code, said = prep("inspect", data / "train", "--sequence", 10**6)
    assert (code, "holds sequences 0 to" in said) == (2, True)
    (tmp_path / "elsewhere").mkdir()
    moved = data.rename(tmp_path / "elsewhere/data")  # the tokenizer's copy travels with the shards
    assert prep("inspect", moved / "train", "--sequence", 0)[0] == 0
    moved.rename(data)
    for folder in (data, tmp_path / "run"):
        code, said = prep("inspect", folder)
        assert (code, "run/data/train" in said) == (2, True)
    (data / "train").rename(tmp_path / "train")
    assert prep("verify", data)[0] == 1  # a split of the prep is missing
    (tmp_path / "train").rename(data / "train")
    pair = tmp_path / "pair/x"
    assert prep("export-megatron", data / "train", pair)[0] == 0
    back = ("import-megatron", document, pair, "--set", f"data={tmp_path / 'back'}")
    code, said = prep(*back, "--split", "trian")
    assert (code, "train, autoencoder, heldout" in said) == (2, True)
    assert prep(*back)[0] == 0
    code, said = prep(*back)
    assert (code, "holds a finished split" in said) == (2, True)
    assert prep("inspect", tmp_path / "back/train", "--sequence", 0)[0] == 0
    manifest = json.loads((data / "train/manifest.json").read_text())
    shard = data / "train" / manifest["shards"][0]["name"]
    shard.write_bytes(shard.read_bytes()[:-4])
    for arguments in (("verify", data), ("inspect", data / "train"), (document,)):
        code, said = prep(*arguments)
        assert code == 1, arguments
        assert arguments[0] == "verify" or shard.name in said


def test_an_interrupted_prep_says_so(prep: Prep, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data_prep.prep.workers.Worker.run", interrupt)
    code, said = prep(document)
    assert (code, said) == (130, "calm-scale: interrupted")
    log = (document.parent / "run/data/prep.log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["error"] == "KeyboardInterrupt"
