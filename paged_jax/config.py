"""What a user may set about an engine, checked when it is set.

Every class here is frozen and keyword-only, and raises a ValueError that names the field, the value
it got and what would be right. `None` means "chosen by the engine"; the choice is made once, by
`sizing.resolve`, and logged.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def check_int(field: str, value: Any, *, at_least: int) -> None:
    """Raises ValueError unless `value` is an int (not a bool) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{field}={value!r}: it must be an integer of at least {at_least}")


def check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{field}={value!r}: it must be one of {list(choices)}")


SCHEDULING_POLICIES = ("fcfs", "priority")
QUANTIZATIONS = ("int8", "int8_weight_only", "int4")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")
PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits that the scheduler and the block manager work under; all of them known numbers.

    Attributes:
      num_blocks: blocks in the pool, the null block (block 0) included.
      block_size: tokens a block holds.
      max_model_len: the longest sequence, prompt and output together, in tokens.
      max_num_seqs: the most sequences in one step.
      max_num_batched_tokens: the most tokens in one step (the token budget).
      enable_prefix_caching: whether full blocks are hashed and shared.
      policy: "fcfs", first come, first served, or "priority".
      preemption_mode: "recompute", "swap", or "auto", the cheaper of them as measured.
      num_host_blocks: blocks of host memory for swapped sequences; 0 for none.
      enable_host_prefix_cache: whether evicted prefixes are kept there.
      num_speculative_tokens: the longest draft that a decode may carry; 0 for none.
      decode_lookahead: tokens that a sequence may be decoded ahead of what the host has read, half
        of them in each of two calls; 1: each token is read before the next step.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    preemption_mode: str = "auto"
    num_host_blocks: int = 0
    enable_host_prefix_cache: bool = False
    num_speculative_tokens: int = 0
    decode_lookahead: int = 1

    @property
    def num_decode_steps(self) -> int:
        """The most decode steps that a call makes."""
        return max(self.decode_lookahead // 2, 1)

    def __post_init__(self):
        check_int("decode_lookahead", self.decode_lookahead, at_least=1)
        check_int("num_speculative_tokens", self.num_speculative_tokens, at_least=0)
        check_choice("policy", self.policy, SCHEDULING_POLICIES)
        check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        check_int("num_host_blocks", self.num_host_blocks, at_least=0)
        check_int("num_blocks", self.num_blocks, at_least=2)
        check_int("block_size", self.block_size, at_least=1)
        check_int("max_model_len", self.max_model_len, at_least=2)
        check_int("max_num_seqs", self.max_num_seqs, at_least=1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, at_least=1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is smaller than "
                f"max_num_seqs={self.max_num_seqs}: a step could not hold one token of every "
                "sequence; raise the first or lower the second"
            )
        longest = (self.num_blocks - 1) * self.block_size
        if self.max_model_len > longest:
            raise ValueError(
                f"max_model_len={self.max_model_len} does not fit the KV pool: "
                f"{self.num_blocks - 1} usable blocks of {self.block_size} tokens hold {longest} "
                f"tokens; set max_model_len to at most {longest}, or give the pool more memory "
                "(kv_cache_memory_bytes, num_gpu_blocks_override)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """An engine as the user asks for it. `None` leaves the choice to the engine.

    Attributes:
      dtype: dtype of weights and computations: "float32", "bfloat16", or "auto": float32 on CPU,
        where bfloat16 is slower; elsewhere float32 for a float32 checkpoint and bfloat16 for
        others.
      quantization: None; "int8": matrices are stored in int8 and activations quantised on the
        way, the fastest on a CPU; "int8_weight_only": the activations are left alone; "int4":
        matrices of 4 bits with a scale and a minimum for each 32 columns, as a Q4_1 file has them,
        but for the vocabulary's, which are in int8.
      kv_cache_dtype: dtype of the KV pool: "auto", the weights'; "float32"; "bfloat16"; or "int8",
        which holds twice the tokens of bfloat16 and four times those of float32 in the same memory.
        Its scales are found when the model is loaded, by running it over a page of text.
      seed: from which the seeds of requests without their own are drawn.
      gpu_memory_utilization: the share of the device's memory the engine may use, 0 to 1.
      kv_cache_memory_bytes: size of the KV pool, over all devices that a model is cut over; None
        sizes it from the device's memory. On CPU that is 1 GiB, or what one request of
        max_model_len needs if that is more.
      num_gpu_blocks_override: number of blocks (the null block included), whatever the memory.
      max_model_len: longest sequence in tokens; None takes the model's.
      max_num_seqs: most sequences in one step; None: 32 on CPU, 256 elsewhere (or
        max_num_batched_tokens if that is less).
      max_num_batched_tokens: most tokens in one step; None: 512 on CPU, 2048 elsewhere.
      block_size: tokens a block.
      enable_prefix_caching: share full blocks of equal prefixes.
      scheduling_policy: "fcfs", first come, first served, or "priority": by the priority that
        `generate` is given, a smaller one first.
      preemption_mode: what happens to a request whose blocks are needed for others: "recompute" it
        later, "swap" it to the host and back while swap space lasts, or "auto": whichever is
        cheaper, as measured on this machine.
      swap_space_bytes: host memory for swapped requests and evicted prefixes; 0 for none.
      enable_host_prefix_cache: keep evicted prefixes in the swap space, and bring them back at a
        hit.
      swap_alert_tokens_per_second: a rate of swapping above which a warning is logged, None for
        never.
      watch_prefixes: look for prompts that are alike but for a few tokens early on, which keeps
        them from sharing blocks, and log a warning.
      speculation: None, or "prompt_lookup": guess the next tokens from earlier ones of the same
        sequence, and confirm them in one step. The tokens are the same, sooner where texts repeat
        themselves and few requests run.
      num_speculative_tokens: the most tokens of a guess.
      decode_lookahead: how many tokens a sequence may be decoded ahead of what the host has read,
        while nobody waits to join: half of them in each of two calls, the second dispatched before
        the first one's tokens are read. 1: a step for each token. What is computed past a stop
        string or an abort is dropped. None: 8; on CPU 2 where the weights take more than 512 MiB,
        since eight long steps would keep tokens and arrivals waiting; 1 with speculation.
      tensor_parallel_size: devices that a model is cut over.
      data_parallel_size: how many times the model is there, each with a KV pool of its own and
        max_num_seqs seats; requests are shared out. It takes data_parallel_size x
        tensor_parallel_size devices.
      attention_implementation: None (the fastest for the device), "cpu" (C++, built where a
        compiler is found), "xla", "reference", "tpu" or "gpu": the kernels of TPUs and of Hopper
        GPUs, which run on other devices too, interpreted and very slow.
      disable_log_stats: False logs a line of throughput and cache use every ten seconds.
      warmup: compile every step shape before the first request; without it, each when first needed;
        decodes run in a larger shape that is ready until 16 steps have wanted a smaller one.
    """

    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "auto"
    swap_space_bytes: int = 0
    enable_host_prefix_cache: bool = False
    swap_alert_tokens_per_second: float | None = 300.0
    watch_prefixes: bool = True
    speculation: str | None = None
    num_speculative_tokens: int = 7
    decode_lookahead: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    attention_implementation: str | None = None
    disable_log_stats: bool = True
    warmup: bool = True

    def __post_init__(self):
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: it must be 'auto', 'float32' or 'bfloat16'")
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_int("tensor_parallel_size", self.tensor_parallel_size, at_least=1)
        check_int("data_parallel_size", self.data_parallel_size, at_least=1)
        check_int("seed", self.seed, at_least=0)
        check_int("block_size", self.block_size, at_least=1)
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        check_int("swap_space_bytes", self.swap_space_bytes, at_least=0)
        self._check_swapping()
        check_int("num_speculative_tokens", self.num_speculative_tokens, at_least=1)
        if self.speculation is not None:
            check_choice("speculation", self.speculation, ("prompt_lookup",))
        utilization = self.gpu_memory_utilization
        if not isinstance(utilization, (int, float)) or not 0 < utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization={utilization!r}: it must be above 0 and at most 1"
            )
        minima = {
            "kv_cache_memory_bytes": 1,
            "num_gpu_blocks_override": 2,
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "decode_lookahead": 1,
        }
        for field, at_least in minima.items():
            value = getattr(self, field)
            if value is not None:
                check_int(field, value, at_least=at_least)
        for field in (
            "enable_prefix_caching",
            "enable_host_prefix_cache",
            "watch_prefixes",
            "disable_log_stats",
            "warmup",
        ):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r}: it must be True or False")
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ValueError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} and "
                f"num_gpu_blocks_override={self.num_gpu_blocks_override} both set the size of the "
                "pool; give one of them"
            )

    def _check_swapping(self) -> None:
        for field, value in (
            ("preemption_mode", self.preemption_mode == "swap"),
            ("enable_host_prefix_cache", self.enable_host_prefix_cache is True),
        ):
            if value and not self.swap_space_bytes:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} needs host memory, and swap_space_bytes=0; "
                    "set swap_space_bytes to what the engine may take of it"
                )
        if self.enable_host_prefix_cache is True and self.enable_prefix_caching is False:
            raise ValueError(
                "enable_host_prefix_cache=True and enable_prefix_caching=False: the host keeps "
                "what the prefix cache evicts; turn both on, or the first off"
            )
        rate = self.swap_alert_tokens_per_second
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, (int, float)) or rate <= 0
        ):
            raise ValueError(
                f"swap_alert_tokens_per_second={rate!r}: it must be a number above 0, or None for "
                "no warning"
            )
