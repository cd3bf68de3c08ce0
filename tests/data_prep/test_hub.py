"""`calm-scale prep` on a dataset by name: streamed over HTTP by `datasets`, from a hub on this machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calm_scale.config import RunConfig, to_yaml
from data_prep.prep import prepare

NAME = "org/texts"
FILES = 3


class Hub:
    """As much of the Hub's interface as `datasets` asks for when it streams by name.

    It has one dataset, ``name``, of ``files``; those in ``broken`` are refused.
    """

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        self.name, self.files = name, files
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.endpoint = ""
        self.commit = "a" * 40


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub answers at ``hub.endpoint`` inside."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            hub.asked.append(path)
            about, file = f"/api/datasets/{hub.name}", f"/datasets/{hub.name}/resolve/"
            if path in (about, f"{about}/revision/{hub.commit}"):
                self._json(
                    {"id": hub.name, "sha": hub.commit, "siblings": [{"rfilename": n} for n in hub.files]}
                )
            elif path == f"{about}/tree/{hub.commit}":
                self._json(
                    [
                        {"type": "file", "path": n, "size": len(b), "oid": hub.commit}
                        for n, b in hub.files.items()
                    ]
                )
            elif path.startswith(file) and (name := path.removeprefix(file).partition("/")[2]) in hub.files:
                self._file(name)
            else:
                self._reply(404, {"X-Error-Code": "EntryNotFound" if hub.name in path else "RepoNotFound"})

        do_HEAD = do_GET

        def _file(self, name: str) -> None:
            if name in hub.broken:
                self._reply(403, {})
                return
            whole = hub.files[name]
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range")
            if asked is None:
                self._reply(200, headers, whole)
                return
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            part = whole[int(start) : int(stop) + 1 if stop else len(whole)]
            place = f"bytes {start}-{int(start) + len(part) - 1}/{len(whole)}"
            self._reply(206, {**headers, "Content-Range": place}, part)

        def _json(self, value: object) -> None:
            self._reply(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def _reply(self, code: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(code)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(kit: SimpleNamespace) -> Iterator[Hub]:
    texts = kit.make_texts(90)
    files = {}
    for i in range(FILES):
        file = io.BytesIO()
        pq.write_table(pa.table({"text": texts[i::FILES]}), file)
        files[f"train-{i:05d}-of-{FILES:05d}.parquet"] = file.getvalue()
    with serving(Hub(NAME, files)) as running:
        yield running


@pytest.fixture
def prep(tmp_path: Path, hub: Hub) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in a process of its own: the library reads where its hub is when it is imported."""

    def run(config: RunConfig, *options: str) -> subprocess.CompletedProcess[str]:
        document = tmp_path / "run.yaml"
        document.write_text(to_yaml(config))
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "SLURM_", "OMPI_"))
        }
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
        command = [sys.executable, "-m", "calm_scale", "prep", str(document), *options]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def by_name(make_config: Callable[..., RunConfig], workdir: str = "run", **source: object) -> RunConfig:
    return make_config([], workdir, sources=[{"dataset": NAME, **source}], sequence_length=32)


def test_a_dataset_is_streamed_by_its_name(
    tmp_path: Path, make_config: Callable[..., RunConfig], kit: SimpleNamespace, hub: Hub, prep: Callable
) -> None:
    config = by_name(make_config)
    done = prep(config)
    assert done.returncode == 0, done.stderr
    texts = kit.make_texts(90)
    in_order = [text for i in range(FILES) for text in texts[i::FILES]]
    plain = make_config(kit.write_lines(tmp_path / "a.jsonl", in_order), "plain", sequence_length=32)
    prepare(plain)
    documents = kit.stored_documents(config.data_dir / "train")
    assert documents == kit.stored_documents(plain.data_dir / "train")
    assert kit.count_text(config.data_dir / "train") == kit.count_text(plain.data_dir / "train")
    assert sum(path.endswith(".parquet") for path in hub.asked) >= FILES


def test_a_hub_that_fails_midway_loses_nothing(
    make_config: Callable[..., RunConfig], kit: SimpleNamespace, hub: Hub, prep: Callable
) -> None:
    whole = by_name(make_config, "whole")
    assert prep(whole).returncode == 0
    config = by_name(make_config)
    hub.broken.add(f"train-00002-of-{FILES:05d}.parquet")
    failed = prep(config)
    assert failed.returncode == 1, failed.stderr
    assert f"the dataset '{NAME}' (split 'train') cannot be read at row " in failed.stderr
    assert "rerun prep to go on where it was" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (config.data_dir / "manifest.json").exists()
    hub.broken.clear()
    hub.commit = "b" * 40
    refused = prep(config)
    assert refused.returncode == 2, refused.stderr
    assert "other settings or inputs" in refused.stderr
    hub.commit = "a" * 40
    again = prep(config)
    assert again.returncode == 0, again.stderr
    assert kit.data_bytes(config.data_dir) == kit.data_bytes(whole.data_dir)


def test_names_and_splits_that_are_not_there(
    make_config: Callable[..., RunConfig], hub: Hub, prep: Callable
) -> None:
    other = prep(by_name(make_config, split="test"))
    assert other.returncode == 2, other.stderr
    assert "split 'test'" in other.stderr
    hub.name = "org/others"
    unknown = prep(by_name(make_config, "none"))
    assert unknown.returncode == 2
    assert f"the dataset '{NAME}'" in unknown.stderr and "does not exist or is gated" in unknown.stderr
    assert "Traceback" not in unknown.stderr
