"""Sets by name: found where they lie, downloaded from a local server that breaks and lies."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.training_runs import SMALL, few_images, write_idx

from eqprop import data, train
from eqprop.data import sources
from eqprop.data.images import FILES
from eqprop.report.runs import read_run
from eqprop.run import evaluate, resume

pytest.importorskip("pooch")


@dataclass
class Web:
    """A folder of the web on this machine.

    breaks      how many bytes of an answer are sent before the connection is cut, attempt by attempt; None: all
    asked       the path of every request, in order
    """

    files: dict[str, bytes]
    breaks: list[int | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    address: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    web: Web

    def do_GET(self) -> None:
        content = self.web.files.get(self.path.strip("/"))
        self.web.asked.append(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        limit = self.web.breaks.pop(0) if self.web.breaks else None
        self.wfile.write(content[:limit])
        # Without keep-alive the connection ends here, whether or not all that was promised was sent.

    def log_message(self, format: str, *args: object) -> None:
        pass


def tiny_files(seed: int = 0) -> dict[str, bytes]:
    """A set of 30 + 20 images of 4 x 4 pixels, by name."""
    source = np.random.default_rng(seed)
    out = {}
    for name in FILES:
        count = 30 if name.startswith("train") else 20
        if "images" in name:
            head, values = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 4, 4), source.integers(0, 256, count * 16)
        else:
            head, values = struct.pack(">BBBBI", 0, 0, 8, 1, count), np.arange(count) % 10
        out[name] = head + values.astype(np.uint8).tobytes()
    return out


@pytest.fixture
def web() -> Iterator[Web]:
    served = Web({f"{name}.gz": gzip.compress(content, mtime=0) for name, content in tiny_files().items()})
    handler = type("Bound", (Handler,), {"web": served})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    served.address = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fashion-mnist is kept, its host being the local one and its files the tiny ones."""
    monkeypatch.setenv("EQPROP_CACHE", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tiny = replace(
        sources.FASHION_MNIST,
        hosts=(web.address,),
        files={name: digest_of(content) for name, content in web.files.items()},
        contents={name.removesuffix(".gz"): digest_of(gzip.decompress(c)) for name, c in web.files.items()},
        places=(),
    )
    monkeypatch.setitem(sources.NAMED, "fashion-mnist", tiny)
    return tmp_path / "eqprop" / "data" / "fashion-mnist"


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def first_file() -> str:
    return f"{FILES[0]}.gz"


def test_a_set_is_downloaded_once(cache: Path, web: Web, capsys: pytest.CaptureFixture[str]) -> None:
    images = data.open_set("Fashion-MNIST")
    assert (len(images.train_x), len(images.test_x), images.shape, images.name) == (30, 20, (4, 4), "fashion-mnist")
    assert len(web.asked) == 4
    assert {path.name for path in cache.iterdir()} == set(web.files)
    assert capsys.readouterr().err.count("Downloading") == 4
    again = data.open_set("fashion-mnist")
    assert torch.equal(images.train_x, again.train_x)
    assert len(web.asked) == 4


def test_a_download_that_broke_leaves_nothing_and_begins_again(cache: Path, web: Web) -> None:
    web.breaks = [100]
    with pytest.raises(sources.DownloadError) as told:
        data.open_set("fashion-mnist")
    assert str(cache) in str(told.value)
    assert "dataset-fashion-mnist" in str(told.value)
    assert not list(cache.iterdir())
    data.open_set("fashion-mnist")
    assert (cache / first_file()).read_bytes() == web.files[first_file()]
    assert {path.name for path in cache.iterdir()} == set(web.files)


def test_a_wrong_file_is_refused_and_not_kept(cache: Path, web: Web) -> None:
    right = web.files[first_file()]
    web.files[first_file()] = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(sources.DownloadError, match="not the published one") as told:
        data.open_set("fashion-mnist")
    assert digest_of(right) in str(told.value)
    assert not list(cache.iterdir())
    web.files[first_file()] = right
    assert len(data.open_set("fashion-mnist").train_x) == 30


def test_the_second_host_stands_in_for_the_first(cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = sources.NAMED["fashion-mnist"]
    hosts = (f"{web.address}nowhere/", web.address)
    monkeypatch.setitem(sources.NAMED, "fashion-mnist", replace(tiny, hosts=hosts))
    assert len(data.open_set("fashion-mnist").train_x) == 30


def test_offline_it_says_where_to_put_the_files(cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(sources.NAMED["fashion-mnist"], hosts=("http://127.0.0.1:9/",))
    monkeypatch.setitem(sources.NAMED, "fashion-mnist", tiny)
    with pytest.raises(sources.DownloadError) as told:
        data.open_set("fashion-mnist")
    for word in (*web.files, str(cache), "127.0.0.1", "refused"):
        assert word in str(told.value)


@pytest.mark.parametrize("compressed", [False, True])
def test_files_put_there_by_hand_are_taken(cache: Path, web: Web, compressed: bool) -> None:
    cache.mkdir(parents=True)
    for name, content in tiny_files().items():
        # Another compression of the same content, as a package of an operating system has it.
        path = cache / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content, 1) if compressed else content)
    assert len(data.open_set("fashion-mnist").train_x) == 30
    assert web.asked == []


def test_other_files_put_there_by_hand_are_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    for name, content in tiny_files(seed=1).items():
        (cache / name).write_bytes(content)
    with pytest.raises(ValueError, match="is not the expected file"):
        data.open_set("fashion-mnist")


def test_every_named_set_is_pinned() -> None:
    for known in sources.NAMED.values():
        assert set(known.files) == {f"{name}.gz" for name in FILES}
        assert all(len(d) == 64 for d in (*known.files.values(), *known.contents.values()))
        assert all(host.startswith("https://") and host.endswith("/") for host in known.hosts)
    assert {"mnist", "fashion-mnist", "kmnist", "cifar10", "cifar100"} <= set(data.NAMES)


def small_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few digits that go by the name of kmnist."""
    monkeypatch.setenv("EQPROP_CACHE", str(folder))
    place = write_idx(folder / "eqprop" / "data" / "kmnist", few_images(200, 50))
    assert (place / FILES[0]).is_file()


def test_a_run_knows_its_data_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_set(tmp_path, monkeypatch)
    folder = tmp_path / "run"
    train(SMALL.override(epochs=1), folder, data="KMNIST")
    written = json.loads((folder / "experiment.json").read_text())["data"]
    assert (written["name"], written["set"], written["directory"]) == ("kmnist", "kmnist", None)
    assert written["sha256"] == data.open_set("kmnist").sha256
    assert resume(folder).summary["estimators"]["ep"]["trials"][0]["test_error"]
    assert len(evaluate(folder)["ep"]) == 1
    # Other files under that name are noticed.
    write_idx(tmp_path / "eqprop" / "data" / "kmnist", few_images(210, 50))
    with pytest.raises(ValueError, match="was trained on other data"):
        resume(folder)


def test_the_papers_numbers_do_not_stand_beside_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_set(tmp_path, monkeypatch)
    options = {"epochs": 1, "T": 2, "K": 1, "samples": 40}
    train("P-1h", tmp_path / "other", data="kmnist", **options)
    train("P-1h", tmp_path / "digits", **options)
    other, digits = (read_run(tmp_path / name) for name in ("other", "digits"))
    assert other.paper_results == {}
    assert "kmnist" in other.title
    assert digits.paper_results == {}, "nor beside a part of the paper's data"
    assert digits.title == "P-1h (paper, changed)"
    assert "trained on 40 samples" in digits.changes
