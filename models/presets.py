"""Published configurations of some models, for planning and compiling without their files."""

import dataclasses

from paged_jax.models.config import ModelConfig, RopeConfig

SMOLLM2_135M = ModelConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e5),
)
LLAMA3_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e5),
)
LLAMA3_70B = dataclasses.replace(
    LLAMA3_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64
)
PRESETS = {
    "smollm2-135m": SMOLLM2_135M,
    "llama-3-8b": LLAMA3_8B,
    "llama-3-70b": LLAMA3_70B,
}
