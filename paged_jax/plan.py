"""Before anything is rented: whether a model fits some hardware, and how many requests it holds.

The engine's own steps are compiled for the hardware, from shapes alone (`hardware`): a prefill of
the largest size and a decode of all seats, over a mesh as the engine would use it. The compiler
says what they take beside weights and pool; what is left is the pool. Its program is then searched
for what the devices exchange, and the bytes that a decode must read give the least time that it
takes.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.batch import Buckets
from paged_jax.compile import lower_step
from paged_jax.hardware import GIB, Hardware
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import abstract_params
from paged_jax.models.partition import TENSOR_AXIS, split_config
from paged_jax.models.quantized import Quantization
from paged_jax.models.registry import model_module
from paged_jax.sharding import DATA_AXIS, abstract_pool_on, make_mesh
from paged_jax.sizing import device_bytes

_COLLECTIVE = re.compile(
    r"= (?P<result>\([^=]*?\)|\S+) "
    r"(?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
# What Pallas's kernels are called in a compiled program: for TPUs, and for GPUs.
_KERNEL_CALLS = ("tpu_custom_call", "mosaic_gpu_v2")
_SHAPE = re.compile(r"(?P<dtype>pred|bf16|[fsu]\d+)\[(?P<sizes>[\d,]*)\]")


class DoesNotFit(ValueError):
    """The model leaves no room for a request; the message has the numbers."""


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What the devices of one step exchange.

    count: how many there are in the program; num_bytes: of their results, on each device.
    """

    op: str
    count: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A compiled step, of one device.

    Attributes:
      argument_bytes: weights, pool and the step's own arguments, by the compiler's account.
      temporary_bytes: what it takes beside them.
      aliased_bytes: what is updated in place: the pool.
      num_kernels: calls of Pallas kernels.
    """

    name: str
    argument_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    collectives: tuple[Collectives, ...]
    num_kernels: int
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class HardwarePlan:
    """What a model does to some hardware. Bytes and seconds are those of one device.

    Attributes:
      hardware, num_devices, data, tensor: the mesh.
      memory_bytes, usable_bytes: of a device, and what of it the engine may use.
      weight_bytes, temporary_bytes: the latter of the step that takes most.
      block_size, bytes_a_token: of keys and values.
      num_blocks: of each of the mesh's rows, the null block included.
      max_model_len, max_num_seqs, max_num_batched_tokens: of each row.
      steps: the compiled ones.
    """

    hardware: Hardware
    config: ModelConfig
    data: int
    tensor: int
    usable_bytes: int
    weight_bytes: int
    temporary_bytes: int
    block_size: int
    bytes_a_token: float
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    steps: tuple[StepPlan, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the pools of all rows hold."""
        return self.data * (self.num_blocks - 1) * self.block_size

    def num_requests(self, length: int) -> int:
        """Requests of so many tokens, prompt and output, that the pools hold at once."""
        return self.data * ((self.num_blocks - 1) // math.ceil(length / self.block_size))

    def decode_bounds(self, num_seqs: int, length: int) -> tuple[float, float] | None:
        """Least seconds of a decode of num_seqs sequences a row, each with `length` tokens: by
        memory's bandwidth and by the peak of operations, of the data sheet. None without one.
        """
        rates, config = self.hardware.rates, self.config
        if rates is None:
            return None
        embedding = config.vocab_size * config.hidden_size
        num_params = count_params(config)
        num_read = num_params - (0 if config.tie_word_embeddings else embedding)
        read = self.weight_bytes * num_read / num_params + num_seqs * length * self.bytes_a_token
        heads = config.num_layers * config.num_heads * config.head_dim
        operations = num_seqs * (2 * num_read + 4 * heads * length) / self.tensor
        return read / rates.bytes_per_second, operations / rates.operations_per_second


def count_params(config: ModelConfig) -> int:
    """Numbers in a model's weights."""
    shapes = abstract_params(model_module(config).param_specs(config), "float32")
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def choose_sizes(config: ModelConfig, num_devices: int, tensor: int | None) -> tuple[int, int]:
    """(data, tensor) of a mesh of all devices; without a wish as much of them along "tensor" as
    the model can be cut, up to one KV head a device.

    Raises:
      ValueError: the devices do not divide so.
    """
    if tensor is None:
        fitting = [
            n for n in range(1, num_devices + 1) if num_devices % n == 0 and _cuts(config, n)
        ]
        tensor = max(n for n in fitting if n <= config.num_kv_heads or n == fitting[0])
    if num_devices % tensor:
        raise ValueError(
            f"tensor={tensor} does not divide the {num_devices} devices; use a divisor"
        )
    return num_devices // tensor, tensor


def _cuts(config: ModelConfig, num_parts: int) -> bool:
    try:
        split_config(config, num_parts)
    except ValueError:
        return False
    return True


def plan_hardware(
    config: ModelConfig,
    hardware: Hardware,
    *,
    tensor: int | None = None,
    dtype: str = "bfloat16",
    quantization: Quantization | None = None,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    decode_lookahead: int = 8,
    utilization: float = 0.9,
    num_blocks: int | None = None,
) -> HardwarePlan:
    """Compiles a model's steps for hardware, and shares its memory out.

    Args:
      tensor: devices that the model is cut over; the others repeat it. None: see `choose_sizes`.
      num_blocks: of each row; None for what there is room for.
      others: as in `EngineConfig`.

    Raises:
      DoesNotFit: a ValueError: weights and steps leave no room for a request of max_model_len.
      ValueError: the model cannot be cut so.
    """
    data, tensor = choose_sizes(config, len(hardware.devices), tensor)
    mesh = make_mesh(data, tensor, hardware.devices)
    cut = split_config(config, tensor)
    max_model_len = max_model_len or config.max_position_embeddings
    params = abstract_params(
        model_module(config).param_specs(config), dtype, quantization, mesh=mesh
    )
    form: dict[str, Any] = dict(
        block_size=block_size,
        dtype=jnp.dtype(dtype if kv_cache_dtype == "auto" else kv_cache_dtype),
        for_tpu=hardware.implementation == "tpu",
        raw_bits=hardware.kind == "cpu",
    )
    buckets = Buckets.choose(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        decodes_append=hardware.implementation == "tpu",
        num_decode_steps=max(decode_lookahead // 2, 1),
    )

    small = abstract_pool_on(mesh, cut, num_blocks=2, **form)
    bytes_a_block = device_bytes(small.layers) // 2
    weight_bytes = device_bytes(params)
    usable = int(hardware.memory_bytes * utilization)
    room = usable - weight_bytes
    longest = math.ceil(max_model_len / block_size) + 1

    def check_room(room: int, what: str) -> None:
        if room < longest * bytes_a_block:
            raise DoesNotFit(
                f"{hardware.name}: of {usable / GIB:.2f} GiB a device, weights take "
                f"{weight_bytes / GIB:.2f} GiB{what}; a request of {max_model_len} tokens needs "
                f"{longest * bytes_a_block / GIB:.2f} GiB more, and {max(room, 0) / GIB:.2f} are "
                "left: take more devices along 'tensor', int8 weights, or a shorter max_model_len"
            )

    check_room(room, "")
    # The steps' temporaries do not hang on the pool's size: a first guess does for compiling.
    guess = num_blocks or max(int(0.9 * room) // bytes_a_block, longest)
    pool = abstract_pool_on(mesh, cut, num_blocks=guess, **form)
    shapes = buckets.shapes()
    chosen = {
        f"prefill of {shapes[0].num_tokens} tokens": shapes[0],
        f"decode of {max_num_seqs} sequences": next(s for s in shapes if s.decode_only),
    }
    steps = []
    for name, shape in chosen.items():
        with hardware.compiling(mesh):
            lowered = lower_step(
                params,
                pool,
                shape,
                config=cut,
                buckets=buckets,
                implementation=hardware.implementation,
                mesh=mesh,
            )
        steps.append(_compile(name, lowered))
    temporary = max(step.temporary_bytes for step in steps)
    check_room(room - temporary, f" and steps {temporary / GIB:.2f} GiB")
    return HardwarePlan(
        hardware=hardware,
        config=config,
        data=data,
        tensor=tensor,
        usable_bytes=usable,
        weight_bytes=weight_bytes,
        temporary_bytes=temporary,
        block_size=block_size,
        bytes_a_token=bytes_a_block / block_size,
        num_blocks=num_blocks or (room - temporary) // bytes_a_block,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        steps=tuple(steps),
    )


def _compile(name: str, lowered: jax.stages.Lowered) -> StepPlan:
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    analysis = compiled.memory_analysis()
    assert analysis is not None, "the compiler gives no account of memory"
    program = compiled.as_text() or ""
    return StepPlan(
        name=name,
        argument_bytes=int(analysis.argument_size_in_bytes),
        temporary_bytes=int(analysis.temp_size_in_bytes),
        aliased_bytes=int(analysis.alias_size_in_bytes),
        collectives=find_collectives(program),
        num_kernels=sum(program.count(f'custom_call_target="{name}"') for name in _KERNEL_CALLS),
        compile_seconds=seconds,
    )


def find_collectives(program: str) -> tuple[Collectives, ...]:
    """What devices exchange in a compiled program, by operation. A loop's body counts once."""
    counts: dict[str, list[int]] = {}
    for match in _COLLECTIVE.finditer(program):
        sizes = [_num_bytes(shape) for shape in _SHAPE.finditer(match["result"])]
        # What starts and ends later has its operands among its results.
        num_bytes = max(sizes) if "-start(" in match[0] else sum(sizes)
        counts.setdefault(match["op"], []).append(num_bytes)
    return tuple(Collectives(op, len(sizes), sum(sizes)) for op, sizes in sorted(counts.items()))


def _num_bytes(shape: re.Match[str]) -> int:
    bits = 8 if shape["dtype"] == "pred" else int(re.sub(r"\D", "", shape["dtype"]))
    return math.prod(int(size) for size in shape["sizes"].split(",") if size) * bits // 8


def describe(plan: HardwarePlan, lengths: Sequence[int] = (1024, 4096, 8192)) -> str:
    """A plan for a reader: what is where, and what follows."""
    gib = lambda num_bytes: f"{num_bytes / GIB:8.2f} GiB"
    free = plan.usable_bytes - plan.weight_bytes - plan.temporary_bytes
    pool_bytes = plan.num_blocks * plan.block_size * plan.bytes_a_token
    lines = [
        f"{plan.hardware.name}: mesh {DATA_AXIS}={plan.data} x {TENSOR_AXIS}={plan.tensor}; each "
        f"row takes up to {plan.max_num_seqs} sequences and {plan.max_num_batched_tokens} tokens "
        "a step",
        "",
        "a device",
        f"  memory that may be used {gib(plan.usable_bytes)} of {gib(plan.hardware.memory_bytes)}",
        f"  weights                 {gib(plan.weight_bytes)}",
        f"  largest step, beside    {gib(plan.temporary_bytes)}",
        f"  KV pool                 {gib(pool_bytes)}, {plan.bytes_a_token:,.0f} bytes a token",
        f"  left                    {gib(free - pool_bytes)}",
        "",
        f"KV pools: {plan.data} x {plan.num_blocks:,} blocks of {plan.block_size} tokens, "
        f"{plan.num_tokens:,} tokens in all",
    ]
    for length in (n for n in lengths if n <= plan.max_model_len):
        lines.append(f"  requests of {length:>6,} tokens at once {plan.num_requests(length):>7,}")
    for step in plan.steps:
        lines += ["", f"{step.name}: compiled in {step.compile_seconds:.0f} s"]
        lines.append(
            f"  {step.temporary_bytes / 2**20:,.1f} MiB beside weights and pool; "
            f"{step.aliased_bytes / GIB:.2f} GiB updated in place; {step.num_kernels} kernel calls"
        )
        for found in step.collectives:
            lines.append(f"  {found.count} {found.op}, {found.num_bytes / 2**20:,.2f} MiB a device")
    for length in (n for n in lengths if n <= plan.max_model_len):
        num_seqs = min(plan.max_num_seqs, plan.num_requests(length) // plan.data)
        bounds = plan.decode_bounds(num_seqs, length)
        if bounds is None or not num_seqs:
            continue
        by_memory, by_operations = (1e3 * seconds for seconds in bounds)
        lines.append(
            ("\n" if length == lengths[0] else "")
            + f"a decode of {num_seqs} x {length:,} tokens a row takes at least "
            f"{max(by_memory, by_operations):.2f} ms (memory {by_memory:.2f}, operations "
            f"{by_operations:.2f}): at most "
            f"{1e3 * plan.data * num_seqs / max(by_memory, by_operations):,.0f} tokens/s in all"
        )
    return "\n".join(lines)
