"""An installed package submits like a checkout: job scripts and the demo's configuration are inside the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ("calm_scale", "launchers", "data_prep", "slurm", "configs", "pyproject.toml", "README.md")
PROGRAM = """
import launchers.slurm.templates as templates, sys
from calm_scale.cli.app import main
from calm_scale.config import load
from calm_scale.stages.demo.commands import presets
print(templates.TEMPLATES, load(presets() / "quick.yaml").name)
sys.argv[0] = "calm-scale"
main()
"""


def test_a_wheel_can_submit(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in PACKAGED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name, **({"symlinks": True} if copy is shutil.copytree else {}))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    shutil.rmtree(source)
    training = {"steps": 10, "global_batch": 4}
    document = {"workdir": str(tmp_path / "run"), "autoencoder": {"training": training, "zero": {"data": 2}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "cluster.yaml").write_text("name: tiny\ncpus_per_node: 8\nlink_check: true\n")
    arguments = ["submit", "run.yaml", "--cluster", "cluster.yaml", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    templates = site / "launchers" / "slurm" / "scripts"
    assert f"{templates} quick" in done.stdout
    script = (tmp_path / "run" / "slurm" / "autoencoder.sbatch").read_text()
    assert "train-ae" in script
    assert str(ROOT) not in script.replace(sys.executable, "")
