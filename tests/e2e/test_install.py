"""The package as a user gets it: built, and installed into an empty environment without any extra."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CORE_ONLY = """
import importlib.util
import numpy as np
import offbeat
from offbeat.core.kernel import Term, Updater
from offbeat.core.layout import aligned

assert not any(importlib.util.find_spec(name) for name in ("torch", "numba", "matplotlib", "sklearn"))
rule = offbeat.fedasync(0.5, offbeat.polynomial(0.5))
mix, _ = rule.decide(offbeat.Facts(t=4, tau=0), rule.memory)
x, x_new, out = np.ones(3, np.float32), np.zeros(3, np.float32), aligned(3)
with Updater() as updater:
    assert not updater.compiled
    updater.mix(out, x, [Term(mix, x_new)])
assert (out == np.float32(0.75)).all()
try:
    offbeat.torch
except offbeat.OffbeatError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds Offbeat and what it cannot do without."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, str(ROOT)]
    subprocess.run(install, check=True, capture_output=True)
    return python


@pytest.mark.slow
def test_the_core_works_without_any_extra(python: Path) -> None:
    done = subprocess.run([python, "-c", CORE_ONLY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch is not installed; run: pip install 'offbeat[torch]'\n"


@pytest.mark.slow
def test_the_command_works_without_any_extra(python: Path) -> None:
    offbeat = python.with_name("offbeat")
    version = subprocess.run([offbeat, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("offbeat, version ")
    demo = subprocess.run([offbeat, "demo"], capture_output=True, text=True, check=False, cwd=python.parent)
    assert demo.returncode == 2
    assert demo.stderr.count("\n") == 1
    assert "pip install 'offbeat[demo]'" in demo.stderr
    assert sys.version_info >= (3, 11)
