"""Memory that comes with use: a CPU's pool before it is written, a library's code, imports."""

import mmap
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_worked_examples import Shape
from tiny_engine import tiny_llm

from paged_jax import sizing
from paged_jax.compile import promised_bytes
from paged_jax.kv_pool import KVPool
from paged_jax.process_memory import (
    absent_bytes,
    discard_zeros,
    release_unused,
    releasing_code,
    resident_bytes,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is all there elsewhere")

MB = 10**6
MODEL = Shape(num_layers=3, num_kv_heads=2, head_dim=64)
NUM_BLOCKS = 500  # of 16 tokens: 8.2 MB a layer

CREATE = """
import resource
import types

from paged_jax.kv_pool import KVPool

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

model = types.SimpleNamespace(num_layers=25, num_kv_heads=2, head_dim=64)
KVPool.create(model, num_blocks=2)  # first operations
before = peak_bytes()
pool = KVPool.create(model, num_blocks=1000)
renewed = pool.empty_like()
print(peak_bytes() - before, pool.num_bytes)
"""


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pool_takes_memory_as_blocks_are_written(dtype) -> None:
    pool = KVPool.create(MODEL, num_blocks=NUM_BLOCKS, dtype=dtype)
    # But the pages that a layer shares with its neighbours.
    assert pool.absent_bytes() > 0.98 * pool.num_bytes
    addresses = [address(layer) for layer in pool.layers]

    def write(pool: KVPool, block: jax.Array) -> KVPool:
        return pool.with_caches([layer.at[block].set(7) for layer in pool.layers])

    write = jax.jit(write, donate_argnums=0)
    before = pool.absent_bytes()
    for block in range(100, 110):
        pool = jax.block_until_ready(write(pool, block))
    assert [address(layer) for layer in pool.layers] == addresses, "a pool was copied"
    written_bytes = 10 * pool.num_bytes / NUM_BLOCKS
    # Whole pages come, and the run of blocks has two ends in each layer.
    assert written_bytes <= before - pool.absent_bytes() <= written_bytes + 6 * mmap.PAGESIZE
    for layer in map(np.asarray, pool.layers):
        assert (layer[100:110] == 7).all()
        assert not layer[:100].any() and not layer[110:].any()


def test_a_renewed_pool_is_zeros_where_the_old_one_was_full() -> None:
    pool = KVPool.create(MODEL, num_blocks=NUM_BLOCKS)
    pool = pool.with_caches([layer + 1 for layer in pool.layers])
    for layer in pool.layers:
        layer.delete()
    renewed = pool.empty_like()  # Most likely in the memory that was just freed.
    assert renewed.absent_bytes() > 0.98 * renewed.num_bytes
    assert not any(np.asarray(layer).any() for layer in renewed.layers)


def test_a_pool_on_a_mesh_takes_memory_as_it_is_written_too() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    place = jax.sharding.NamedSharding(mesh, jax.P("data", "tensor"))
    form = KVPool.abstract(MODEL, num_blocks=NUM_BLOCKS)
    shardings = jax.tree.map(lambda _: place, form)
    pool = KVPool.create(MODEL, num_blocks=NUM_BLOCKS, shardings=shardings)
    for made in (pool, pool.empty_like()):
        assert made.absent_bytes() > 0.95 * made.num_bytes
        assert all(layer.sharding == place for layer in made.layers)
        assert not any(np.asarray(layer).any() for layer in made.layers)


def test_a_new_pool_is_never_in_memory_as_a_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CREATE], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    grown_bytes, pool_bytes = map(int, done.stdout.split())
    # One layer, of 16 MB, after the other, and what the heap keeps. Two pools would be 820 MB.
    assert pool_bytes > 400 * MB
    assert grown_bytes < 80 * MB, grown_bytes


def test_memory_that_a_pool_will_take_is_not_offered_to_another_one() -> None:
    promised = promised_bytes()
    llm = tiny_llm(warmup=False, num_gpu_blocks_override=20_000, block_size=32)
    pool = llm.engine.runner.pool
    assert promised_bytes() - promised > 0.98 * pool.num_bytes > 100 * MB
    available = sizing.available_host_bytes()
    del llm, pool
    assert promised_bytes() <= promised
    # Others take and free memory meanwhile.
    assert sizing.available_host_bytes() - available > 50 * MB


def test_only_whole_pages_within_the_buffer_are_discarded() -> None:
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    start, end = mmap.PAGESIZE + 100, 6 * mmap.PAGESIZE + 50
    array[start:end] = 0
    discard_zeros(array.ctypes.data + start, end - start)
    assert absent_bytes(array.ctypes.data, array.nbytes) == 4 * mmap.PAGESIZE
    assert (array[:start] == 1).all() and (array[end:] == 1).all() and not array[start:end].any()
    discard_zeros(array.ctypes.data + start, 10)  # within a page: nothing to do
    assert absent_bytes(array.ctypes.data + start, 10) == 0


def test_a_files_memory_is_not_discarded(tmp_path) -> None:
    """Its pages would come back with what the file holds."""
    path = tmp_path / "ones"
    path.write_bytes(b"\1" * 4 * mmap.PAGESIZE)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 0
    discard_zeros(array.ctypes.data, array.nbytes)
    assert not array.any()


def test_the_librarys_code_is_given_back_while_others_run_it() -> None:
    jax.jit(lambda x: jnp.sort(x) @ x)(jnp.arange(64.0)).block_until_ready()
    before = resident_bytes()["files"]
    with releasing_code(every_seconds=0.01):
        deadline = time.monotonic() + 10
        while resident_bytes()["files"] > before - 10 * MB and time.monotonic() < deadline:
            time.sleep(0.02)
        assert resident_bytes()["files"] < before - 10 * MB
        results = [jax.jit(lambda x, n=n: jnp.sort(x * n).sum())(jnp.ones(9)) for n in range(5)]
    np.testing.assert_array_equal(results, [0, 9, 18, 27, 36])
    assert not any(t.name == "paged-jax-release-code" for t in threading.enumerate())
    release_unused()


def test_kernels_of_other_devices_and_tokenizers_are_not_imported() -> None:
    program = """
import sys
from paged_jax import LLM, KVPool, SamplingParams, forward, load_model
heavy = ["jax.experimental.pallas", "jax.experimental.mosaic", "tokenizers", "huggingface_hub",
         "gguf", "orbax"]
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
