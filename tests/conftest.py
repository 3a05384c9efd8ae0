"""Fixtures shared by all tests."""

import os
import sys
from pathlib import Path

import jax
import pytest

# Before jax looks for devices: the meshes of the tests.
jax.config.update("jax_num_cpu_devices", 8)

# pytest's importlib mode leaves sys.path alone; this lets tests import their helper modules, such
# as model_files.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file: $PAGED_JAX_DEMO_MODEL, or fetched once and cached."""
    given = os.environ.get("PAGED_JAX_DEMO_MODEL")
    if given:
        return Path(given)
    from paged_jax import demo_model

    return demo_model.demo_model_path()
