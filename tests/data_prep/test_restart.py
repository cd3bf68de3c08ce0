"""One result for any number of workers, ranks, kills and restarts; never a mixture."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from data_prep.errors import PrepError, ShardError
from data_prep.prep import prepare
from data_prep.prep.workers import detect_ranks
from data_prep.shards import ShardWriter

MakeConfig = Callable[..., RunConfig]
SCRIPT = """
import os, signal, sys, time
from calm_scale.config import RunConfig
from calm_scale.config.errors import CalmScaleError
from data_prep.prep import prepare
from data_prep.prep.journal import Journal
write = Journal.write_record
def write_and_die(journal, record):
    write(journal, record)
    if len(list(journal.root.glob("records/*.json"))) >= int(os.environ["DIE_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
def write_slowly(journal, record):
    write(journal, record)
    time.sleep(0.1)
if __name__ == "__main__":
    if "DIE_AT" in os.environ:
        Journal.write_record = write_and_die
    if "SLOWLY" in os.environ:
        Journal.write_record = write_slowly
    try:
        prepare(RunConfig.model_validate_json(open(sys.argv[1]).read()))
    except CalmScaleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
"""
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI"))} | {
    "OMP_NUM_THREADS": "1"
}


@pytest.fixture
def corpus(tmp_path: Path, kit: SimpleNamespace) -> Path:
    texts = kit.make_texts(4000, words=120)
    for i, part in enumerate((texts[:2600], texts[2600:3400], texts[3400:])):
        kit.write_lines(tmp_path / f"in/{i}.jsonl{'.zst' if i else ''}", part)
    return tmp_path / "in"


SETTINGS = {"segment_megabytes": 0.1, "splits": {"heldout": 0.1, "autoencoder": 0.2}, "sequence_length": 128}


def command(config: RunConfig, tmp_path: Path, ranks: int = 1) -> list[str]:
    script, document = tmp_path / "prep.py", tmp_path / f"{config.workdir.name}.json"
    script.write_text(SCRIPT)
    document.write_text(config.model_dump_json())
    own = [sys.executable, str(script), str(document)]
    mpirun = str(Path(sys.executable).parent / "mpirun")
    return own if ranks == 1 else [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *own]


@pytest.mark.ranks
def test_bytes_do_not_depend_on_ranks_or_workers(
    tmp_path: Path, corpus: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    alone = make_config(corpus, "alone", **SETTINGS)
    prepare(alone)
    expected = kit.data_bytes(alone.data_dir)
    assert sum(name.endswith(".shard") for name in expected) > 20
    two = make_config(corpus, "two", workers=2, **SETTINGS)
    prepare(two)
    assert kit.data_bytes(two.data_dir) == expected | {"plan.json": kit.data_bytes(two.data_dir)["plan.json"]}
    mpi = make_config(corpus, "mpi", **SETTINGS)
    subprocess.run(command(mpi, tmp_path, ranks=2), check=True, env=ENVIRONMENT, timeout=120)
    assert kit.data_bytes(mpi.data_dir) == expected


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "then"), [(1, 2), (2, 1)])
def test_kill_9_and_rerun_gives_the_same_bytes_without_redoing(
    tmp_path: Path, corpus: Path, make_config: MakeConfig, kit: SimpleNamespace, ranks: int, then: int
) -> None:
    whole = make_config(corpus, "whole", **SETTINGS)
    prepare(whole)
    expected = kit.data_bytes(whole.data_dir)
    num_records = sum(name.endswith(".shard") and name.startswith("train/0") for name in expected)
    killed = make_config(corpus, "killed", **SETTINGS)
    records = killed.data_dir / ".prep/records"
    for share in (0.1, 0.5, 0.95):
        dying = ENVIRONMENT | {"DIE_AT": str(max(1, int(share * num_records)))}
        died = subprocess.run(
            command(killed, tmp_path, ranks),
            env=dying,
            timeout=60,
            capture_output=True,
            text=True,
            check=False,
        )
        assert died.returncode != 0
        assert ranks == 1 or "signal 9 (Killed)" in died.stderr  # mpirun names the rank that died
        assert len(list(records.glob("*.json"))) >= int(share * num_records)
        _wait_until_unlocked(killed.data_dir)
    kept = {p: p.stat().st_mtime_ns for p in (killed.data_dir / "train").glob("0*.shard")}
    assert not (killed.data_dir / "manifest.json").exists()
    subprocess.run(command(killed, tmp_path, then), check=True, env=ENVIRONMENT, timeout=120)
    assert kit.data_bytes(killed.data_dir) == expected
    untouched = sum(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert untouched >= len(kept) - ranks


@pytest.mark.ranks
def test_kill_9_of_a_whole_mpirun_group_leaves_nobody_writing(
    tmp_path: Path, corpus: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    """mpirun dies first, so nobody tells its ranks: they notice, end, and the next prep goes on."""
    killed = make_config(corpus, "killed", **SETTINGS)
    records, shards = killed.data_dir / ".prep/records", killed.data_dir / "train"
    group = subprocess.Popen(
        command(killed, tmp_path, 2),
        env=ENVIRONMENT | {"SLOWLY": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(list(records.glob("*.json"))) < 8:
        assert group.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(group.pid, signal.SIGKILL)
    group.wait()
    _wait_until_unlocked(killed.data_dir)
    committed = {
        json.loads(p.read_text())["splits"]["train"]["shards"][0]["name"] for p in records.glob("*.json")
    }
    kept = {name: (shards / name).stat().st_mtime_ns for name in committed}
    assert not (killed.data_dir / "manifest.json").exists()
    subprocess.run(command(killed, tmp_path, 2), check=True, env=ENVIRONMENT, timeout=120)
    assert {name: (shards / name).stat().st_mtime_ns for name in committed} == kept
    whole = make_config(corpus, "whole", **SETTINGS)
    prepare(whole)
    assert kit.data_bytes(killed.data_dir) == kit.data_bytes(whole.data_dir)


def _wait_until_unlocked(data_dir: Path) -> None:
    """mpirun's ranks die a moment after it does."""
    import fcntl

    for _ in range(500):
        try:
            with (data_dir / ".prep.lock").open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        except (OSError, FileNotFoundError):
            time.sleep(0.02)
    pytest.fail("the killed prep's lock was never released")


def interrupt(config: RunConfig, monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Run until the ``after``-th shard is to be committed, then fail with ``error``."""
    committed = 0
    commit = ShardWriter.commit

    def failing(writer: ShardWriter):
        nonlocal committed
        committed += 1
        if committed > after:
            raise error
        return commit(writer)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "commit", failing)
        with pytest.raises(PrepError if isinstance(error, OSError) else type(error)) as caught:
            prepare(config)
    if isinstance(error, OSError):
        assert "the disk is full" in str(caught.value)


def test_a_full_disk_ends_clean_and_goes_on(
    tmp_path: Path,
    corpus: Path,
    make_config: MakeConfig,
    kit: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(corpus, **SETTINGS)
    interrupt(config, monkeypatch, 10, OSError(errno.ENOSPC, "No space left on device"))
    assert not list(config.data_dir.rglob("*.part"))
    assert not (config.data_dir / "train/manifest.json").exists()
    prepare(config)
    whole = make_config(corpus, "whole", **SETTINGS)
    prepare(whole)
    assert kit.data_bytes(config.data_dir) == kit.data_bytes(whole.data_dir)


def test_a_full_disk_is_foreseen(tmp_path: Path, corpus: Path, make_config: MakeConfig, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(PrepError, match=r"need about 0\.\d{3} GB.*free some space"):
        prepare(make_config(corpus, **SETTINGS))


def test_changed_settings_inputs_or_tokenizer_are_never_mixed(
    tmp_path: Path, corpus: Path, make_config: MakeConfig, kit: SimpleNamespace, monkeypatch
) -> None:
    config = make_config(corpus, **SETTINGS)
    interrupt(config, monkeypatch, 10, KeyboardInterrupt())
    before = kit.data_bytes(config.data_dir)
    for changed, named in (
        (make_config(corpus, **{**SETTINGS, "sequence_length": 64}), "sequence_length: 128 → 64"),
        (make_config(corpus, tokenizer={"add_eos": True}, **SETTINGS), "add_eos: false → true"),
    ):
        with pytest.raises(PrepError, match=f"other settings or inputs.*{named}"):
            prepare(changed)
    assert kit.data_bytes(config.data_dir) == before
    kit.write_lines(corpus / "0.jsonl", kit.make_texts(10))
    with pytest.raises(PrepError, match=r"0\.jsonl: size \d+ → \d+"):
        prepare(config)
    prepare(config, restart=True)
    report = prepare(config)
    assert report.already_done
    kit.write_lines(corpus / "0.jsonl", ["new"])
    with pytest.raises(PrepError, match="a finished prep with other settings or inputs"):
        prepare(config)


@pytest.mark.parametrize("locks", [True, False])
def test_two_preps_on_one_folder_are_refused(
    corpus: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    import fcntl

    from data_prep.shards.manifest import FolderLock

    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    config = make_config(corpus, **SETTINGS)
    with (
        FolderLock(config.data_dir),
        pytest.raises(PrepError, match=rf"another command.*process {os.getpid()}"),
    ):
        prepare(config)
    prepare(config)


def test_a_lost_record_or_shard_is_redone(
    tmp_path: Path, corpus: Path, make_config: MakeConfig, kit: SimpleNamespace, monkeypatch
) -> None:
    config = make_config(corpus, **SETTINGS)
    interrupt(config, monkeypatch, 30, KeyboardInterrupt())
    records = sorted((config.data_dir / ".prep/records").glob("*.json"))
    records[0].unlink()
    next((config.data_dir / "train").glob("*.shard")).unlink()
    prepare(config)
    whole = make_config(corpus, "whole", **SETTINGS)
    prepare(whole)
    assert kit.data_bytes(config.data_dir) == kit.data_bytes(whole.data_dir)


@pytest.mark.ranks
def test_the_error_of_one_worker_ends_all_within_seconds(
    tmp_path: Path, corpus: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    cut = corpus / "9.jsonl.zst"
    kit.write_lines(cut, kit.make_texts(50))
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(PrepError, match=r"9\.jsonl\.zst is truncated"):
        prepare(make_config(corpus, workers=2, **SETTINGS))
    config = make_config(corpus, "mpi", **SETTINGS)
    result = subprocess.run(
        command(config, tmp_path, 2), env=ENVIRONMENT, timeout=60, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "9.jsonl.zst is truncated" in result.stderr


def test_a_launcher_mismatch_is_refused_and_nothing_written(
    tmp_path: Path, corpus: Path, make_config: MakeConfig
) -> None:
    config = make_config(corpus, **SETTINGS)
    own = command(config, tmp_path)
    tasks = [
        subprocess.Popen(
            own,
            env=ENVIRONMENT | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for task in tasks:
        _, stderr = task.communicate(timeout=60)
        assert task.returncode == 1
        assert "the environment says 2 tasks" in stderr
        assert "MPI says 1" in stderr
    assert not config.data_dir.exists()


def test_who_am_i() -> None:
    assert detect_ranks({}).world_size == 1
    assert detect_ranks({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).world_size == 1
    assert detect_ranks({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"}).world_size == 1
    with pytest.raises(PrepError, match="torchrun", check=lambda error: error.exit_code == 2):
        detect_ranks({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"})


def test_the_log_is_machine_readable(tmp_path: Path, corpus: Path, make_config: MakeConfig) -> None:
    config = make_config(corpus, **SETTINGS)
    prepare(config)
    events = [json.loads(line) for line in (config.data_dir / "prep.log.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "start"
    assert events[-1]["event"] == "done"
    assert events[-1]["documents"]["kept"] == 4000


def test_a_finished_prep_that_lost_a_shard_says_how_to_prepare_again(
    corpus: Path, tmp_path: Path, make_config: MakeConfig
) -> None:
    config = make_config(corpus / "*.jsonl*", **SETTINGS)
    prepare(config)
    shard = next((config.data_dir / "train").glob("0*.shard"))
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ShardError, match=rf"{shard.name} is missing(.|\n)*again with --restart"):
        prepare(config)
    prepare(config, restart=True)
    assert shard.read_bytes() == whole
