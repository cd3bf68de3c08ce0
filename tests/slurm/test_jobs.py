"""Chains of jobs on a real SLURM, with stand-in stages: what the scripts do about signals, crashes and dead nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from calm_scale.config import RunConfig, to_yaml
from calm_scale.config.cluster import ClusterConfig
from calm_scale.stages.sweep import plan_sweep
from launchers.slurm.queue import cancel
from launchers.slurm.record import Attempt, RunRecord
from launchers.slurm.status import job_status
from launchers.slurm.submit import Submission, submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

Profile = Callable[..., ClusterConfig]
MakeRun = Callable[..., RunConfig]
SHORT = {"preflight": False}
ONE_RANK = {"training": {"steps": 10, "global_batch": 4}, "zero": {"data": 1}}


def attempts(run: RunConfig, stage: str = "lm") -> list[Attempt]:
    return RunRecord(run.workdir).attempts(stage)


def ids(submission: Submission) -> dict[str, str]:
    return {job.stage: job.job_id or "" for job in submission.jobs}


def job_log(run: RunConfig, stage: str, job: str) -> str:
    return (run.workdir / "slurm" / "logs" / f"{stage}-{job}.log").read_text()


def newest(run: RunConfig) -> int:
    return max(
        (int(path.name[5:]) for path in (run.workdir / "lm/checkpoints").glob("step_????????")), default=-1
    )


def ranks(run: RunConfig, attempt: int, stage: str = "lm") -> list[dict[str, int]]:
    found = sorted((run.workdir / stage / "ranks").glob(f"attempt_{attempt}.rank_*"))
    return [json.loads(path.read_text()) for path in found]


def has_ranks(run: RunConfig, attempt: int) -> bool:
    return len(ranks(run, attempt)) == 2


def has_attempts(run: RunConfig, count: int) -> bool:
    return len(attempts(run)) >= count


def whole_chain_and_resubmission(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("chain")
    first = submit(run, profile())
    assert [job.outcome for job in first.jobs] == ["submitted"] * 4
    again = submit(run, profile())
    assert [job.outcome for job in again.jobs] == ["queued already"] * 4
    assert ids(again) == ids(first)
    slurm.wait_state(ids(first)["eval"], "COMPLETED")
    assert [slurm.state(job) for job in ids(first).values()] == ["COMPLETED"] * 4
    assert [job.outcome for job in submit(run, profile()).jobs] == ["done already"] * 4
    assert {fact["size"] for stage in ("autoencoder", "lm") for fact in ranks(run, 1, stage)} == {2}
    assert all(fact["port"] < 32_768 for fact in ranks(run, 1))
    assert [stage.state for stage in job_status(run.workdir).stages] in (["done"] * 4, ["completed"] * 4)


def notice_saves_requeues_and_goes_on_in_the_same_folder(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("notice", {"lm": {"steps": 60, "seconds": 0.1, "save_seconds": 1.0}})
    job = ids(submit(run, profile(**SHORT), stages=["lm"]))["lm"]
    for attempt in (1, 2):
        slurm.wait_for(partial(has_ranks, run, attempt), f"attempt {attempt}")
        time.sleep(0.5)
        slurm.run("scancel", "--signal=USR1", "--batch", job)
        slurm.wait_for(partial(has_attempts, run, attempt + 1), "the next attempt")
    slurm.wait_state(job, "COMPLETED")
    lives = attempts(run)
    assert [life.cause for life in lives] == ["limit", "limit", "finished"]
    assert [life.started_at for life in lives[1:]] == [life.ended_at for life in lives[:-1]]
    assert newest(run) == 60
    text = job_log(run, "lm", job)
    assert "attempt 1]" in text, "the log of the first life was kept"
    assert "attempt 3]" in text
    assert {life.job_id for life in lives} == {job}


def killed_rank_is_named_and_the_job_goes_on(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("killed", {"lm": {"steps": 40, "seconds": 0.2, "interval": 5}})
    job = ids(submit(run, profile(**SHORT), stages=["lm"]))["lm"]
    slurm.wait_for(lambda: newest(run) >= 5 and len(ranks(run, 1)) == 2, "a checkpoint")
    os.kill(ranks(run, 1)[1]["pid"], signal.SIGKILL)
    slurm.wait_for(
        lambda: attempts(run)[0].cause == "crash", "the end of the rank that waits for the killed one"
    )
    verdict = RunRecord(run.workdir).verdict("lm")
    assert "rank 1 on node n2: Killed" in verdict
    assert "rank 1 of 2" in verdict, "its last lines"
    assert "--exclude=n2" in verdict
    slurm.wait_state(job, "COMPLETED")
    assert attempts(run)[1].started_at >= 5


def crash_loop_stops_with_a_verdict_and_ends_the_chain(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("loop", {"lm": {"steps": 9, "crash_at": 2, "code": 1}})
    jobs = ids(
        submit(
            run,
            profile(
                **SHORT,
                requeue={"notice_seconds": 30, "end_others_seconds": 1, "max_attempts_without_progress": 2},
            ),
            stages=["lm", "eval"],
        )
    )
    slurm.wait_state(jobs["lm"], "FAILED")
    assert [life.cause for life in attempts(run)] == ["crash", "crash"]
    status = job_status(run.workdir).stages[2]
    assert "deliberate: the last rank fails here" in status.verdict
    assert "rank 1 on node n2: Exited with exit code 1" in status.verdict
    slurm.wait_for(lambda: slurm.state(jobs["eval"]) == "CANCELLED", "the end of the dependent job")


def misconfiguration_is_not_tried_again(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("wrong", {"lm": {"crash_at": 1, "code": 2}})
    job = ids(submit(run, profile(**SHORT), stages=["lm"]))["lm"]
    slurm.wait_state(job, "FAILED")
    assert [life.cause for life in attempts(run)] == ["misconfigured"]


def numbers_that_are_not_finite_end_the_chain(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("nonfinite", {"lm": {"crash_at": 1, "code": 76}})
    quick = {"notice_seconds": 30, "end_others_seconds": 1}
    jobs = ids(submit(run, profile(**SHORT, requeue=quick), stages=["lm", "eval"]))
    slurm.wait_state(jobs["lm"], "FAILED")
    assert [(life.cause, life.code) for life in attempts(run)] == [("nonfinite", 76)]
    assert "a person must decide" in job_status(run.workdir).stages[2].verdict
    slurm.wait_for(lambda: slurm.state(jobs["eval"]) == "CANCELLED", "the end of the dependent job")


def crash_with_progress_is_tried_again(slurm, profile: Profile, make_run: MakeRun) -> None:
    settings = {"steps": 9, "crash_at": 5, "crash_once": 1, "interval": 2, "code": 1, "seconds": 0.2}
    run = make_run("once", {"lm": settings})
    one = {"notice_seconds": 30, "end_others_seconds": 1, "max_attempts_without_progress": 1}
    job = ids(submit(run, profile(**SHORT, requeue=one), stages=["lm"]))["lm"]
    slurm.wait_state(job, "COMPLETED")
    assert [life.cause for life in attempts(run)] == ["crash", "finished"]


def scancel_is_not_undone(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("scancel", {"lm": {"steps": 900}})
    job = ids(submit(run, profile(**SHORT), stages=["lm"]))["lm"]
    slurm.wait_for(lambda: len(ranks(run, 1)) == 2, "the ranks")
    slurm.run("scancel", job)
    slurm.wait_state(job, "CANCELLED")
    time.sleep(5)
    assert slurm.state(job) == "CANCELLED"
    assert len(attempts(run)) == 1


def cancel_saves_first_and_empties_the_chain(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("cancel", {"lm": {"steps": 900, "save_seconds": 1.0}})
    jobs = ids(submit(run, profile(**SHORT), stages=["lm", "eval"]))
    slurm.wait_for(lambda: len(ranks(run, 1)) == 2, "the ranks")
    time.sleep(0.5)
    done = cancel(run.workdir)
    assert done.saving == (jobs["lm"],)
    assert done.removed == (jobs["eval"],)
    slurm.wait_state(jobs["lm"], "FAILED")
    assert attempts(run)[-1].cause == "cancelled"
    assert newest(run) > 0
    assert len(attempts(run)) == 1
    assert job_status(run.workdir).stages[2].state in ("cancelled", "failed")
    again = submit(run, profile(**SHORT), stages=["lm"])
    assert again.jobs[0].outcome == "submitted"
    slurm.wait_for(lambda: len(attempts(run)) == 2, "the run goes on when submitted again")
    assert attempts(run)[1].started_at == newest(run)
    slurm.run("scancel", ids(again)["lm"])


def array_of_two_requeues_only_the_one(slurm, profile: Profile, make_run: MakeRun) -> None:
    base = make_run("sweep", prep=None, autoencoder=None)
    document, cluster = base.workdir / "sweep.yaml", base.workdir / "cluster.yaml"
    document.write_text(to_yaml(base))
    cluster.write_text(to_yaml(profile(**SHORT)))
    option = "lm.training.optimizer.lr=1e-4,2e-4"
    runs = plan_sweep(document, [], [option]).runs
    for run in runs:
        run.workdir.mkdir(parents=True)
        (run.workdir / "behaviour.json").write_text(json.dumps({"lm": {"steps": 400, "seconds": 0.1}}))
    command = [sys.executable, "-m", "calm_scale", "submit", str(document), "--cluster", str(cluster)]
    slurm.run(*command, "--sweep", option)
    jobs = {RunRecord(run.workdir).jobs()["lm"].job_id for run in runs}
    assert len(jobs) == 1, "one array for both"
    job = jobs.pop()
    slurm.wait_for(lambda: all(len(ranks(run, 1)) == 2 for run in runs), "both tasks")
    ports = [ranks(run, 1)[0]["port"] for run in runs]
    assert ports[0] != ports[1], "two runs at the same moment"
    slurm.run("scancel", "--signal=USR1", "--batch", f"{job}_0")
    for index, run in enumerate(runs):
        slurm.wait_state(f"{job}_{index}", "COMPLETED")
        assert [life.cause for life in attempts(run)] == [["limit", "finished"], ["finished"]][index]
        evaluation = RunRecord(run.workdir).jobs()["eval"]
        slurm.wait_state(evaluation.task_id, "COMPLETED")
    before = [RunRecord(run.workdir).jobs() for run in runs]
    slurm.run(*command, "--sweep", option)
    assert [RunRecord(run.workdir).jobs() for run in runs] == before, "submitting again queues nothing"


def one_run_is_never_run_twice_at_once(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("twice", {"lm": {"steps": 100_000, "seconds": 0.2}})
    submission = submit(run, profile(**SHORT), stages=["lm"])
    slurm.wait_for(lambda: len(ranks(run, 1)) == 2, "the ranks")
    second = slurm.run("sbatch", "--parsable", str(submission.jobs[0].script)).strip()
    slurm.wait_state(second, "FAILED")
    assert "already running stage lm" in job_log(run, "lm", second)
    first = ids(submission)["lm"]
    assert slurm.state(first) == "RUNNING"
    assert len(attempts(run)) == 1
    slurm.run("scancel", first)


def ranks_that_never_finish_saving_are_requeued_before_the_limit(
    slurm, profile: Profile, make_run: MakeRun
) -> None:
    run = make_run(
        "deaf", {"lm": {"steps": 900, "interval": 5, "save_seconds": 0.1, "deaf_until_attempt": 2}}
    )
    stages = {"lm": {"nodes": 2, "cpus_per_task": 1, "time": "00:01:00"}}
    job = ids(submit(run, profile(**SHORT, stages=stages, requeue={"notice_seconds": 20}), stages=["lm"]))[
        "lm"
    ]
    slurm.wait_for(partial(has_attempts, run, 2), "the second attempt")
    first = attempts(run)[0]
    assert (first.cause, first.code) == ("limit", 124)
    assert first.ended_at >= 5
    assert "did not finish saving before the time limit" in job_log(run, "lm", job)
    cancel(run.workdir)


def every_checkpoint_is_evaluated_once(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("each", {"lm": {"steps": 8, "interval": 4, "seconds": 0.1}, "eval": {}})
    jobs = ids(submit(run, profile(**SHORT, eval_each_checkpoint=True), stages=["lm", "eval"]))
    slurm.wait_state(jobs["eval"], "COMPLETED")
    asked = RunRecord(run.workdir).evaluation_jobs()
    assert sorted(asked) == [4, 8]
    for step, job in asked.items():
        slurm.wait_state(job, "COMPLETED")
        assert (run.workdir / "eval" / f"part-0{step}").is_file()


def a_user_who_is_not_root(slurm, profile: Profile, make_run: MakeRun) -> None:
    """Writes the scripts as anybody would, queues them as that user; the job requeues itself with its rights."""
    nobody = 65534
    workdir = slurm.root / "home of nobody"
    program = slurm.root / "nobodys-python"
    program.write_text(
        "#!/bin/bash\nif [[ $2 == calm_scale ]]; then exit 1; fi\n"
        "if [[ $CALM_SCALE_ATTEMPT == 1 ]]; then trap 'exit 75' USR1; touch \"$PWD/ready\"; "
        'for _ in {1..600}; do sleep 0.1; done; fi\nid -u > "$PWD/uid.$SLURM_PROCID"\n'
    )
    program.chmod(0o755)
    workdir.mkdir()
    run = make_run("nobody", workdir=str(workdir))
    script = submit(run, profile(**SHORT, python=str(program)), dry_run=True, stages=["lm"]).jobs[0].script
    text = script.read_text().replace(
        f"--chdir={shlex.quote(str(Path.cwd()))}", f"--chdir={shlex.quote(str(workdir))}"
    )
    script.write_text(text)
    for path in [workdir, *workdir.rglob("*")]:
        os.chown(path, nobody, nobody)
    user = ["setpriv", f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups"]
    job = slurm.run(*user, "sbatch", "--parsable", str(script)).strip()
    slurm.wait_for((workdir / "ready").exists, "the ranks")
    slurm.run(*user, "scancel", "--signal=USR1", "--batch", job)
    slurm.wait_state(job, "COMPLETED")
    assert (workdir / "uid.1").read_text().strip() == str(nobody)
    assert [life.cause for life in attempts(run)] == ["limit", "finished"]


def links_between_nodes_are_measured(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("links")
    job = ids(submit(run, profile(link_check=True), stages=["lm"]))["lm"]
    slurm.wait_state(job, "COMPLETED")
    assert re.search(r"link n1 – n2: \d+\.\d+ GB/s", job_log(run, "lm", job))


def a_bad_node_is_excluded_and_named(slurm, profile: Profile, make_run: MakeRun) -> None:
    """The GPU of one node does not answer: the job goes on on the other node."""
    run = make_run("badnode", device="cpu", lm=None, prep=None, autoencoder=ONE_RANK)
    program = run.workdir / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/bash\nmark=$(dirname "$0")/bad\n[[ -e $mark ]] || echo "$SLURMD_NODENAME" >"$mark"\n'
        'if [[ $(cat "$mark") == "$SLURMD_NODENAME" ]]; then echo "no devices were found"; exit 6; fi\n'
        'echo "H100, 550, 1980, 0"\n'
    )
    program.chmod(0o755)
    gpus = {"gpus_per_node": 1, "gpu_request": "none", "stages": {"autoencoder": {"cpus_per_task": 1}}}
    setup = [f"export PATH={shlex.quote(str(program.parent))}:$PATH"]
    job = ids(submit(run, profile(**gpus, setup=setup), stages=["autoencoder"]))["autoencoder"]
    slurm.wait_state(job, "COMPLETED")
    bad = (program.parent / "bad").read_text().strip()
    assert [entry.node for entry in RunRecord(run.workdir).exclusions.current()] == [bad]
    lives = attempts(run, "autoencoder")
    assert [life.cause for life in lives] == ["preflight", "finished"]
    assert lives[0].nodes == bad != lives[1].nodes
    assert f"bad node {bad}: nvidia-smi failed: no devices were found" in job_log(run, "autoencoder", job)


def a_fault_that_every_node_has_excludes_nobody(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("nosmi", lm=None, prep=None, autoencoder=ONE_RANK)
    gpus = {"gpus_per_node": 1, "gpu_request": "none", "stages": {"autoencoder": {"cpus_per_task": 1}}}
    job = ids(submit(run, profile(**gpus), stages=["autoencoder"]))["autoencoder"]
    slurm.wait_state(job, "FAILED")
    record = RunRecord(run.workdir)
    assert [life.cause for life in record.attempts("autoencoder")] == ["check"]
    assert record.exclusions.current() == []
    assert "nvidia-smi was not found" in record.verdict("autoencoder").splitlines()[0]


SCENARIOS = (
    whole_chain_and_resubmission,
    notice_saves_requeues_and_goes_on_in_the_same_folder,
    killed_rank_is_named_and_the_job_goes_on,
    crash_loop_stops_with_a_verdict_and_ends_the_chain,
    misconfiguration_is_not_tried_again,
    crash_with_progress_is_tried_again,
    scancel_is_not_undone,
    cancel_saves_first_and_empties_the_chain,
    array_of_two_requeues_only_the_one,
    one_run_is_never_run_twice_at_once,
    ranks_that_never_finish_saving_are_requeued_before_the_limit,
    every_checkpoint_is_evaluated_once,
    a_user_who_is_not_root,
    links_between_nodes_are_measured,
    a_bad_node_is_excluded_and_named,
    a_fault_that_every_node_has_excludes_nobody,
    numbers_that_are_not_finite_end_the_chain,
)


@pytest.fixture(scope="module")
def outcomes(slurm, profile: Profile, make_run: MakeRun) -> Iterator[dict[str, Future[None]]]:
    """Six scenarios at once: they mostly wait, and every job of theirs has room on the cluster."""
    with ThreadPoolExecutor(max_workers=6) as pool:
        yield {scenario.__name__: pool.submit(scenario, slurm, profile, make_run) for scenario in SCENARIOS}


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario(name: str, outcomes: dict[str, Future[None]]) -> None:
    outcomes[name].result()


def test_dead_node_is_nobodys_fault(slurm, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("node", {"lm": {"steps": 60, "seconds": 0.2, "interval": 5}})
    one = {"notice_seconds": 30, "max_attempts_without_progress": 1}
    job = ids(submit(run, profile(**SHORT, requeue=one), stages=["lm"]))["lm"]
    slurm.wait_for(lambda: newest(run) >= 5, "a checkpoint")
    slurm.kill_node("n2")
    slurm.wait_for(lambda: slurm.state(job) != "RUNNING", "the controller to notice")
    slurm.start_node("n2")
    slurm.wait_state(job, "COMPLETED")
    lives = attempts(run)
    assert [life.cause for life in lives] == ["outside", "finished"]
    assert lives[1].started_at >= 5


def test_a_rank_killed_in_a_container_ends_the_others_and_the_job_goes_on(
    slurm, profile: Profile, make_run: MakeRun
) -> None:
    """apptainer is a stand-in that starts the command in the folder it is told."""
    run = make_run("contained", {"lm": {"steps": 40, "seconds": 0.2, "interval": 5}})
    program = run.workdir / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/bash\ncd "$3" || exit 1\nshift 3\nwhile [[ $1 == --bind ]]; do shift 2; done\nshift\nexec "$@"\n'
    )
    program.chmod(0o755)
    container = {"runtime": "apptainer", "image": "/images/calm.sif"}
    setup = [f"export PATH={shlex.quote(str(program.parent))}:$PATH"]
    cluster = profile(**SHORT, container=container, setup=setup)
    job = ids(submit(run, cluster, stages=["lm"]))["lm"]
    slurm.wait_for(lambda: newest(run) >= 5 and len(ranks(run, 1)) == 2, "a checkpoint")
    os.kill(ranks(run, 1)[1]["pid"], signal.SIGKILL)
    slurm.wait_state(job, "COMPLETED")
    lives = attempts(run)
    assert [life.cause for life in lives] == ["crash", "finished"]
    assert lives[1].started_at >= 5
    assert "failed with code" not in job_log(run, "lm", job)


def test_sbatch_accepts_every_script(slurm, profile: Profile, make_run: MakeRun) -> None:
    for number, changes in enumerate([{}, {"mpi": "mpirun", "constraint": None, "memory_per_node": "1M"}]):
        submission = submit(
            make_run(f"accepted {number}".replace(" ", "-")), profile(**changes), dry_run=True
        )
        for job in submission.jobs:
            slurm.run("sbatch", "--test-only", str(job.script))


def test_a_controller_that_is_silent_for_a_while_harms_no_job(
    slurm, profile: Profile, make_run: MakeRun
) -> None:
    """Silent before the job saves, while it saves, and for half a minute after: it goes on where it was."""
    run = make_run("silence", {"lm": {"steps": 60, "seconds": 0.2, "save_seconds": 1.0}})
    job = ids(submit(run, profile(**SHORT, requeue={}), stages=["lm"]))["lm"]
    slurm.wait_for(lambda: len(ranks(run, 1)) == 2, "the ranks")
    script = slurm.script_of(job)
    slurm.stop_controller()
    try:
        time.sleep(2)
        assert attempts(run)[0].cause == "", "the ranks work"
        os.kill(script, signal.SIGUSR1)
        slurm.wait_for(lambda: newest(run) > 0, "the save")
        time.sleep(30)
    finally:
        slurm.start_controller()
    slurm.wait_state(job, "COMPLETED")
    lives = attempts(run)
    assert [life.cause for life in lives] == ["limit", "finished"]
    assert lives[1].started_at == lives[0].ended_at > 0
