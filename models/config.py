"""What a decoder is (ModelConfig), and the error that names why a checkpoint cannot be one."""

import dataclasses
import numbers
import sys
from typing import Any, cast

ROPE_KINDS = ("default", "linear", "llama3")

# layers.rope_tables computes exact phases for positions below this.
MAX_POSITION_EMBEDDINGS = 2**20


class ModelLoadError(ValueError):
    """A checkpoint cannot be loaded; the message names the file, the finding and the mend."""


def _is_positive_number(value: object) -> bool:
    """True for a number above 0 that fits a float; nan fails both comparisons."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return 0 < cast("float", value) <= sys.float_info.max


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: how each frequency follows from theta.

    kind "default": frequency i is theta ** (-2 i / head_dim).
    kind "linear": the same, divided by factor (position interpolation, arXiv:2306.15595).
    kind "llama3": low frequencies are divided by factor, high ones kept, those between blended
        (the long-context scaling of Llama 3.1).
    divisors: one number per frequency by which it is divided as well; GGUF files carry the llama3
        scaling in this form, as a tensor.

    Raises ValueError naming the field when a value is out of range, missing for the kind, or given
    to a kind that has no use for it.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope.kind={self.kind!r} is not supported: use one of {ROPE_KINDS}")
        for name in ("theta", "factor"):
            value = getattr(self, name)
            if not _is_positive_number(value):
                raise ValueError(f"rope.{name}={value!r} must be a finite number above 0")
        if self.kind == "default" and self.factor != 1.0:
            raise ValueError(f"rope.factor={self.factor!r} needs kind 'linear' or 'llama3'")
        if self.divisors is not None and not all(map(_is_positive_number, self.divisors)):
            raise ValueError("rope.divisors must all be finite numbers above 0")
        self._check_llama3_fields()

    def _check_llama3_fields(self) -> None:
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            value = getattr(self, name)
            if self.kind != "llama3" and value is not None:
                raise ValueError(f"rope.{name}={value!r} needs kind 'llama3', not {self.kind!r}")
            if self.kind == "llama3" and not _is_positive_number(value):
                raise ValueError(f"rope.{name}={value!r}: kind 'llama3' needs a number above 0")
        if self.low_freq_factor is not None and self.high_freq_factor is not None:
            if self.low_freq_factor >= self.high_freq_factor:
                raise ValueError(
                    f"rope.low_freq_factor={self.low_freq_factor!r} must be below "
                    f"high_freq_factor={self.high_freq_factor!r}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder; hashable, so that it can be a static argument of jax.jit.

    Raises ValueError naming the field, its value and what would be right.
    """

    architecture: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    rope: RopeConfig = RopeConfig()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")
        if self.max_position_embeddings > MAX_POSITION_EMBEDDINGS:
            raise ValueError(
                f"max_position_embeddings={self.max_position_embeddings} is more than the "
                f"{MAX_POSITION_EMBEDDINGS} that rotary embedding is exact for: lower it"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if not (_is_positive_number(self.rms_norm_eps) and self.rms_norm_eps < 1):
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps!r} must lie between 0 and 1")
        if not isinstance(self.tie_word_embeddings, bool):
            raise ValueError(
                f"tie_word_embeddings={self.tie_word_embeddings!r} must be True or False"
            )
        divisors = self.rope.divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise ValueError(
                f"rope.divisors has {len(divisors)} numbers; head_dim={self.head_dim} needs "
                f"{self.head_dim // 2}"
            )

    @property
    def queries_per_kv_head(self) -> int:
        """G, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that one token takes in the KV cache, all layers, at dtype_bytes per number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationInfo:
    """What a checkpoint says about generating from it.

    eos_token_ids: any of these ends a text; empty where the checkpoint names none.
    bos_token_id: None where the checkpoint names none.
    defaults: the checkpoint's advice on sampling, as keyword arguments of SamplingParams that it
        accepts.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
