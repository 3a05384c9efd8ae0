"""Makes tests/goldens/tiny_llama3: a random Llama checkpoint and its logits, by transformers.

The checkpoint has Llama-3 RoPE scaling, grouped queries and an output matrix of its own, and is
saved by transformers itself, so that the tests read what its users' folders look like. Needs an
environment with torch and transformers, which the project itself does not use:

    pip install torch transformers absl-py
    python scripts/make_goldens.py --output_dir=tests/goldens/tiny_llama3
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from absl import app, flags

OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder to write to.", required=True)

# Longer than the original context of 64 tokens that the RoPE scaling starts from.
NUM_TOKENS = 100
NUM_SCORED_TOKENS = 4


def make_model() -> torch.nn.Module:
    """A Llama whose weights are rounded to bfloat16, so that they can be stored in half the bytes
    and still be computed with in float32."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        initializer_range=0.3,  # the usual 0.02 would leave attention nearly uniform
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bos_token_id=1,
        eos_token_id=[2, 3],
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    folder = Path(OUTPUT_DIR.value)
    make_model().save_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = torch.randint(64, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(token_ids).logits[0, -NUM_SCORED_TOKENS:]
    golden = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "token_ids": token_ids[0].tolist(),
        "last_logits": [[round(score, 6) for score in row] for row in logits.tolist()],
    }
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    app.run(main)
