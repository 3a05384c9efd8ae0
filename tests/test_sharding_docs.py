"""The programs of docs/sharding.md, each in a process of its own: they say how many devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/sharding.md").read_text(), re.S)


@pytest.mark.parametrize("number", [0, 1], ids=["engine", "pmap"])
def test_a_program_of_the_guide_runs_as_it_stands(number, demo_model_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[number]], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PAGED_JAX_DEMO_MODEL": str(demo_model_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(" Paris"), done.stdout
