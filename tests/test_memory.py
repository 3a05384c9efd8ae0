"""Resident memory: what loading takes, and that it stays where it is with many requests."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import random_tensors, tensor_shapes, tiny_config, write_gguf, write_hf_folder

from paged_jax.process_memory import release_unused, resident_bytes

PROGRAM = """
import resource
import sys

sys.path.insert(0, sys.argv[1])
from tiny_engine import tiny_llm
from paged_jax import SamplingParams

llm = tiny_llm()
params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=2, max_tokens=12)
for i in range(1000):
    llm.generate({"prompt_token_ids": [i % 256, i // 256, *range(i % 90)]}, params, use_tqdm=False)
    if i + 1 in (200, 1000):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
assert llm.engine.scheduler.blocks.pool.num_used_blocks == 0
"""

LOADING = """
import resource
import sys

import jax
from paged_jax.models.loader import load_model

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

load_model(sys.argv[1], quantization=sys.argv[3] or None)  # imports, kernels, first operations
before = peak_kib()
model = load_model(sys.argv[2], quantization=sys.argv[3] or None)
print(peak_kib() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)))
"""

# 29 million parameters in 40 matrices, the largest of 1.6 million.
LARGE = dict(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=10,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """A small model and one of 60 MB, of each format."""
    root = tmp_path_factory.mktemp("models")
    small, large = tiny_config(), tiny_config(**LARGE)
    small_tensors, large_tensors = random_tensors(small), random_tensors(large)
    return {
        "gguf": (
            write_gguf(root / "small.gguf", small, small_tensors, tensor_type="F16"),
            write_gguf(root / "large.gguf", large, large_tensors, tensor_type="F16"),
        ),
        "safetensors": (
            write_hf_folder(root / "small", small, small_tensors, dtype="F16"),
            write_hf_folder(root / "large", large, large_tensors, dtype="F16"),
        ),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts KiB there")
@pytest.mark.parametrize("quantization", ["int8", ""])
@pytest.mark.parametrize("stored", ["gguf", "safetensors"])
def test_loading_keeps_no_second_copy_of_the_model(folders, stored, quantization):
    """In int8 neither a float32 copy nor the file stays in memory beside the parameters."""
    small, large = folders[stored]
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(small), str(large), quantization],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PAGED_JAX_LOG_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr
    grown_kib, param_bytes = map(int, done.stdout.split())
    num_params = sum(map(math.prod, tensor_shapes(tiny_config(**LARGE)).values()))
    assert param_bytes < (1.1 if quantization else 4.1) * num_params
    # Beside the parameters about 40 MB: a few copies of a matrix, of 6 MB in float32, and what the
    # heap keeps. The file would be 59 MB more, a float32 copy 118 MB.
    assert grown_kib * 1024 < param_bytes + 80e6, grown_kib


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_release_unused_gives_free_pages_back():
    blocks = [bytearray(1000) for _ in range(100_000)]
    grown = resident_bytes()
    del blocks[:-1]
    release_unused()
    assert resident_bytes()["anonymous"] < grown["anonymous"] - 80e6
    assert resident_bytes()["peak"] >= grown["anonymous"] + grown["files"] - 1e6


def test_peak_memory_does_not_grow_from_the_200th_request_to_the_1000th():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PAGED_JAX_LOG_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr
    at_200, at_1000 = map(int, done.stdout.split())
    kib = 1 if sys.platform != "darwin" else 1024
    # The allocator's arenas of a few threads still settle by some MiB; it is flat to the 1,600th.
    # A leak of one step's outputs a request would be 12 MiB.
    assert at_1000 - at_200 < 8 * 1024 * kib, (at_200, at_1000)
