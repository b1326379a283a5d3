"""The command line in this process."""

from __future__ import annotations

import pytest

from eqprop.cli import main


class Call:
    """Runs a command and returns its exit code, its standard output and its standard error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr("sys.argv", ["eqprop", *map(str, words)])
        self.monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as left:
            main()
        out, err = self.capsys.readouterr()
        return int(left.value.code or 0), out, err
