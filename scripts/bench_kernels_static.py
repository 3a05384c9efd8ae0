"""What the kernels cost by libtpu's static profile: cycles without a TPU, on v5e and v6e.

    pip install libtpu
    python scripts/bench_kernels_static.py --topology v5e --case 'decode.*page16$'

The figures of one sequence are those of a whole kernel divided by its sequences (8 decodes, and
the launch's fixed cost with them), as the figures of other kernels that stand beside were
measured, with libtpu 0.0.52. Most cases are compiled for two sizes of their batch, and `slope`
figures are the difference of the two by the difference in sequences: what one more sequence costs,
with the launch apart. `call_est_cycles` is all of the jitted call: XLA's operations around the
kernels too. Where libtpu cannot profile one of those, it is null, and the kernels are profiled
alone.

The floor is the time that HBM needs for the bytes (or the matrix units for the products, where
that is more). The profile does not know that HBM's bandwidth is shared by all DMAs: the true cost
is no less than the floor, whatever the estimate says.

Prints a table and, as the last line, one JSON list with a row for each case.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import kernel_programs as kp
import numpy as np
import tpu_aot
import tpu_static
from absl import app, flags

TOPOLOGY = flags.DEFINE_enum("topology", "v5e", ["v5e", "v6e", "v5e:2x2", "v6e:2x2"], "The TPU.")
CASE = flags.DEFINE_string("case", "", "Regular expression of the cases to measure.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What a TensorCore can do in a cycle, at best.

    Attributes:
      hbm_bytes: bytes from or to HBM. Published bandwidth over the clock that makes the published
        bfloat16 FLOP/s out of `macs`: v5e 819 GB/s at 1.50 GHz, v6e 1,640 GB/s at 1.75 GHz. (The
        profile itself moves 491 and 776 bytes a cycle in one DMA.)
      macs: bfloat16 multiplications with addition: four matrix units of 128 x 128 on v5e; on v6e
        four times that, by the bundles that the compiler makes of a large product.
    """

    hbm_bytes: float
    macs: int


CHIPS = {
    "v5e:2x2": Chip(hbm_bytes=546, macs=65_536),
    "v6e:2x2": Chip(hbm_bytes=937, macs=262_144),
}

# (issued bundles, estimated cycles) a sequence of 1,024 tokens on v5e, bfloat16, of the kernels
# that jax and tpu-inference ship: whole kernel at batch 8, divided by 8; libtpu 0.0.52.
OTHERS = {
    "q32_kv8_d128_page16": {
        "jax paged_attention, block 512": (14_337, 26_646),
        "jax ragged_paged_attention, block 512": (10_393, 12_255),
        "tpu-inference v3, its default block": (9_211, 11_880),
        "tpu-inference v3, block 1,024": (2_595, 7_021),
    },
    "q32_kv8_d128_page128": {
        "jax paged_attention, block 512": (8_560, 21_465),
        "jax ragged_paged_attention, block 512": (9_620, 11_739),
        "tpu-inference v3, its default block": (7_334, 10_322),
        "tpu-inference v3, block 1,024": (2_120, 6_643),
    },
    "q32_kv8_d64_page16": {"tpu-inference v3, block 1,024": (2_599, 4_902)},
    "q32_kv8_d64_page128": {"tpu-inference v3, block 1,024": (2_133, 4_524)},
    "q4_kv1_d128_page16": {
        "tpu-inference v3, its default block": (6_978, 8_100),
        "tpu-inference v3, block 1,024": (1_150, 2_107),
    },
    "q4_kv1_d128_page128": {"tpu-inference v3, block 1,024": (677, 1_757)},
    # Derived: the cost of one block, most of it masked, for each sequence of up to 4,096 tokens.
    "ragged64_q32_kv8_d128_page16": {"tpu-inference v3, its default block": (9_211, 11_880)},
    "ragged64_q32_kv8_d128_page128": {"tpu-inference v3, its default block": (7_334, 10_322)},
    "ragged64_q4_kv1_d128_page16": {"tpu-inference v3, its default block": (6_978, 8_100)},
}

TOKENS = 1024
Q32_D128 = kp.AttentionShape(name="q32_kv8_d128", num_q_heads=32, num_kv_heads=8, head_dim=128)
Q4_D128 = kp.AttentionShape(name="q4_kv1_d128", num_q_heads=4, num_kv_heads=1, head_dim=128)
Q32_D64 = kp.AttentionShape(name="q32_kv8_d64", num_q_heads=32, num_kv_heads=8, head_dim=64)
# 64 sequences of any length, short and long alike.
RAGGED = tuple(int(n) for n in np.random.default_rng(0).integers(16, 4097, 64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a case must do for one sequence, at least: bytes to and from HBM, multiplications."""

    hbm_bytes: float
    macs: float = 0

    def floor_cycles(self, chip: Chip) -> float:
        return max(self.hbm_bytes / chip.hbm_bytes, self.macs / chip.macs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row.

    Attributes:
      make_program: the program for a number of sequences (or tokens, or blocks).
      sizes: the number to measure; before it perhaps a smaller one, for the difference.
    """

    name: str
    make_program: Callable[[int], tpu_aot.Program]
    sizes: tuple[int, ...]
    work: Work


def _pool(block_size: int, dtype: str = "bfloat16", num_blocks: int = 512) -> kp.PoolSpec:
    return kp.PoolSpec(num_blocks=num_blocks, block_size=block_size, dtype=dtype)


def _kv_bytes(shape: kp.AttentionShape, pool: kp.PoolSpec, tokens: float) -> float:
    """Keys and values of `tokens` tokens."""
    item_bytes = np.dtype(pool.layer(1, 128).dtype).itemsize
    return 2 * shape.num_kv_heads * shape.head_dim * item_bytes * tokens


def decode_case(
    shape: kp.AttentionShape,
    pool: kp.PoolSpec,
    sizes: tuple[int, ...],
    suffix: str = "",
    tokens: int = TOKENS,
) -> Case:
    def make(num_seqs: int) -> tpu_aot.Program:
        lengths = kp.Lengths.decodes([tokens] * num_seqs)
        return kp.attention(shape, pool, lengths, implementation="tpu")

    return Case(
        name=f"decode_{shape.name}_page{pool.block_size}{suffix}",
        make_program=make,
        sizes=sizes,
        work=Work(hbm_bytes=_kv_bytes(shape, pool, tokens)),
    )


def decode_with_write_case(shape: kp.AttentionShape, pool: kp.PoolSpec) -> Case:
    """Decodes whose new token the same kernel writes."""

    def make(num_seqs: int) -> tpu_aot.Program:
        lengths = kp.Lengths.decodes([TOKENS] * num_seqs)
        return kp.attention_with_write(shape, pool, lengths, implementation="tpu")

    return Case(
        name=f"decode_with_write_{shape.name}_page{pool.block_size}",
        make_program=make,
        sizes=(4, 8),
        work=Work(hbm_bytes=_kv_bytes(shape, pool, TOKENS + 1)),
    )


def ragged_case(shape: kp.AttentionShape, pool: kp.PoolSpec) -> Case:
    def make(num_seqs: int) -> tpu_aot.Program:
        lengths = kp.Lengths.decodes(RAGGED[:num_seqs], max_kv_tokens=4096)
        return kp.attention(shape, pool, lengths, implementation="tpu")

    return Case(
        name=f"decode_ragged64_{shape.name}_page{pool.block_size}",
        make_program=make,
        sizes=(len(RAGGED),),
        work=Work(hbm_bytes=_kv_bytes(shape, pool, float(np.mean(RAGGED)))),
    )


def shared_case(pool: kp.PoolSpec, num_seqs: int, *, cascaded: bool) -> Case:
    """Sequences that share 1,024 tokens and have 128 of their own."""
    own = 128

    def make(count: int) -> tpu_aot.Program:
        if not cascaded:
            lengths = kp.Lengths.decodes([TOKENS + own] * count)
            return kp.attention(Q32_D128, pool, lengths, implementation="tpu")
        return kp.cascade(
            Q32_D128,
            pool,
            num_seqs=count,
            shared_tokens=TOKENS,
            own_tokens=own,
            implementation="tpu",
        )

    tokens = own + (TOKENS / num_seqs if cascaded else TOKENS)
    kind = "cascade" if cascaded else "flat"
    return Case(
        name=f"{kind}{num_seqs}_{Q32_D128.name}_page{pool.block_size}",
        make_program=make,
        sizes=(num_seqs,),
        work=Work(hbm_bytes=_kv_bytes(Q32_D128, pool, tokens)),
    )


def prefill_case(shape: kp.AttentionShape, pool: kp.PoolSpec, tokens: int) -> Case:
    def make(num_seqs: int) -> tpu_aot.Program:
        lengths = kp.Lengths(query_lens=(tokens,) * num_seqs, kv_lens=(tokens,) * num_seqs)
        return kp.attention(shape, pool, lengths, implementation="tpu")

    pairs = tokens * (tokens + 1) // 2
    return Case(
        name=f"prefill{tokens}_{shape.name}_page{pool.block_size}",
        make_program=make,
        sizes=(1,),
        work=Work(
            hbm_bytes=_kv_bytes(shape, pool, tokens),
            macs=2 * pairs * shape.num_q_heads * shape.head_dim,
        ),
    )


def latent_case(shape: kp.LatentShape, pool: kp.PoolSpec) -> Case:
    def make(num_seqs: int) -> tpu_aot.Program:
        lengths = kp.Lengths.decodes([TOKENS] * num_seqs)
        return kp.latent_attention(shape, pool, lengths, implementation="tpu")

    layer = pool.latent_layer(shape)
    return Case(
        name=f"mla_decode_h{shape.num_heads}_page{pool.block_size}",
        make_program=make,
        sizes=(4, 8),
        work=Work(
            hbm_bytes=TOKENS * layer.shape[2] * layer.dtype.itemsize,
            macs=TOKENS * shape.num_heads * (2 * shape.latent_dim + shape.rope_dim),
        ),
    )


def write_case(shape: kp.AttentionShape, pool: kp.PoolSpec) -> Case:
    """KV writes of decodes; a "sequence" is one token."""
    return Case(
        name=f"write_kv_{shape.name}_page{pool.block_size}_{pool.dtype}",
        make_program=lambda n: kp.kv_write(shape, pool, n, implementation="tpu"),
        sizes=(32, 64),
        work=Work(hbm_bytes=_kv_bytes(shape, pool, 1)),
    )


def copy_case(shape: kp.AttentionShape, pool: kp.PoolSpec) -> Case:
    """Copies of blocks in one layer; a "sequence" is one block, read and written."""
    return Case(
        name=f"copy_blocks_{shape.name}_page{pool.block_size}",
        make_program=lambda n: kp.block_copies(shape, pool, n, num_layers=1, implementation="tpu"),
        sizes=(16, 32),
        work=Work(hbm_bytes=2 * _kv_bytes(shape, pool, pool.block_size)),
    )


def all_cases() -> list[Case]:
    cases = []
    for page in (16, 128):
        pool = _pool(page)
        for shape in (Q32_D128, Q4_D128, Q32_D64):
            cases.append(decode_case(shape, pool, (4, 8)))
            cases.append(decode_with_write_case(shape, pool))
            # A length that ends amid a block, as nearly all do.
            cases.append(decode_case(shape, pool, (4, 8), "_len1000", tokens=1000))
        for dtype, name in (("int8", "int8"), ("float8_e4m3fn", "fp8")):
            cases.append(decode_case(Q32_D128, _pool(page, dtype), (4, 8), f"_{name}"))
        cases.append(ragged_case(Q32_D128, pool))
        cases.append(ragged_case(Q4_D128, pool))
    for page, num_seqs in itertools.product((16, 128), (4, 16)):
        for cascaded in (False, True):
            cases.append(shared_case(_pool(page), num_seqs, cascaded=cascaded))
    for tokens in (512, 2048):
        cases.append(prefill_case(Q32_D128, _pool(16), tokens))
    for shape in kp.LATENT_MODELS:
        cases.append(latent_case(shape, _pool(16)))
    for shape in (Q32_D128, Q4_D128):
        cases.append(write_case(shape, _pool(16)))
        cases.append(copy_case(shape, _pool(16)))
    cases.append(write_case(Q32_D128, _pool(16, "int8")))
    return cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one call; estimated_cycles and call_cycles are cycles, issued_bundles bundles.

    Attributes:
      issued_bundles, kernel_cycles: of its kernels; None where there is no profile.
      call_cycles: of all its operations; None where XLA's have no profile.
      kernel_bundles: length of the kernels' code.
      error: why there is nothing of all this, or "".
    """

    issued_bundles: int | None = None
    kernel_cycles: int | None = None
    call_cycles: int | None = None
    kernel_bundles: int | None = None
    spill_bytes: int | None = None
    error: str = ""


def cost(topology: str, case_name: str, size: int, *, kernels_alone: bool) -> Cost:
    """The cost of a case at one size. In a process that libtpu ends if a profile fails."""
    compiler = _compiler(topology)
    (case,) = (case for case in all_cases() if case.name == case_name)
    try:
        program = case.make_program(size)
        if not kernels_alone:
            profiles = [compiler.profile(program)]
        else:
            profiles = compiler.profile_kernels_alone(program)
    except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return Cost(error=tpu_aot.first_line(error))
    return Cost(
        issued_bundles=sum(profile.kernel_issued_bundles or 0 for profile in profiles),
        kernel_cycles=sum(profile.kernel_estimated_cycles or 0 for profile in profiles),
        call_cycles=None if kernels_alone else profiles[0].estimated_cycles,
        kernel_bundles=sum(op.bundles for profile in profiles for op in profile.kernels),
        spill_bytes=max(profile.compilation.spill_bytes for profile in profiles),
    )


@functools.cache
def _compiler(topology: str) -> tpu_aot.Compiler:
    return tpu_aot.Compiler.open(topology, profile=True)


def measured_cost(process: tpu_static.MortalProcess, topology: str, case: Case, size: int) -> Cost:
    """Of the whole call, or of its kernels alone, or of nothing: what libtpu can profile."""
    for kernels_alone in (False, True):
        try:
            found = process.run(cost, topology, case.name, size, kernels_alone=kernels_alone)
        except Exception as error:
            return Cost(error=tpu_aot.first_line(error))
        if found is not None:
            return found
    return Cost(error=f"libtpu's profiler ended: {process.last_words}")


def measure(process: tpu_static.MortalProcess, topology: str, case: Case) -> dict[str, Any]:
    """One row of the result; figures that the profile could not give are None."""
    costs = [measured_cost(process, topology, case, size) for size in case.sizes]
    size, last = case.sizes[-1], costs[-1]
    issued_slope = estimated_slope = launch = None
    if len(costs) == 2:
        count = size - case.sizes[0]
        issued_slope = _slope(costs[0].issued_bundles, last.issued_bundles, count)
        estimated_slope = _slope(costs[0].kernel_cycles, last.kernel_cycles, count)
    if last.kernel_cycles is not None and estimated_slope is not None:
        launch = round(last.kernel_cycles - size * estimated_slope)
    return dict(
        topology=topology,
        case=case.name,
        issued_per_seq=_slope(0, last.issued_bundles, size),
        est_cycles_per_seq=_slope(0, last.kernel_cycles, size),
        floor_cycles_per_seq=round(case.work.floor_cycles(CHIPS[topology]), 1),
        call_est_cycles=last.call_cycles,
        issued_slope_per_seq=issued_slope,
        est_cycles_slope_per_seq=estimated_slope,
        launch_est_cycles=launch,
        num_seqs=size,
        kernel_bundles=last.kernel_bundles,
        spill_bytes=last.spill_bytes,
        error=last.error,
    )


def _slope(first: int | None, second: int | None, count: int) -> float | None:
    return None if first is None or second is None else round((second - first) / count, 1)


# The figures of a row for people, and their widths.
COLUMNS = {
    "issued_per_seq": 10,
    "est_cycles_per_seq": 10,
    "floor_cycles_per_seq": 10,
    "issued_slope_per_seq": 10,
    "est_cycles_slope_per_seq": 10,
    "launch_est_cycles": 10,
    "call_est_cycles": 12,
    "spill_bytes": 9,
}


def print_row(row: dict[str, Any]) -> None:
    """One line for people, and one for each kernel of others that was measured on this shape."""

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}"

    figures = "".join(f"{text(row[key]):>{width}s}" for key, width in COLUMNS.items())
    print(f"{row['case']:42s}{figures}  {row['error']}".rstrip(), flush=True)
    if row["topology"] != "v5e:2x2":
        return
    shape = row["case"].removeprefix("decode_")
    for name, (issued, estimated) in OTHERS.get(shape, {}).items():
        print(f"    {name:38s}{issued:>10,}{estimated:>10,}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    topology = tpu_aot.topology_name(TOPOLOGY.value)
    tpu_aot.require_libtpu()
    titles = ("issued", "estimate", "floor", "issued+1", "est.+1", "launch", "call", "spill B")
    header = zip(titles, COLUMNS.values(), strict=True)
    print(
        f"{'case, on ' + topology:42s}" + "".join(f"{title:>{width}s}" for title, width in header)
    )
    print("(cycles and bundles a sequence; +1: of one more; launch and call: of a whole call)")
    rows = []
    with tpu_static.MortalProcess() as process:
        for case in all_cases():
            if re.search(CASE.value, case.name):
                rows.append(measure(process, topology, case))
                print_row(rows[-1])
    print(json.dumps(rows))


if __name__ == "__main__":
    app.run(main)
