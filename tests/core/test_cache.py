"""Compiled code is loaded only if this user's processes wrote it and it is as they wrote it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from eqprop.cache import CacheError, code_folder, store_code, stored_code


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EQPROP_CACHE", str(tmp_path / "cache"))
    path = code_folder() / "unit.so"
    store_code(path, b"code" * 1000)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_code_is_read_back_as_it_was_stored(code: Path) -> None:
    assert stored_code(code) == b"code" * 1000
    assert not mode(code) & 0o077 or not mode(code) & 0o022
    assert mode(code_folder()) == 0o700


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(bytes(content))


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:100]),
    "empty": lambda p: p.write_bytes(b""),
    "flipped": flip,
    "gone": Path.unlink,
    "link": link,
    "pipe": pipe,
    "writable by all": lambda p: p.chmod(0o777),
    "no digest": lambda p: p.with_name(p.name + ".sha256").unlink(),
    "another's digest": lambda p: p.with_name(p.name + ".sha256").write_text("0" * 64),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_not_loaded(code: Path, damage: str) -> None:
    DAMAGES[damage](code)
    assert stored_code(code) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_code_or_a_folder_of_another_user_is_not_loaded(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(code, 65534, 65534)
    assert stored_code(code) is None
    os.chown(code.parent, 65534, 65534)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(code.parents[2]))
    elsewhere = code_folder()
    assert elsewhere != code.parent
    assert mode(elsewhere) == 0o700
    os.chown(elsewhere, 65534, 65534)
    with pytest.raises(CacheError, match="belongs to another user.*EQPROP_CACHE"):
        code_folder()


def test_a_folder_of_ours_that_others_can_write_is_closed_to_them(code: Path) -> None:
    code.parent.chmod(0o777)
    assert code_folder() == code.parent
    assert not mode(code.parent) & 0o022
