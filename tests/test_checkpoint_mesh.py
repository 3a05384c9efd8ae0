"""Checkpoints and prefix snapshots on meshes of virtual CPU devices, and the memory they take.

The devices are made before jax starts: so the tests run this file as a process of its own.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run_here(function: str, tmp_path: pathlib.Path) -> str:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, __file__, function, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkpoint_restores_to_any_mesh(tmp_path):
    assert "4 meshes" in run_here("restore_params", tmp_path)


def test_a_snapshot_comes_back_to_each_pool_of_a_mesh(tmp_path):
    assert "hits" in run_here("restore_prefixes", tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_beside_the_weights_is_bounded():
    """A second copy of the model would be 240 MB."""
    command = [sys.executable, ROOT / "scripts" / "bench_checkpoint.py", "--megabytes=240"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["restore"]["on_devices_mb"] > 200
    # The largest parameter takes 33 MB; orbax is given 32 MiB at a time.
    assert figures["write"]["peak_beside_mb"] < 180
    assert figures["restore"]["peak_beside_mb"] < 150


def make_checkpoint(tmp_path, **overrides):
    from model_files import random_tensors, tiny_config, write_hf_folder

    from paged_jax.models.loader import open_model
    from paged_jax.models.weights_orbax import save_checkpoint

    config = tiny_config(**overrides)
    folder = write_hf_folder(tmp_path / "hf", config, random_tensors(config))
    save_checkpoint(tmp_path / "saved", open_model(folder)[0], use_tqdm=False)
    return folder, tmp_path / "saved"


def restore_params(tmp_path):
    import jax
    import numpy as np

    from paged_jax.models.loader import load_model
    from paged_jax.sharding import make_mesh

    # 97 tokens cannot be shared out; of two KV heads, two of four devices hold the same one.
    folder, saved = make_checkpoint(tmp_path, vocab_size=97, tie_word_embeddings=False)
    shapes = ((1, 2), (2, 2), (1, 4), (4, 1))
    for shape in shapes:
        for quantization in (None, "int8"):
            mesh = make_mesh(*shape)
            given, found = (
                load_model(path, mesh=mesh, quantization=quantization).params
                for path in (folder, saved)
            )
            for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(found), strict=True):
                assert x.sharding == y.sharding and x.dtype == y.dtype
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    print(len(shapes), "meshes")


def restore_prefixes(tmp_path):
    from tiny_engine import ByteTokenizer, prompts_of, run, tiny_llm, tokens_of

    from paged_jax import SamplingParams

    _, saved = make_checkpoint(tmp_path, vocab_size=260)

    def llm_of(data_parallel_size, tensor_parallel_size):
        return tiny_llm(
            saved,  # pyright: ignore[reportArgumentType]
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            tokenizer=ByteTokenizer(),
            warmup=False,
        )

    prompts, greedy = prompts_of([41, 30, 57], seed=3), SamplingParams(temperature=0, max_tokens=6)
    warm = llm_of(2, 2)
    cold_tokens = tokens_of(run(warm, prompts, greedy))
    num_blocks = warm.save_prefix_cache(tmp_path / "s")
    assert num_blocks > 30
    for num_rows in (2, 1):
        later = llm_of(num_rows, 2)
        assert later.load_prefix_cache(tmp_path / "s") == num_blocks
        cached = [len(s.scheduler.blocks.pool.prefix_cache) for s in later.engine.shards]
        assert len(cached) == num_rows and all(cached)
        outputs = run(later, prompts, greedy)
        assert tokens_of(outputs) == cold_tokens
        assert [o.num_cached_tokens for o in outputs] == [40, 28, 56]
        for shard in later.engine.shards:
            shard.scheduler.check_integrity()
            assert shard.scheduler.blocks.pool.num_used_blocks == 0
    try:
        llm_of(1, 1).load_prefix_cache(tmp_path / "s")
    except ValueError as error:
        assert "its tensor_parallel_size is 2, and here it is 1; make the" in str(error), error
    else:
        raise AssertionError("a snapshot of other heads was taken")
    print("hits")


if __name__ == "__main__":
    globals()[sys.argv[1]](pathlib.Path(sys.argv[2]))
