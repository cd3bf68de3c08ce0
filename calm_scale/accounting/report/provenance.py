"""Where the numbers come from: configuration hash, commit, versions, sources of the peaks."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import calm_scale
from calm_scale.accounting.hardware import DEVICES
from calm_scale.accounting.report.document import Column, Section, Table
from calm_scale.config import config_hash
from calm_scale.config.run import RunConfig

PACKAGES = ("calm-scale", "pydantic", "matplotlib", "torch", "megatron-core", "deepspeed")


def provenance_section(configs: list[RunConfig]) -> Section:
    """Hashes, commit and versions, and the table of peaks."""
    facts = [(f"configuration {config.name}", config_hash(config)) for config in configs]
    facts += [
        ("commit", _commit()),
        ("written", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("python", platform.python_version()),
        *((name, _version(name)) for name in PACKAGES),
    ]
    peaks = tuple((d.key, d.peak, d.memory, d.source) for d in DEVICES)
    tables = (
        Table("provenance", "Provenance", (Column("what", "What"), Column("value", "Value")), tuple(facts)),
        Table(
            "peaks",
            "Peaks on record (dense bf16)",
            (
                Column("device", "Device"),
                Column("peak", "FLOP/s", "flops"),
                Column("memory", "Memory", "bytes"),
                Column("source", "Source"),
            ),
            peaks,
            note="A device that is not listed has no MFU.",
        ),
    )
    return Section("provenance", "Provenance", (), tables)


def _commit() -> str:
    """The commit of the source tree this program runs from, or ``unknown`` outside of one."""
    root = Path(calm_scale.__file__).parent
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = " (with local changes)" if _git(root, "status", "--porcelain", "--", ".") else ""
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + changed


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
