"""Turns a model into an orbax checkpoint, which loads onto any mesh slice by slice.

    python scripts/convert_checkpoint.py --model=meta-llama/Llama-3.1-8B-Instruct \\
        --output=llama-3.1-8b --dtype=bfloat16
    python scripts/convert_checkpoint.py --model=SmolLM2-135M-Instruct.Q4_1.gguf --output=smollm2
    python scripts/convert_checkpoint.py --model=demo --output=demo_checkpoint

and then `LLM("llama-3.1-8b")`. The model may be a .gguf file, a Hugging Face folder of safetensors,
or a name on the hub ("org/name", "org/name:file.gguf"), which is fetched.

Tensors are stored one by one under Hugging Face's names, so that each process of a larger mesh
reads the parts that its own devices hold; the tokenizer and all else that the engine needs are
copied along. Host memory stays near twice one tensor's. If the process dies, OUTPUT is missing and
OUTPUT.partial, which nothing takes for a checkpoint, is deleted by the next attempt. Quantisation
is left to loading: LLM(..., quantization="int8") makes it of the floats.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from paged_jax import demo_model_path
from paged_jax.models.loader import open_model
from paged_jax.models.weights_orbax import CHECKPOINT_DTYPES, save_checkpoint

MODEL = flags.DEFINE_string(
    "model", None, 'A .gguf file, folder or hub id, or "demo".', required=True
)
OUTPUT = flags.DEFINE_string("output", None, "The folder to make.", required=True)
DTYPE = flags.DEFINE_enum(
    "dtype",
    "auto",
    ["auto", *CHECKPOINT_DTYPES],
    "Of the matrices; auto is the model's own, bfloat16 for a quantised one.",
)
REVISION = flags.DEFINE_string("revision", None, "Branch, tag or commit, for hub ids.")
NOTES = flags.DEFINE_string("metadata", "{}", "A JSON object that is stored along.")


def main(argv: Sequence[str]) -> int | None:
    """Converts; returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        metadata = json.loads(NOTES.value)
    except ValueError as error:
        raise app.UsageError(f"--metadata={NOTES.value!r} is not JSON: {error}") from error
    model = demo_model_path() if MODEL.value == "demo" else MODEL.value
    started = time.perf_counter()
    try:
        source, path, name = open_model(model, REVISION.value)
        num_bytes = save_checkpoint(
            OUTPUT.value,
            source,
            dtype=DTYPE.value,
            tokenizer_folder=path if path.is_dir() else None,
            metadata={"source": name, **metadata},
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    on_disk = sum(f.stat().st_size for f in Path(OUTPUT.value).rglob("*") if f.is_file())
    print(
        f"{name} ({source.stored_dtype}) -> {OUTPUT.value}: tensors {num_bytes / 1e6:,.1f} MB, "
        f"{on_disk / 1e6:,.1f} MB on disk, in {seconds:.1f} s"
    )
    return None


if __name__ == "__main__":
    app.run(main)
