"""Hugging Face datasets, on a disk or by name: opened within a bounded time, by name always at one commit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from data_prep.errors import SourceError, SourceMistakeError

T = TypeVar("T")
OPEN_SECONDS = 60.0


def commit_of(name: str, split: str) -> str:
    """The newest commit of a dataset on a hub; the empty string where the library works offline, from its cache.

    Raises:
        SourceError: no answer, or no such dataset.
    """
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return ""
    return _reached(name, split, lambda: huggingface_hub.HfApi().dataset_info(name).sha or "")


def open_dataset(name: str, split: str, commit: str | None) -> Any:
    """A dataset of ``datasets``: the folder ``name``, or where there is a ``commit`` the name on a hub, streamed.

    Raises:
        SourceError: it cannot be opened; ``SourceMistakeError`` where it has no such split, no rows, or is not there.
    """
    import datasets

    datasets.disable_progress_bars()
    if commit is None:
        return _opened(name, split)
    return _reached(
        name,
        split,
        lambda: datasets.load_dataset(name, split=split, revision=commit or None, streaming=True),
    )


def _opened(name: str, split: str) -> Any:
    """A dataset of a folder: saved by ``save_to_disk``, or files that ``load_dataset`` streams."""
    import datasets
    import pyarrow

    what = f"the dataset {name!r} (split {split!r})"
    try:
        if _was_saved(Path(name)):
            return _load_saved(Path(name), split, what)
        return datasets.load_dataset(name, split=split, streaming=True)
    except SourceMistakeError:
        raise
    except (pyarrow.ArrowException, json.JSONDecodeError) as error:
        raise SourceError(_damaged(what, error)) from None
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise SourceMistakeError(_misnamed(what, error)) from None
    except Exception as error:  # of the library or of its file formats
        raise SourceError(_damaged(what, error)) from None


def _load_saved(folder: Path, split: str, what: str) -> Any:
    import datasets

    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if split not in splits:
            raise SourceMistakeError(f"{what} has no such split; it has: {', '.join(splits)}")
        folder /= split
    if not json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]:
        raise SourceMistakeError(f"{what} holds no rows: name one that does, or leave it out")
    return datasets.load_from_disk(str(folder))


def reason(error: Exception) -> str:
    """The first line of what a library says went wrong."""
    return str(error).partition("\n")[0].rstrip(". ") or type(error).__name__


def _was_saved(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_info.json", "state.json", "dataset_dict.json"))


def _misnamed(what: str, error: Exception) -> str:
    return f"{what} cannot be read: {reason(error)}; check its name and its split"


def _damaged(what: str, error: Exception) -> str:
    return f"{what} cannot be read: {reason(error)}; is it whole? Copy it or save it again"


def _reached(name: str, split: str, action: Callable[[], T]) -> T:
    from huggingface_hub.errors import RepositoryNotFoundError

    what = f"the dataset {name!r} (split {split!r})"
    try:
        return _within(OPEN_SECONDS, action)
    except RepositoryNotFoundError:
        raise SourceMistakeError(
            f"{what} is not on the hub, or is not for everyone: check its name, log in with `hf auth login`"
        ) from None
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise SourceMistakeError(_misnamed(what, error)) from None
    except TimeoutError:
        raise SourceError(
            f"{what} did not answer within {OPEN_SECONDS:.0f} s: is there a network on this node? Download it where "
            "there is one and name the folder"
        ) from None
    except Exception as error:  # the library raises many kinds; all mean the same to the user
        raise SourceError(
            f"{what} cannot be read: {reason(error)}; is the name right, and is there a network on this node?"
        ) from None


def _within(seconds: float, action: Callable[[], T]) -> T:
    """What ``action`` returns or raises; without a network the library's own retries may take many minutes.

    Raises:
        TimeoutError: it is not done after ``seconds``; it is left behind in a thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)
