"""How long an accelerator takes for a step, and how many KV blocks fit it: plain arithmetic.

A roofline: a step takes as long as the slower of its memory traffic and its operations, and then as
long as its swaps and copies, which nothing hides here:

    bytes      = weights read + KV of every sequence's context + KV written
    operations = 2 a parameter and token, + 2 a parameter of the head and row of logits,
                 + 4 a layer, head and head dimension of each pair of a token and one before it
    seconds    = max(bytes / bandwidth, operations / peak) + overhead
                 + swapped bytes / host link + 2 copied bytes / bandwidth

Bandwidth and peak are those of the data sheet times the share that kernels reach. The method is
Williams, Waterman, Patterson: "Roofline", 2009.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device: sizes in bytes, rates a second, as the data sheet has them (16-bit, dense).

    Attributes:
      bandwidth_share, operations_share: what kernels reach of the data sheet's rates.
      host_link_bytes_per_second: to host memory, one direction.
      step_overhead_seconds: of every step, whatever it computes, in which the device waits for the
        host.
      context_share: of the memory, for contexts, kernels and temporary arrays.
    """

    name: str
    memory_bytes: float
    bytes_per_second: float
    operations_per_second: float
    bandwidth_share: float = 0.8
    operations_share: float = 0.5
    host_link_bytes_per_second: float = 25e9
    step_overhead_seconds: float = 1e-3
    context_share: float = 0.06


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a decoder-only model weighs.

    Attributes:
      num_parameters: all of them.
      num_embedding_parameters: of the input embedding, of which a step reads only its rows; 0 if
        the output head is the same matrix.
      num_head_parameters: of the output head.
      bytes_a_value: of weights, keys and values.
    """

    name: str
    num_parameters: int
    num_embedding_parameters: int
    num_head_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_a_value: int = 2

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.bytes_a_value

    @property
    def bytes_a_token(self) -> int:
        """Of keys and values, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_a_value


# An 80 GB accelerator: the A100's data sheet.
A100_80GB = Accelerator(
    name="A100 80 GB",
    memory_bytes=80e9,
    bytes_per_second=2.039e12,
    operations_per_second=312e12,
)
LLAMA_3_8B = ModelShape(
    name="Llama-3-8B",
    num_parameters=8_030_261_248,
    num_embedding_parameters=128_256 * 4096,
    num_head_parameters=128_256 * 4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


def _accelerator(name: str, gigabytes: float, gigabytes_per_second: float, teraflops: float):
    return Accelerator(
        name=name,
        memory_bytes=gigabytes * 1e9,
        bytes_per_second=gigabytes_per_second * 1e9,
        operations_per_second=teraflops * 1e12,
    )


ACCELERATORS = {
    "a100": A100_80GB,
    "h100": _accelerator("H100 80 GB", 80, 3350, 989),
    "h200": _accelerator("H200 141 GB", 141, 4800, 989),
    "b200": _accelerator("B200 180 GB", 180, 8000, 2250),
    "l4": _accelerator("L4 24 GB", 24, 300, 121),
    "v4": _accelerator("TPU v4 32 GB", 32, 1228, 275),
    "v5e": _accelerator("TPU v5e 16 GB", 16, 819, 197),
    "v5p": _accelerator("TPU v5p 95 GB", 95, 2765, 459),
    "v6e": _accelerator("TPU v6e 32 GB", 32, 1640, 918),
    # One of a chip's two cores, which programs see as a device each.
    "tpu7x": _accelerator("TPU7x core 96 GB", 96, 3690, 1153),
}
MODELS = {
    "llama-3-8b": LLAMA_3_8B,
    # The 13B model of the PagedAttention paper: 40 layers, hidden size 5,120.
    "opt-13b": ModelShape(
        name="OPT-13B",
        num_parameters=12_853_473_280,
        num_embedding_parameters=0,
        num_head_parameters=50_272 * 5120,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
    ),
    "mistral-7b": ModelShape(
        name="Mistral-7B",
        num_parameters=7_241_732_096,
        num_embedding_parameters=32_000 * 4096,
        num_head_parameters=32_000 * 4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    "smollm2-135m": ModelShape(
        name="SmolLM2-135M",
        num_parameters=134_515_008,
        num_embedding_parameters=0,
        num_head_parameters=49_152 * 576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes and moves.

    Attributes:
      num_tokens: tokens computed.
      num_rows: rows of logits.
      num_context_tokens: summed over the sequences, tokens that are known at the step's end.
      num_pairs: summed over the tokens, how many tokens each attends to.
      num_swapped_blocks, num_copied_blocks: moved between host and device, and on the device.
    """

    num_tokens: int
    num_rows: int
    num_context_tokens: int
    num_pairs: int
    num_swapped_blocks: int = 0
    num_copied_blocks: int = 0


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """An accelerator that holds a model and a pool of KV blocks."""

    accelerator: Accelerator = A100_80GB
    model: ModelShape = LLAMA_3_8B
    block_size: int = 16

    @property
    def bytes_a_block(self) -> int:
        return self.block_size * self.model.bytes_a_token

    @property
    def overhead_seconds(self) -> float:
        """Of each step, those in which the device waits for the host."""
        return self.accelerator.step_overhead_seconds

    def num_blocks(self, utilization: float) -> int:
        """KV blocks that fit: memory times utilisation, less weights, less the contexts' share."""
        memory_bytes = self.accelerator.memory_bytes
        room = memory_bytes * (utilization - self.accelerator.context_share)
        return int((room - self.model.weight_bytes) // self.bytes_a_block)

    def swap_seconds(self, num_blocks: int) -> float:
        """Seconds to move blocks to the host, or back."""
        return num_blocks * self.bytes_a_block / self.accelerator.host_link_bytes_per_second

    def step_seconds(self, work: StepWork) -> float:
        """Seconds of a step, by the formula of this module."""
        memory, operations = self._roofs(work)
        seconds = max(memory, operations) + self.accelerator.step_overhead_seconds
        if work.num_swapped_blocks:
            seconds += self.swap_seconds(work.num_swapped_blocks)
        if work.num_copied_blocks:
            seconds += 2 * work.num_copied_blocks * self.bytes_a_block / self._bandwidth
        return seconds

    def decode_seconds(self, num_seqs: int, context_tokens: np.ndarray) -> np.ndarray:
        """Seconds of steps in which each of some sequences decodes a token.

        Args:
          num_seqs: sequences.
          context_tokens: int64[num_steps], of all sequences together, at each step's end.
        """
        work = StepWork(num_seqs, num_seqs, context_tokens, context_tokens)  # pyright: ignore
        return np.maximum(*self._roofs(work)) + self.accelerator.step_overhead_seconds

    @property
    def _bandwidth(self) -> float:
        return self.accelerator.bytes_per_second * self.accelerator.bandwidth_share

    def _roofs(self, work: StepWork) -> tuple[float, float]:
        """Seconds of a step's memory traffic, and of its operations."""
        chip, model = self.accelerator, self.model
        num_read = model.num_parameters - model.num_embedding_parameters
        num_kv_tokens = work.num_context_tokens + work.num_tokens
        num_bytes = num_read * model.bytes_a_value + num_kv_tokens * model.bytes_a_token
        operations = (
            2 * (num_read - model.num_head_parameters) * work.num_tokens
            + 2 * model.num_head_parameters * work.num_rows
            + 4 * model.num_layers * model.num_heads * model.head_dim * work.num_pairs
        )
        peak = chip.operations_per_second * chip.operations_share
        return num_bytes / self._bandwidth, operations / peak
