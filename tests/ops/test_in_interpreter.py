"""Runs the tests of the Triton kernels, `test_triton_*.py`, in Triton's interpreter: on a CPU, in
their own process.

The interpreter is chosen by a variable that Triton reads when it is first imported, so it cannot be
chosen here.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="is inside the interpreter already"
)
@pytest.mark.parametrize("file", sorted(HERE.glob("test_triton_*.py")), ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(file: Path) -> None:
    # OMP_NUM_THREADS: several test processes share the cores.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(file),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
