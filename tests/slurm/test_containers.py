"""Jobs in containers: what they are given, what of a run they must show, and how a script finds that they do not.

The stand-ins for srun with pyxis and for apptainer start a command in the image's own folder, unless the folder they
are told to start in is mounted; what the run folder is in there a test chooses.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calm_scale.cli.app import app
from calm_scale.config import ConfigError, RunConfig, load_as, to_yaml
from calm_scale.config.cluster import ClusterConfig, ContainerConfig, Mount, hidden
from calm_scale.config.run_folder import Stage
from launchers.slurm.container import mounts_of, unseen_paths
from launchers.slurm.record import RunRecord
from launchers.slurm.submit import fingerprint, submit

Profile = Callable[..., ClusterConfig]
MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
PYXIS = {"runtime": "pyxis", "image": "/images/calm.sqsh"}
APPTAINER = {"runtime": "apptainer", "image": "/images/calm.sif"}
INSIDE = """
start() { # COMMAND…: as the image would, on every node
    if [[ -n $image ]]; then
        export INSIDE=1
        cd "$FAKE/image" || exit 1
        case ",$mounts," in *",$dir:$dir,"*) cd "$dir" || exit 1 ;; esac
    fi
    local node number=0 code=0 shown words=("$@")
    for node in ${names:-n1}; do
        shown=$(cat "$FAKE/shown" 2>/dev/null)
        if [[ $shown == n2 ]]; then shown=; [[ $node != n2 ]] || shown=other; fi
        if [[ -n $image && $shown == other ]]; then words=("${@//$RUN/$FAKE/other}"); fi
        SLURMD_NODENAME=$node SLURM_PROCID=$number "${words[@]}" || code=$?
        if [[ $shown == "read only" ]]; then rm -f "$RUN"/slurm/logs/*/container/inside-*; fi # it stays in there
        number=$((number + 1))
    done
    exit "$code"
}
"""
SRUN = """
image= mounts= dir= names=
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
        --container-image=*) image=1 ;;
        --container-mounts=*) mounts=${!i#*=} ;;
        --container-workdir=*) dir=${!i#*=} ;;
        --nodes=2) names='n1 n2' ;;
        -*) ;;
        *) break ;;
    esac
done
start "${@:i}"
"""
APPTAINER_EXEC = """
image=1 mounts= dir= names=$SLURMD_NODENAME
shift
while [[ $1 == --* ]]; do
    case $1 in
        --pwd) dir=$2; shift ;;
        --bind) mounts+=,$2; shift ;;
    esac
    shift
done
shift
start "$@"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of submission with stand-ins for SLURM's clients and apptainer in its ``bin``."""
    folder = tmp_path / "project"
    (folder / "bin" / "image").mkdir(parents=True)
    bodies = {
        "squeue": "echo RUNNING",
        "scontrol": "",
        "scancel": "",
        "sbatch": "echo 99",
        "srun": INSIDE + SRUN,
        "apptainer": INSIDE + APPTAINER_EXEC,
    }
    for name, body in bodies.items():
        path = folder / "bin" / name
        path.write_text(
            f"#!/bin/bash\nFAKE={folder}/bin RUN={folder}/runs/demo\n"
            f"printf '%s\\n' \"{name} $*\" >>$FAKE/calls\n{body}\n"
        )
        path.chmod(0o755)
    # The interpreter of the image: a container has it, the machine around it has not.
    python = folder / "bin" / "image" / "python"
    python.write_text(
        f'#!/bin/bash\n[[ -n $INSIDE ]] || {{ echo "no Python here" >&2; exit 127; }}\n'
        f'PYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.chdir(folder)
    return folder


def demo(make_run: MakeRun, **changes: object) -> RunConfig:
    return make_run("demo", workdir="runs/demo", **changes)


def in_container(profile: Profile, place: Path, container: dict[str, object]) -> ClusterConfig:
    python = str(place / "bin" / "image" / "python")
    return profile(
        container=container, python=python, preflight=False, setup=[], requeue={}, stages=TWO_NODES
    )


TWO_NODES = {"prep": {"nodes": 2, "tasks_per_node": 1, "cpus_per_task": 1}, "lm": {"nodes": 2}}


def run_job(
    place: Path, run: RunConfig, cluster: ClusterConfig, stage: Stage, work: str, shown: str = ""
) -> tuple[int, str, list[str]]:
    """The script of a stage, whose ranks are a shell command; ``shown``: what the container has as the run folder.

    Returns:
        its exit code, its log, the calls of the stand-ins.
    """
    script = submit(run, cluster, dry_run=True, stages=[stage]).jobs[0].script
    head, _, _ = script.read_text().partition("\nrun_step --mpi=")
    script.write_text(f"{head}\nrun_step -- bash -c {shlex.quote(work)}\n\nconclude\n")
    shutil.copytree(place / "runs/demo", place / "bin/other")
    (place / "bin/shown").write_text(shown)
    around = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    around |= {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "CALM_SCALE_FILE_WAIT_SECONDS": "0.2",
    }
    done = subprocess.run(
        ["bash", str(script)], env=around, capture_output=True, text=True, timeout=300, check=False
    )
    calls = (place / "bin/calls").read_text().splitlines()
    return done.returncode, done.stdout + done.stderr, calls


PREP = "mkdir -p runs/demo/data/train && date >runs/demo/data/train/$SLURMD_NODENAME.shard"


@pytest.mark.parametrize("container", [PYXIS, APPTAINER], ids=["pyxis", "apptainer"])
def test_a_stage_writes_relative_paths_where_the_script_finds_them(
    profile: Profile, make_run: MakeRun, place: Path, container: dict[str, object]
) -> None:
    run = demo(make_run)
    code, text, calls = run_job(place, run, in_container(profile, place, container), "prep", PREP)
    assert code == 0, text
    assert len(list((place / "runs/demo/data/train").glob("*.shard"))) >= 1
    record = RunRecord(place / "runs/demo")
    assert (record.state / "prep.done").read_text().strip() == fingerprint(run, "prep")
    assert "failed with code" not in text, "notices are asked for where the Python is"
    assert [life.cause for life in record.attempts("prep")] == ["finished"]
    steps = [call for call in calls if call.startswith("srun")]
    if container is PYXIS:
        assert all("--container-name=calm-scale-77-0 " in call for call in steps)
        assert all(f"--container-workdir={place} " in call for call in steps)
    assert "launchers.slurm.container" in steps[0], "before anything else"


@pytest.mark.parametrize("container", [PYXIS, APPTAINER], ids=["pyxis", "apptainer"])
@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("other", "n1: .*outside: No such file or directory: this run folder is not the one outside"),
        ("n2", "n2: .*this run folder is not the one outside; add the folder to container.mounts"),
        ("read only", "of 2 nodes, 0 write into the run folder .*/runs/demo"),
    ],
    ids=["another folder", "on one node", "writes stay inside"],
)
def test_a_container_with_another_run_folder_stops_the_job_before_its_first_stage(
    profile: Profile,
    make_run: MakeRun,
    place: Path,
    container: dict[str, object],
    shown: str,
    said: str,
) -> None:
    cluster = in_container(profile, place, container)
    code, text, calls = run_job(place, demo(make_run), cluster, "prep", PREP, shown)
    assert code == 1, text
    record = RunRecord(place / "runs/demo")
    verdict = record.verdict("prep")
    assert verdict.startswith("not requeued (container, code 1): container: "), verdict
    assert re.search(said, verdict), verdict
    assert not (place / "runs/demo/data").exists()
    assert not (record.state / "prep.done").exists()
    assert [life.cause for life in record.attempts("prep")] == ["container"]
    assert not [call for call in calls if call.startswith(("scontrol requeue", "sbatch"))]


def test_a_container_that_starts_elsewhere_is_found(profile: Profile, make_run: MakeRun, place: Path) -> None:
    srun = place / "bin/srun"
    srun.write_text(srun.read_text().replace("--container-workdir=*", "--no-such-option=*"))
    cluster = in_container(profile, place, PYXIS)
    code, text, _ = run_job(place, demo(make_run), cluster, "prep", PREP)
    assert code == 1, text
    verdict = RunRecord(place / "runs/demo").verdict("prep")
    assert f"the working directory is {place}/bin/image, outside it is {place}" in verdict


def test_an_image_that_does_not_start_stops_the_job_with_its_words(
    profile: Profile, make_run: MakeRun, place: Path
) -> None:
    (place / "bin/srun").write_text("#!/bin/bash\necho 'pyxis: failed to import docker image' >&2; exit 1\n")
    cluster = in_container(profile, place, PYXIS)
    (place / "bin/calls").touch()
    code, text, calls = run_job(place, demo(make_run), cluster, "prep", PREP)
    assert code == 1, text
    assert "pyxis: failed to import docker image" in RunRecord(place / "runs/demo").verdict("prep")
    assert "scontrol requeue 77" not in calls


def test_a_controller_that_does_not_start_the_look_is_not_the_containers_fault(
    profile: Profile, make_run: MakeRun, place: Path
) -> None:
    (place / "bin/srun").write_text(
        "#!/bin/bash\necho 'srun: error: Unable to create step: Unable to contact slurm controller' >&2; exit 1\n"
    )
    cluster = in_container(profile, place, PYXIS)
    code, text, calls = run_job(place, demo(make_run), cluster, "prep", PREP)
    assert (code, "scontrol requeue 77" in calls) == (0, True), text
    assert [life.cause for life in RunRecord(place / "runs/demo").attempts("prep")] == ["controller"]


@pytest.mark.parametrize("container", [PYXIS, APPTAINER], ids=["pyxis", "apptainer"])
def test_every_tool_of_a_training_runs_in_the_container_and_a_failing_one_is_said(
    profile: Profile, make_run: MakeRun, place: Path, container: dict[str, object]
) -> None:
    run = demo(make_run)
    cluster = in_container(profile, place, container)
    checkpoints = place / "runs/demo/lm/checkpoints"
    broken = f"mkdir -p {checkpoints}; rm -f {place}/bin/image/python"
    code, text, calls = run_job(place, run, cluster, "lm", broken)
    assert code == 0, text
    tools = [call for call in calls if "ckpt newest" in call or "slurm.notice" in call]
    assert len(tools) == 3, "before, the notice, after"
    for call in tools:
        assert call.startswith("srun --overlap --relative=0 " if container is PYXIS else "apptainer exec ")
    assert text.count("failed with code") == 1
    assert f"calm_scale ckpt newest {checkpoints} failed with code 127" in text
    assert "the ranks are told 600 s before the time limit" not in text


def test_the_step_of_the_ranks_is_ended_by_its_name(profile: Profile, make_run: MakeRun, place: Path) -> None:
    """Tools take numbers of steps too."""
    (place / "bin/squeue").write_text(
        "#!/bin/bash\ncase \"$*\" in *--steps*) printf '77.batch batch\\n77.5 tool\\n77.3 ranks\\n' ;; "
        "*) echo RUNNING ;; esac\n"
    )
    cluster = in_container(profile, place, PYXIS).model_copy(update={"container": None})
    script = submit(demo(make_run), cluster, dry_run=True, stages=["lm"]).jobs[0].script
    head, _, _ = script.read_text().partition("\nbegin_attempt\n")
    script.write_text(f"{head}\nend_step\n")
    around = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    subprocess.run(["bash", str(script)], env=around, timeout=300, check=True)
    assert "scancel --quiet --signal=KILL 77.3" in (place / "bin/calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("runtime", "mount", "said"),
    [
        ("pyxis", "data:/data", "write SOURCE:TARGET"),
        ("pyxis", "/data:data", "write SOURCE:TARGET"),
        ("pyxis", "/a:/b:ro:x", "write SOURCE:TARGET"),
        ("pyxis", "/my data:/data", "cannot mount a path with ' '"),
        ("apptainer", "/a:/a,/b:/b", "cannot mount a path with ','|write SOURCE"),
        ("apptainer", "tmpfs:/scratch", "write SOURCE:TARGET"),
        ("apptainer", "/:/", "container's root"),
        ("pyxis", "", "write SOURCE:TARGET"),
    ],
)
def test_a_mount_that_the_runtime_reads_otherwise_is_refused(runtime: str, mount: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ContainerConfig.model_validate({"runtime": runtime, "image": "/i", "mounts": [mount]})


@pytest.mark.parametrize(
    ("runtime", "mount"),
    [
        ("pyxis", "/data"),
        ("pyxis", "/data:/data:ro+rprivate"),
        ("pyxis", "tmpfs:/x"),
        ("apptainer", "/a b:/a b:ro"),
    ],
)
def test_mounts_that_the_runtime_reads_pass(runtime: str, mount: str) -> None:
    ContainerConfig.model_validate({"runtime": runtime, "image": "/i", "mounts": [mount]})


def test_mpirun_cannot_start_ranks_in_a_pyxis_container(profile: Profile) -> None:
    with pytest.raises(ValueError, match="set mpi: pmix"):
        profile(container=PYXIS, mpi="mpirun")


def test_what_a_mount_shows_is_the_same_place(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    (shared / "runs").mkdir(parents=True)
    other.mkdir()
    (shared / "link").symlink_to(other)
    (tmp_path / "name").symlink_to(shared)
    same = Mount(shared, shared)
    assert hidden(shared / "runs/new", [same]) is None
    assert hidden(other, [same]) == other
    assert hidden(shared / "link/x", [same]) == other / "x"
    assert hidden(shared / "link/x", [same, Mount(other, other)]) is None
    assert hidden(shared / "runs", [Mount(other, shared)]) == shared / "runs"
    assert hidden(shared / "runs", [same, Mount(None, shared)]) == shared / "runs"
    assert hidden(tmp_path / "name/runs", [Mount(shared, tmp_path / "name")]) is None


def test_folders_that_no_mount_of_the_profile_shows_are_mounted_at_their_place(tmp_path: Path) -> None:
    project, scratch = tmp_path / "project", tmp_path / "scratch"
    project.mkdir()
    scratch.mkdir()
    (project / "runs").symlink_to(scratch)
    bare = ContainerConfig.model_validate(PYXIS)
    folders = [project, project / "runs/a", project / "x"]
    assert mounts_of(bare, folders) == [f"{project}:{project}", f"{scratch}/a:{scratch}/a"]
    whole = ContainerConfig.model_validate({**PYXIS, "mounts": [f"{tmp_path}:{tmp_path}"]})
    assert mounts_of(whole, folders) == [f"{tmp_path}:{tmp_path}"]
    over = ContainerConfig.model_validate({**PYXIS, "mounts": [f"{scratch}:{project}"]})
    with pytest.raises(ConfigError, match="another folder is mounted over"):
        mounts_of(over, folders)
    with pytest.raises(ConfigError, match="pyxis cannot mount a path with ' '"):
        mounts_of(bare, [tmp_path / "my run"])


def test_paths_under_no_mount_are_refused_with_the_mount_to_add(
    profile: Profile, make_run: MakeRun, place: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (away / "tokenizer.json").touch()
    changes = {
        "tokenizer": {"path": str(away / "tokenizer.json")},
        "prep": {"sources": [{"paths": [f"{away}/pile/*.jsonl", "text.jsonl"]}], "sequence_length": 4096},
        "reading": {"stage_to": str(tmp_path / "local")},
    }
    run = demo(make_run, **changes)
    container = ContainerConfig.model_validate(PYXIS)
    lines = unseen_paths(run, container, place)
    assert [line.partition(":")[0] for line in lines] == [
        "tokenizer.path",
        "reading.stage_to",
        "prep.sources.0.paths",
    ]
    assert lines[0].endswith(f"add {away}:{away} to container.mounts in the cluster profile")
    assert f"add {away}/pile:{away}/pile to" in lines[2]
    (place / "run.yaml").write_text(to_yaml(run))
    cluster = in_container(profile, place, PYXIS)
    (place / "cluster.yaml").write_text(to_yaml(cluster))
    for option in (["--dry-run"], []):
        command = ["submit", "run.yaml", "--cluster", "cluster.yaml", *option]
        done = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
        assert isinstance(done.exception, ConfigError) or done.exit_code == 2, done.output
        assert f"add {away}:{away} to container.mounts" in done.output + str(done.exception)
    mounted = ContainerConfig.model_validate({**PYXIS, "mounts": [f"{tmp_path}:{tmp_path}"]})
    assert unseen_paths(run, mounted, place) == []
    variable = run.model_copy(update={"reading": run.reading.model_copy(update={"stage_to": "$TMPDIR/x"})})
    assert [line.partition(":")[0] for line in unseen_paths(variable, container, place)] == [
        "tokenizer.path",
        "prep.sources.0.paths",
    ]


def test_profiles_in_the_house_ask_for_memory_and_leave_others_theirs() -> None:
    for name in ("container", "example"):
        cluster = load_as(ClusterConfig, ROOT / "configs" / "clusters" / f"{name}.yaml")
        assert cluster.memory_per_node is not None
        assert cluster.stages.eval.memory_per_node not in (None, "0"), "one GPU of a node"
