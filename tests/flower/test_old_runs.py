"""A run on Flower that an earlier version was interrupted in goes on to the bits that it would have reached there."""

import json
import shutil
from pathlib import Path

import pytest

from tests.flower.recorded import resumed

pytestmark = pytest.mark.slow

VERSIONS = sorted((Path(__file__).parents[1] / "golden").glob("runs_of_*"))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_an_interrupted_run_ends_with_the_bits_of_its_own_version(version: Path, tmp_path: Path) -> None:
    shutil.copytree(version / "flower_interrupted", tmp_path / "run")
    expected = json.loads((version / "expected.json").read_text())["flower_interrupted"]["resumed"]
    assert resumed(tmp_path / "run") == expected
