"""Compiles every kernel, and the engine's steps, for a TPU or a GPU that is not there.

    pip install libtpu
    python scripts/aot_check.py --topology v5e --quick

For a GPU (h200) it takes the wheels that `gpu_targets.REMEDY` names, and the code of each kernel is
read too: registers that spill, shared memory, matrix instructions, loads by TMA.

Each entry is compiled; or refused, by our own check and with its reason; or failed: an error of
the compiler, a copy of the pool, temporaries or spilled registers beyond a bound, or a pool that
is not updated in place. The last line is one JSON object with the counts. The exit status is 0
only if nothing failed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import queue
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import engine_programs as ep
import gpu_aot
import gpu_entries
import kernel_programs as kp
import tpu_aot
import tpu_static
from absl import app, flags

from paged_jax.gpu_targets import GPU_TARGETS

TOPOLOGY = flags.DEFINE_enum(
    "topology",
    None,
    [*tpu_aot.TOPOLOGIES, *tpu_aot.TOPOLOGIES.values(), *GPU_TARGETS],
    "TPU generation, libtpu's name of a topology, or a GPU.",
    required=True,
)
QUICK = flags.DEFINE_bool("quick", False, "A subset that takes less than two minutes.")
ENTRIES = flags.DEFINE_string("entries", "", "Regular expression of the entries to compile.")
PROCESSES = flags.DEFINE_integer("processes", 2, "Compilations at a time.", lower_bound=1)

BLOCK_SIZES = (16, 128)
POOL_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
IMPLEMENTATION = "tpu"
# Both sizes of heads; the other models meet only blocks of 16 tokens of bfloat16 in quick runs.
QUICK_MODELS = ("llama3-8b", "smollm2-135m", "deepseek-v3")
POOL_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One program to compile; `quick` ones are the subset."""

    name: str
    quick: bool
    make_program: Callable[[], tpu_aot.Program]
    max_temporary_bytes: int | None = None


DECODES = kp.Lengths.decodes([4096] * 64, max_kv_tokens=8192)
# Prefill chunks among decodes: a new prompt, the next chunk of a long one, and 62 decodes.
MIXED = kp.Lengths(
    query_lens=(200, 250, *[1] * 62), kv_lens=(200, 4000, *[1000] * 62), max_kv_tokens=8192
)
# Tables of 4 MiB, four times a TPU's scalar memory.
LONG_DECODES = kp.Lengths.decodes([16_384] * 1024)


def all_entries(topology: str) -> list[Entry]:
    """Everything that is compiled, quick or not."""
    entries = engine_entries(topology)
    for model in kp.MODELS:
        for block_size, dtype in itertools.product(BLOCK_SIZES, POOL_DTYPES):
            entries += attention_entries(model, block_size, dtype)
    for model in kp.LATENT_MODELS:
        for block_size, dtype in itertools.product(BLOCK_SIZES, POOL_DTYPES):
            entries += latent_entries(model, block_size, dtype)
    # Writes and copies know no query heads: one model for each shape of pool.
    for model in {m.pool_key: m for m in reversed(kp.MODELS)}.values():
        for block_size, dtype in itertools.product(BLOCK_SIZES, POOL_DTYPES):
            entries += write_entries(model, block_size, dtype)
            entries += block_entries(model, block_size, dtype)
    return entries


def engine_entries(topology: str) -> list[Entry]:
    """The engine's whole steps, of the models that fit into a device's memory."""
    hbm_bytes = tpu_aot.HBM_GIB[topology.partition(":")[0]] * 2**30
    models = [name for name, config in ep.MODELS.items() if ep.fits(config, hbm_bytes)]
    # Each takes up to half a minute: the others, and shares of what fits whole, are for long runs.
    quick_names = {"decode step smollm2-135m", "mixed step smollm2-135m"}
    quick_names.add(f"decode step llama3-8b{'' if 'llama3-8b' in models else '/8'}")
    quick_names |= {"decode step smollm2-135m int8 KV", "mixed step smollm2-135m int8 KV"}
    quick_names.add("decode step smollm2-135m int8")
    forms = {
        "": {},
        " int8 KV": dict(kv_dtype="int8"),
        " int8": dict(quantization="int8"),
    }
    return [
        Entry(
            name=name,
            quick=name in quick_names,
            make_program=functools.partial(
                ep.engine_step,
                ep.MODELS[model],
                lengths,
                implementation=IMPLEMENTATION,
                **options,
            ),
            max_temporary_bytes=ep.LAYER_POOL_BYTES // 2,
        )
        for model in models
        for step, lengths in ep.STEPS.items()
        for suffix, options in forms.items()
        for name in [f"{step} step {model}{suffix}"]
    ]


def _pool(model: kp.AttentionShape | kp.LatentShape, block_size: int, dtype: str) -> kp.PoolSpec:
    return kp.pool_of_bytes(POOL_BYTES, model, block_size=block_size, dtype=dtype)


def _is_quick(model_name: str, block_size: int, dtype: str) -> bool:
    if block_size == 16 and dtype == "bfloat16":
        return True
    return (
        model_name in QUICK_MODELS
        and dtype != "float8_e5m2"
        and (block_size == 16 or dtype == "bfloat16")
    )


def attention_entries(model: kp.AttentionShape, block_size: int, dtype: str) -> list[Entry]:
    """A model's attention over one kind of pool."""
    batches = dict(decode=DECODES, mixed=MIXED)
    if model.name == "llama3-8b/8":
        batches["long"] = LONG_DECODES
    pool = _pool(model, block_size, dtype)
    programs = {batch: (kp.attention, lengths) for batch, lengths in batches.items()}
    programs["decode with write"] = (kp.attention_with_write, DECODES)
    entries = [
        Entry(
            name=f"attention {name} {model.name} block {block_size} {dtype}",
            quick=_is_quick(model.name, block_size, dtype),
            make_program=functools.partial(
                make, model, pool, lengths, implementation=IMPLEMENTATION
            ),
        )
        for name, (make, lengths) in programs.items()
    ]
    if model.sliding_window is None and not model.has_sinks:
        entries.append(cascade_entry(model, block_size, dtype))
    return entries


def cascade_entry(model: kp.AttentionShape, block_size: int, dtype: str) -> Entry:
    """The decodes of 32 sequences of which all share 1,024 tokens."""
    return Entry(
        name=f"cascade {model.name} block {block_size} {dtype}",
        quick=model.name == QUICK_MODELS[0] and _is_quick(model.name, block_size, dtype),
        make_program=functools.partial(
            kp.cascade,
            model,
            _pool(model, block_size, dtype),
            num_seqs=32,
            shared_tokens=1024,
            own_tokens=128,
            implementation=IMPLEMENTATION,
        ),
    )


def write_entries(model: kp.AttentionShape, block_size: int, dtype: str) -> list[Entry]:
    """The KV write into one kind of pool, of a decode step and of a prefill chunk."""
    make = functools.partial(
        kp.kv_write, model, _pool(model, block_size, dtype), implementation=IMPLEMENTATION
    )
    return [
        Entry(
            name=f"write_kv {num_tokens} tokens {model.name} block {block_size} {dtype}",
            quick=model.name in QUICK_MODELS and _is_quick(model.name, block_size, dtype),
            make_program=functools.partial(make, num_tokens),
        )
        for num_tokens in (64, 512)
    ]


def latent_entries(model: kp.LatentShape, block_size: int, dtype: str) -> list[Entry]:
    """Latent attention over one kind of pool."""
    make = functools.partial(
        kp.latent_attention, model, _pool(model, block_size, dtype), implementation=IMPLEMENTATION
    )
    return [
        Entry(
            name=f"mla {batch} {model.name} block {block_size} {dtype}",
            quick=_is_quick(model.name, block_size, dtype),
            make_program=functools.partial(make, lengths),
        )
        for batch, lengths in dict(decode=DECODES, mixed=MIXED).items()
    ]


def block_entries(model: kp.AttentionShape, block_size: int, dtype: str) -> list[Entry]:
    """Block copies, gathers and scatters in four layers of one kind of pool."""
    pool = kp.pool_of_bytes(POOL_BYTES // 4, model, block_size=block_size, dtype=dtype)
    makers = dict(
        copy_blocks=kp.block_copies, gather_blocks=kp.block_gather, scatter_blocks=kp.block_scatter
    )
    return [
        Entry(
            name=f"{kernel} {model.name} block {block_size} {dtype}",
            quick=model.name in QUICK_MODELS and _is_quick(model.name, block_size, dtype),
            make_program=functools.partial(
                make, model, pool, 64, num_layers=4, implementation=IMPLEMENTATION
            ),
        )
        for kernel, make in makers.items()
    ]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    topology = TOPOLOGY.value
    if topology in GPU_TARGETS:
        gpu_aot.require_plugin()
    else:
        topology = tpu_aot.topology_name(topology)
        tpu_aot.require_libtpu()
    start = time.perf_counter()
    counts = collections.Counter(compiled=0, refused=0, failed=0)
    try:
        every = _entries_by_name(topology).values()
        entries = [entry for entry in every if entry.quick or not QUICK.value]
        names = [entry.name for entry in entries if re.search(ENTRIES.value, entry.name)]
        for name, outcome in check_entries(topology, names):
            counts[outcome.status] += 1
            print(line(name, outcome), flush=True)
        is_whole = not QUICK.value and not ENTRIES.value
        if is_whole and topology in tpu_static.PROFILED_TOPOLOGIES:
            print_step_profiles(topology)
    except Exception:
        counts["failed"] += 1
        traceback.print_exc()
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps(dict(topology=topology, **counts, seconds=seconds)))
    sys.exit(1 if counts["failed"] else 0)


def check_entries(topology: str, names: list[str]) -> Iterator[tuple[str, tpu_aot.Outcome]]:
    """Compiles the entries in processes that may die of it; the outcomes come in order."""
    idle: queue.SimpleQueue[tpu_static.MortalProcess] = queue.SimpleQueue()

    def outcome(name: str) -> tpu_aot.Outcome:
        process = idle.get()
        try:
            found = process.run(check_entry, topology, name)
            return found or tpu_aot.Outcome(status="failed", reason=process.last_words)
        except Exception as error:
            return tpu_aot.Outcome(status="failed", reason=tpu_aot.first_line(error))
        finally:
            idle.put(process)

    with contextlib.ExitStack() as processes, ThreadPoolExecutor(PROCESSES.value) as threads:
        for _ in range(PROCESSES.value):
            idle.put(processes.enter_context(tpu_static.MortalProcess()))
        yield from zip(names, threads.map(outcome, names), strict=True)


def check_entry(topology: str, name: str) -> tpu_aot.Outcome:
    """Compiles one entry in this process."""
    entry = _entries_by_name(topology)[name]
    if isinstance(entry, gpu_entries.GpuEntry):
        return gpu_aot.check(
            _gpu_compiler(topology),
            entry.make_program,
            max_temporary_bytes=entry.max_temporary_bytes,
            programs_each=entry.programs_each,
        )
    return tpu_aot.check(
        _compiler(topology), entry.make_program, max_temporary_bytes=entry.max_temporary_bytes
    )


def print_step_profiles(topology: str) -> None:
    """What a decode step spends by kind of operation, all operations one after the other."""
    with tpu_static.MortalProcess() as process:
        for name in ep.MODELS:
            print(f"decode step {name}: 32 sequences of 1,000 tokens, estimated cycles")
            try:
                cycles = process.run(step_profile, topology, name)
            except Exception as error:  # Such as a step that is too large for the device.
                print(f"  none: {tpu_aot.first_line(error)}")
                continue
            if cycles is None:
                print(f"  none: libtpu's profiler ended: {process.last_words}")
                continue
            for kind, (count, total) in cycles.items():
                print(f"  {kind:40s}{count:>6,} x {total:>14,}", flush=True)


def step_profile(topology: str, model_name: str) -> dict[str, tuple[int, int]]:
    """(operations, estimated cycles of all) by kind of operation, the costliest first."""
    config = ep.MODELS[model_name]
    compiler = _compiler(topology, profile=True)
    make = functools.partial(ep.engine_step, lengths=ep.DECODE, implementation=IMPLEMENTATION)
    profile = compiler.profile(make(config), scalars_of=make(ep.small_like(config)))
    by_kind: dict[str, tuple[int, int]] = {}
    for op in profile.ops:
        kind = op.name.partition(".")[0] if op.kind == "kernel" else op.kind
        kind += " (not profiled)" if op.estimated_cycles is None else ""
        count, cycles = by_kind.get(kind, (0, 0))
        by_kind[kind] = (count + op.count, cycles + op.count * (op.estimated_cycles or 0))
    return dict(sorted(by_kind.items(), key=lambda item: -item[1][1]))


@functools.cache
def _compiler(topology: str, *, profile: bool = False) -> tpu_aot.Compiler:
    return tpu_aot.Compiler.open(topology, profile=profile)


@functools.cache
def _gpu_compiler(topology: str) -> gpu_aot.Compiler:
    return gpu_aot.Compiler.open(topology)


@functools.cache
def _entries_by_name(topology: str) -> dict[str, Entry | gpu_entries.GpuEntry]:
    if topology in GPU_TARGETS:
        return {entry.name: entry for entry in gpu_entries.all_entries()}
    return {entry.name: entry for entry in all_entries(topology)}


def line(name: str, outcome: tpu_aot.Outcome) -> str:
    """One line about an entry, for people."""
    text = f"{outcome.status:9s}{name:58s}"
    made = outcome.compilation
    if made is not None:
        text += (
            f"{made.seconds:6.1f} s  {made.temporary_bytes:>12,} temp  "
            f"{made.spill_bytes:>8,} spill  {made.vmem_bytes:>12,} fast"
        )
    if isinstance(made, gpu_aot.Compilation):
        text += f"  {gpu_aot.describe(made)}"
    return f"{text}  {outcome.reason}".rstrip()


if __name__ == "__main__":
    app.run(main)
