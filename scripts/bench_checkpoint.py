"""Host memory and time of orbax checkpoints: what writing and restoring one takes at the most.

    python scripts/bench_checkpoint.py --megabytes=500 --devices=4

Writes a random Llama of about that many megabytes (float32), then restores it with another process
onto a mesh of so many virtual CPU devices, cut over all of them. On CPU the devices' memory is the
host's: so what restoring takes beside the weights is the peak of resident memory less what is
resident at the end. The last line is one JSON object; MB of 10**6 bytes. Linux only.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any

import numpy as np
from absl import app, flags

MEGABYTES = flags.DEFINE_integer("megabytes", 500, "Size of the model.", lower_bound=60)
DEVICES = flags.DEFINE_integer("devices", 4, "To restore to.", lower_bound=1)
FOLDER = flags.DEFINE_string("folder", None, "Where to write; None takes a temporary one.")
CHILD = flags.DEFINE_enum("child", None, ["write", "restore"], "Be the measured process.")


def random_checkpoint(megabytes: int) -> Any:
    """A Llama whose tensors are made when they are read, the same ones each time."""
    from paged_jax.models.checkpoint import Checkpoint
    from paged_jax.models.config import GenerationInfo, ModelConfig
    from paged_jax.models.llama import param_specs
    from paged_jax.models.params import list_tensors

    def config_of(num_layers: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=8192,
            hidden_size=1024,
            intermediate_size=2816,
            num_layers=num_layers,
            num_heads=16,
            num_kv_heads=4,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )

    def num_bytes(num_layers: int) -> int:
        specs = param_specs(config_of(num_layers))
        return sum(4 * math.prod(tensor.shape) for tensor in list_tensors(specs))

    a_layer = num_bytes(2) - num_bytes(1)
    config = config_of(max(1, round((megabytes * 1e6 - num_bytes(1)) / a_layer) + 1))
    specs = param_specs(config)
    shapes = {tensor.name: tensor.shape for tensor in list_tensors(specs)}

    def read(name: str, dtype: np.dtype, index: tuple[slice, ...] | None = None) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return rng.standard_normal(shapes[name], np.float32)[index or ...].astype(dtype, copy=False)

    return Checkpoint(
        config=config,
        generation=GenerationInfo(),
        specs=specs,
        stored_dtype="float32",
        tokenizer_metadata=None,
        read=read,
    )


def reset_peak() -> None:
    """Has the kernel count the peak of resident memory from now on."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure(path: pathlib.Path, action: str) -> dict[str, float]:
    """One action of this very process: seconds, and MB beside what stays."""
    import jax
    import orbax.checkpoint  # noqa: F401  # So that its code does not count.
    import tensorstore  # noqa: F401

    from paged_jax.models.loader import load_model
    from paged_jax.models.weights_orbax import save_checkpoint
    from paged_jax.process_memory import resident_bytes
    from paged_jax.sharding import make_mesh

    def resident() -> int:
        found = resident_bytes()
        return found["anonymous"] + found["files"]

    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    if action == "write":
        source = random_checkpoint(MEGABYTES.value)
    reset_peak()
    before, started = resident(), time.perf_counter()
    figures: dict[str, float] = {}
    if action == "write":
        num_bytes = save_checkpoint(path, source, use_tqdm=False)
        held = 0
    else:
        model = load_model(path, mesh=make_mesh(1, DEVICES.value))
        leaves = jax.block_until_ready(jax.tree.leaves(model.params))
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    figures["seconds"] = time.perf_counter() - started
    figures["weights_mb"] = num_bytes / 1e6
    figures["on_devices_mb"] = held / 1e6
    figures["peak_beside_mb"] = (resident_bytes()["peak"] - before - held) / 1e6
    return figures


def run_child(path: pathlib.Path, action: str) -> dict[str, float]:
    """The figures of a process of its own."""
    options = [f"--{name.name}={name.value}" for name in (MEGABYTES, DEVICES)]
    command = [sys.executable, __file__, f"--child={action}", f"--folder={path}", *options]
    flag = f"--xla_force_host_platform_device_count={DEVICES.value}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{action} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if CHILD.value is not None:
        assert FOLDER.value is not None
        print(json.dumps(measure(pathlib.Path(FOLDER.value), CHILD.value)))
        return
    with tempfile.TemporaryDirectory(dir=FOLDER.value) as folder:
        figures = {a: run_child(pathlib.Path(folder) / "c", a) for a in ("write", "restore")}
    for action, own in figures.items():
        print(f"{action:8}", ", ".join(f"{name} {value:,.1f}" for name, value in own.items()))
    print(json.dumps(figures))


if __name__ == "__main__":
    app.run(main)
