"""The Llama decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

The model knows no cache: the caller gives `attend`, which stores the new keys and values wherever
it keeps them and returns the attention output.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.models import layers
from paged_jax.models.config import ModelConfig
from paged_jax.models.heads import ProjectedHeads
from paged_jax.models.params import ParamSpec, TensorSpec

# The name that a Hugging Face config.json gives in its field "architectures".
HF_ARCHITECTURE = "LlamaForCausalLM"

# (heads of T tokens, cache) -> (out[T, Hq, D], cache)
Attend = Callable[[ProjectedHeads, Any], tuple[jax.Array, Any]]


@flax.struct.dataclass
class LlamaLayer:
    """One decoder layer. E hidden, F intermediate, D head_dim, G query heads per KV head."""

    attn_norm: jax.Array  # float32[E]
    qkv: jax.Array  # [Hkv * (G + 2) * D, E]; for each KV head its G query heads, its K, its V
    out: jax.Array  # [E, Hq * D]
    mlp_norm: jax.Array  # float32[E]
    gate_up: jax.Array  # [2 * F, E]; the gate's rows first
    down: jax.Array  # [E, F]


@flax.struct.dataclass
class LlamaParams:
    """A Llama model's weights; every array in the model's dtype but for the float32 norms."""

    embed: jax.Array  # [V, E]
    layers: tuple[LlamaLayer, ...]
    final_norm: jax.Array  # float32[E]
    lm_head: jax.Array | None  # [V, E]; None when tied to embed


def param_specs(config: ModelConfig) -> LlamaParams:
    """The one declaration of every parameter: LlamaParams whose leaves are ParamSpec.

    A sharding over a logical axis slices each of a parameter's tensors, then fuses the slices:
    "kv_heads" cuts `qkv` between groups and the columns of `out` at the same heads; "mlp" cuts the
    gate's rows, the up rows and the columns of `down` alike.
    """
    embed_shape = (config.vocab_size, config.hidden_size)
    lm_head = None
    if not config.tie_word_embeddings:
        lm_head = _matrix("lm_head.weight", embed_shape, ("vocab", "embed"))
    return LlamaParams(
        embed=_matrix("model.embed_tokens.weight", embed_shape, ("vocab", "embed")),
        layers=tuple(_layer_specs(config, index) for index in range(config.num_layers)),
        final_norm=_norm("model.norm.weight", config),
        lm_head=lm_head,
    )


def _layer_specs(config: ModelConfig, index: int) -> LlamaLayer:
    prefix = f"model.layers.{index}."
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim

    def tensor(name: str, *shape: int, unit: int = 1) -> TensorSpec:
        return TensorSpec(name=f"{prefix}{name}.weight", shape=shape, unit=unit)

    qkv: Any = ParamSpec(
        tensors=(
            tensor("self_attn.q_proj", q_rows, hidden, unit=config.head_dim),
            tensor("self_attn.k_proj", kv_rows, hidden, unit=config.head_dim),
            tensor("self_attn.v_proj", kv_rows, hidden, unit=config.head_dim),
        ),
        num_groups=config.num_kv_heads,
        axes=("kv_heads", "embed"),
    )
    gate_up: Any = ParamSpec(
        tensors=(tensor("mlp.gate_proj", ffn, hidden), tensor("mlp.up_proj", ffn, hidden)),
        axes=("mlp", "embed"),
    )
    return LlamaLayer(
        attn_norm=_norm(f"{prefix}input_layernorm.weight", config),
        qkv=qkv,
        out=_matrix(f"{prefix}self_attn.o_proj.weight", (hidden, q_rows), ("embed", "kv_heads")),
        mlp_norm=_norm(f"{prefix}post_attention_layernorm.weight", config),
        gate_up=gate_up,
        down=_matrix(f"{prefix}mlp.down_proj.weight", (hidden, ffn), ("embed", "mlp")),
    )


# The specs stand where LlamaParams will hold arrays, hence the Any.
def _matrix(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> Any:
    return ParamSpec(tensors=(TensorSpec(name=name, shape=shape),), axes=axes)


def _norm(name: str, config: ModelConfig) -> Any:
    # Norms are computed in float32, and so small that keeping them so costs nothing.
    return ParamSpec(
        tensors=(TensorSpec(name=name, shape=(config.hidden_size,)),),
        axes=("embed",),
        dtype="float32",
        init_scale=None,
    )


def forward(
    params: LlamaParams,
    token_ids: jax.Array,
    positions: jax.Array,
    caches: Sequence[Any],
    attend: Attend,
    *,
    config: ModelConfig,
    tensor_axis: str | None = None,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Runs the decoder, final norm included, over T tokens of any number of sequences.

    Layers are unrolled: on CPU a scan would copy each layer's weights out of the stack.

    Args:
        params: weights; under tensor_axis this device's slices, as param_specs() describes.
        token_ids: int32[T], each in [0, vocab_size).
        positions: int32[T], each token's place in its own sequence.
        caches: one entry per layer, passed to attend and returned from it unseen.
        attend: (heads, cache) -> (out[T, Hq, D], cache); heads come in the model's dtype, not
            rotated yet, and under tensor_axis only this device's.
        tensor_axis: name of the mapped axis that tensor parallelism sums over; None without it.
        rows: int32[N], the tokens whose hidden states are wanted; None for all. The last layer does
            for them alone what comes after its attention: of the others it needs keys and values.
    Returns:
        hidden: [T, E], or [N, E], in the model's dtype, equal on every device; and the new caches.
    Raises: ValueError when there is not one cache per layer.
    """
    if len(caches) != config.num_layers:
        raise ValueError(
            f"caches has {len(caches)} entries; the model has {config.num_layers} layers"
        )
    # Behind a barrier: else XLA computes them anew for each head of each layer, which on CPU was
    # more than a quarter of the program and of a decode step's time.
    cos, sin = lax.optimization_barrier(layers.rope_tables(positions, config.rope, config.head_dim))
    hidden = layers.vocab_parallel_embedding(
        params.embed, token_ids, vocab_size=config.vocab_size, tensor_axis=tensor_axis
    )

    @jax.jit  # All layers are alike: traced once, unrolled by the compiler.
    def decode_layer(
        layer: LlamaLayer, hidden: jax.Array, cache: Any, rows: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        num_tokens, eps = hidden.shape[0], config.rms_norm_eps
        heads = layers.norm_linear(hidden, layer.attn_norm, layer.qkv, eps)
        heads = heads.reshape(num_tokens, -1, config.queries_per_kv_head + 2, config.head_dim)
        attended, cache = attend(ProjectedHeads(heads, cos, sin), cache)
        attended = attended.reshape(num_tokens, -1).astype(hidden.dtype)
        if rows is not None:
            hidden, attended = hidden[rows], attended[rows]
        hidden = layers.add_linear(hidden, attended, layer.out, tensor_axis)
        gated = layers.norm_swiglu_linear(hidden, layer.mlp_norm, layer.gate_up, eps)
        return layers.add_linear(hidden, gated, layer.down, tensor_axis), cache

    new_caches = []
    for index, (layer, cache) in enumerate(zip(params.layers, caches, strict=True)):
        is_last = index == config.num_layers - 1
        hidden, cache = decode_layer(layer, hidden, cache, rows if is_last else None)
        new_caches.append(cache)
    return layers.rms_norm(hidden, params.final_norm, config.rms_norm_eps), tuple(new_caches)


def logits(
    params: LlamaParams,
    hidden: jax.Array,
    *,
    config: ModelConfig,
    tensor_axis: str | None = None,
) -> jax.Array:
    """Scores of every token of the vocabulary.

    Args:
        hidden: [N, E] from forward().
        tensor_axis: as in forward(); the vocabulary may be split over it or whole on each device.
    Returns: float32[N, vocab_size], equal on every device.
    """
    head = _head(params)
    scores = layers.linear(hidden, head, out_dtype=jnp.dtype(jnp.float32))
    if tensor_axis is not None and head.shape[0] != config.vocab_size:
        scores = lax.all_gather(scores, tensor_axis, axis=1, tiled=True)
    return scores


def can_find_likeliest(params: LlamaParams, hidden: jax.Array) -> bool:
    """Whether likeliest() runs here on these."""
    return layers.can_find_largest(hidden, _head(params))


def likeliest(params: LlamaParams, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where logits() are largest, and what they are there; they are not made for it.

    Args:
        params: whole; the vocabulary is not split.
        hidden: [N, E] from forward().
    Returns: int32[N], the lowest id among equals; float32[N], NaN if any score of the row is.
    """
    return layers.find_largest(hidden, _head(params))


def _head(params: LlamaParams) -> layers.Matrix:
    return params.embed if params.lm_head is None else params.lm_head
