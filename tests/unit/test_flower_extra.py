"""Without Flower, whoever asks for `offbeat.flower` is told in one line what to install."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

WITHOUT = pytest.mark.skipif(find_spec("flwr") is not None, reason="Flower is installed here")


@WITHOUT
@pytest.mark.parametrize(
    "use", ["import offbeat.flower", "from offbeat.flower import FedAsync", "import offbeat; offbeat.flower.FedAsync"]
)
def test_the_extra_is_named(use: str) -> None:
    program = f"try:\n    {use}\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "flwr is not installed; run: pip install 'offbeat[flower]'\n"
