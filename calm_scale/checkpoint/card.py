"""The identity card: what a checkpoint is a checkpoint of, and how far it had come."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

import calm_scale
from calm_scale.checkpoint.errors import CheckpointError, UnknownRunError
from calm_scale.checkpoint.file_list import CARD, SUSPECT, write_json
from calm_scale.config import RunConfig, config_hash
from calm_scale.config.files import checked
from calm_scale.config.section import Section

S = TypeVar("S", bound=Section)
FORMAT_VERSION = 1
FINGERPRINTS = ("tokenizer_fingerprint", "shards_fingerprint", "autoencoder_fingerprint")

UNITS = {
    "steps": "optimizer steps, skipped ones included",
    "samples": "sequences taken from the sample stream",
    "tokens": "tokens in those sequences",
    "skipped_steps": "optimizer steps whose update was discarded for a non-finite gradient",
    "consecutive_skips": "skipped steps in a row up to now",
}


class Counters(Section):
    """How far the run has come. ``UNITS`` says what each number counts; it is written beside them."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0


class Identity(Section):
    """What does not change while a run goes on in one attempt.

    ``config`` is the resolved document. ``topology`` says which layout wrote the shards, e.g.
    ``{"world_size": 4, "tensor": 2, "pipeline": 2, "data": 1}`` or ``{"world_size": 2, "zero_stage": 1}``.
    """

    stage: str
    run_id: str
    config: dict[str, Any]
    config_hash: str
    patch_size: int
    vocab_size: int
    tokenizer_fingerprint: str
    shards_fingerprint: str
    autoencoder_fingerprint: str | None = None
    topology: dict[str, Any] = Field(default_factory=dict)
    code_version: str = ""
    attempt: int = 0
    logging_run_id: str = ""

    @property
    def fingerprints(self) -> dict[str, str | None]:
        """What the run reads besides its configuration, by field name."""
        return {name: getattr(self, name) for name in FINGERPRINTS}

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        stage: str,
        *,
        run_id: str,
        attempt: int,
        topology: dict[str, Any],
        tokenizer_fingerprint: str,
        shards_fingerprint: str,
        autoencoder_fingerprint: str | None = None,
    ) -> Identity:
        """The identity of a stage (``autoencoder`` or ``lm``) of the run that ``config`` describes."""
        return cls(
            stage=stage,
            run_id=run_id,
            config=config.model_dump(mode="json"),
            config_hash=config_hash(config),
            patch_size=config.patch_size,
            vocab_size=config.vocab_size,
            tokenizer_fingerprint=tokenizer_fingerprint,
            shards_fingerprint=shards_fingerprint,
            autoencoder_fingerprint=autoencoder_fingerprint,
            topology=topology,
            code_version=code_version(),
            attempt=attempt,
            logging_run_id=f"{run_id}-a{attempt}",
        )


class Card(Identity):
    """One checkpoint's ``card.json``.

    ``metrics`` holds the finite numbers of the step. ``pending_row`` is the step's row when a stop signal ended its
    evaluation: the resumed run evaluates first and completes the row. ``suspect`` says why the state should not be
    resumed unasked: no finite step followed it. Empty where nothing is known against it.
    """

    format_version: int = FORMAT_VERSION
    created: float
    counters: Counters
    units: dict[str, str] = Field(default_factory=lambda: dict(UNITS))
    schedule: dict[str, Any] = Field(default_factory=dict)
    rng: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    pending_row: dict[str, Any] | None = None
    suspect: str = ""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.counters.steps

    @property
    def layout(self) -> str:
        """The layout that wrote it, in short: ``tp2 pp2 × 2 chunks dp1``, or ``zero2 ×4`` for an autoencoder."""
        at = self.topology
        if "zero_stage" in at:
            return f"zero{at['zero_stage']} ×{at.get('world_size', '?')}"
        if "tensor" not in at:
            return ""
        chunks = f" × {at['virtual_pipeline']} chunks" if at.get("virtual_pipeline", 1) > 1 else ""
        return f"tp{at['tensor']} pp{at.get('pipeline', 1)}{chunks} dp{at.get('data', 1)}"

    @classmethod
    def of(cls, identity: Identity, **more: Any) -> Card:
        """The identity plus what a moment adds: ``created``, ``counters``, ``schedule``, ``rng``, ``metrics``."""
        return cls(**identity.model_dump(), **more)

    def write(self, folder: Path) -> None:
        """Writes ``card.json``, durable on return."""
        write_json(folder / CARD, self.model_dump(mode="json"))

    @classmethod
    def read(cls, folder: Path) -> Card:
        """Raises CheckpointError with the reason when the card is missing, damaged or from a newer format."""
        path = folder / CARD
        try:
            raw = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"no {CARD}") from None
        except OSError as error:
            raise CheckpointError(f"{CARD} cannot be read: {error.strerror}") from None
        except ValueError:
            raise CheckpointError(f"{CARD} is damaged") from None
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(f"{CARD} has format {version}; this program reads up to {FORMAT_VERSION}")
        card = checked(cls, raw, CARD, raises=CheckpointError)
        return card.model_copy(update={"suspect": card.suspect or _suspicion(folder)})

    def described(self, model: type[S], key: str | None = None, folder: Path | None = None) -> S:
        """The configuration of the run, or its section ``key``, as a model.

        Raises:
            UnknownRunError: it is not one of this version; names ``folder``, where the card lies.
        """
        where = f"{CARD if folder is None else folder / CARD}: config" + (f".{key}" if key else "")
        remedy = f"it was written by version {self.code_version or 'unknown'}; use that one"
        raw = self.config.get(key) if key else self.config
        return checked(model, raw, where, remedy=remedy, raises=UnknownRunError)


def mark_suspect(folder: Path, reason: str) -> None:
    """Marks a committed checkpoint as one that no finite step followed; ``Card.read`` returns the reason from now on.

    The card itself stays as it was sealed: rewriting it would leave a damaged checkpoint after a crash.
    """
    write_json(folder / SUSPECT, {"reason": reason})


def _suspicion(folder: Path) -> str:
    """What was written by ``mark_suspect``; empty without it."""
    try:
        return str(json.loads((folder / SUSPECT).read_bytes())["reason"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return f"{SUSPECT} cannot be read"


def code_version() -> str:
    """Version of the package, and the commit where it runs from a git checkout."""
    version = getattr(calm_scale, "__version__", "0")
    root = Path(calm_scale.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return version
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}+{found}"
