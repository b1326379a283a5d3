"""The files that start several processes: correct as far as a machine without a cluster can tell, and run with gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eqprop.run.checkpoint import checkpoint_file, read_checkpoint
from eqprop.run.folder import last_session, sessions

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "distributed"
BIN = Path(sys.executable).parent
SCRIPTS = ("one-machine.sh", "two-machines.sh", "slurm.sbatch")
LITTLE = ("--samples", "200", "--test-samples", "100", "--epochs", "1")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC"))}
    return {**kept, "PATH": f"{BIN}:{kept['PATH']}", "OMP_NUM_THREADS": "1", "PROCESSES": "2", "DEVICE": "cpu", **more}


def run(*words: object, **more: str) -> str:
    done = subprocess.run(
        [*map(str, words)], env=environment(**more), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def container() -> dict[str, Any]:
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    (found,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return dict(found)


def test_every_file_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {*SCRIPTS, "own_loop.py", "pytorchjob.yaml"}


@pytest.mark.slow
def test_a_loop_of_ones_own_runs_under_torchrun_as_alone() -> None:
    script = EXAMPLES / "own_loop.py"
    alone = run(sys.executable, script)
    together = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script)
    losses = [re.findall(r"loss (\d\.\d+)", text) for text in (alone, together)]
    assert len(losses[0]) == 3
    assert float(losses[0][2]) < 0.7 * float(losses[0][0])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_leave_options_to_eqprop(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    run("bash", "-n", EXAMPLES / name)
    assert "set -euo pipefail" in text or "set -uo pipefail" in text
    assert re.search(r"torchrun .*--max-restarts \d", text)
    assert '-m -- eqprop "${command[@]}"' in text


def ranks_of(folder: Path) -> int:
    session = last_session(folder)
    assert session is not None
    assert (folder / "result.json").exists()
    return int(session["provenance"]["ranks"])


@pytest.mark.slow
def test_one_machine(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("bash", EXAMPLES / "one-machine.sh", "P-1h", out, *LITTLE, "--start", "persistent")
    assert ranks_of(out) == 2
    run("bash", EXAMPLES / "one-machine.sh", "P-1h", out)  # finished: nothing is left to do


@pytest.mark.slow
def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    words = ["P-1h", "--samples", "400", "--test-samples", "100", "--epochs", "8"]
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "--", "eqprop"]
    run(*torchrun, "train", *words, "--out", tmp_path / "a")
    out = tmp_path / "run"
    job = subprocess.Popen(
        ["bash", str(EXAMPLES / "one-machine.sh"), words[0], str(out), *words[1:]],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    for epoch in (1, 3):
        while not checkpoint_file(out / "ep").exists() or read_checkpoint(out / "ep").position.epoch < epoch:
            assert job.poll() is None
            time.sleep(0.01)
        children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True)
        os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    said = job.communicate(timeout=300)[1]
    assert job.returncode == 0, said
    one, other = (read_checkpoint(folder / "ep").weights for folder in (tmp_path / "a", out))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(sessions(out)) == 3


@pytest.mark.slow
def test_two_machines_on_one(tmp_path: Path) -> None:
    words = ["bash", str(EXAMPLES / "two-machines.sh"), "P-1h", str(tmp_path / "run"), *LITTLE]
    given = environment(FIRST="localhost", PORT="29471", JOB=tmp_path.name, PROCESSES="1")
    both = [subprocess.Popen(words, env=given, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate(timeout=300)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert ranks_of(tmp_path / "run") == 2


@pytest.mark.slow
def test_slurm_with_stand_ins(tmp_path: Path) -> None:
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, text in (("srun", 'exec "$@"'), ("scontrol", "echo localhost")):
        (stand_ins / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (stand_ins / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "7"}
    path = f"{stand_ins}:{environment()['PATH']}"
    run("bash", EXAMPLES / "slurm.sbatch", "P-1h", tmp_path / "run", *LITTLE, PATH=path, **slurm)
    assert ranks_of(tmp_path / "run") == 2


@pytest.mark.slow
def test_the_command_of_the_pytorchjob(tmp_path: Path) -> None:
    operator = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29473"}
    run("bash", "-c", container()["args"][0], RUN=str(tmp_path / "run"), EXPERIMENT=_little(tmp_path), **operator)
    assert ranks_of(tmp_path / "run") == 2


def _little(folder: Path) -> str:
    path = folder / "little.toml"
    path.write_text('base = "P-1h"\nepochs = 1\nbatch = 1000\n')
    return str(path)
