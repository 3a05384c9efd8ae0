"""Makes tests/goldens/beam_search.json: beam search by transformers on two tiny random Llamas.

One is tests/goldens/tiny_llama3 (see make_goldens.py), the other is made here, as beam_tiny beside
it. A case is kept only if no choice in it was close (MIN_MARGIN), so that float32 sums in another
order cannot change its hypotheses. Needs an environment with torch and transformers:

    pip install torch transformers absl-py
    python scripts/make_beam_goldens.py --goldens_dir=tests/goldens
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from absl import app, flags

GOLDENS_DIR = flags.DEFINE_string("goldens_dir", None, "Folder of the goldens.", required=True)

MIN_MARGIN = 2e-4
PROMPT_LENGTHS = (5, 17)
BEAM_WIDTHS = (1, 2, 4, 8)
LENGTH_PENALTIES = (0.0, 1.0, -0.5, 2.0)
EARLY_STOPPING = (False, True, "never")
# EOS tokens, which the models' texts do hold, and max_tokens. An empty list: nothing ends a text.
ENDINGS = {
    "tiny_llama3": (([58, 41], 20), ([6, 19, 34, 39], 12), ([61], 2), ([], 6)),
    "beam_tiny": (([71], 16), ([71, 13, 140], 24)),
}


class WatchedLlama(transformers.LlamaForCausalLM):
    """Notes in `margin` how close the closest choice of a beam search was."""

    margin = math.inf

    def note(self, values: torch.Tensor) -> None:
        """Takes numbers that are told apart by size; those that stand for "none" are very low."""
        values = values.flatten().double().sort(descending=True).values
        values = values[values > -1e8]
        if len(values) > 1:
            self.margin = min(self.margin, float((values[:-1] - values[1:]).min()))

    def _get_top_k_continuations(self, **kwargs: Any) -> Any:
        num_ranked = min(kwargs["beams_to_keep"] + 1, kwargs["accumulated_log_probs"].shape[1])
        self.note(kwargs["accumulated_log_probs"].topk(num_ranked).values)
        return super()._get_top_k_continuations(**kwargs)

    def _update_finished_beams(self, **kwargs: Any) -> Any:
        finished = super()._update_finished_beams(**kwargs)
        num_tokens = kwargs["cur_len"] + 1 - kwargs["decoder_prompt_len"]
        ending = kwargs["next_token_hits_stopping_criteria"] & kwargs["top_num_beam_mask"]
        scores = kwargs["topk_log_probs"] / num_tokens ** kwargs["length_penalty"]
        self.note(torch.cat((kwargs["beam_scores"][0], scores[ending])))
        return finished

    def _check_early_stop_heuristic(self, **kwargs: Any) -> Any:  # pyright: ignore
        is_hopeful = kwargs["early_stopping"] == "never" and kwargs["length_penalty"] > 0
        length = kwargs["max_length"] if is_hopeful else kwargs["cur_len"]
        length -= kwargs["decoder_prompt_len"]
        best = kwargs["running_beam_scores"][0, :1] / length ** kwargs["length_penalty"]
        self.note(torch.cat((best, kwargs["beam_scores"].min()[None])))
        return super()._check_early_stop_heuristic(**kwargs)


def make_model() -> torch.nn.Module:
    """Tied embeddings, plain RoPE, one KV head for four; weights rounded to bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(4)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def search(model: WatchedLlama, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Runs one case; one beam is transformers' greedy decoding, which knows no scores."""
    width, max_tokens = options["beam_width"], options["max_tokens"]
    eos_token_ids = options["eos_token_ids"]
    model.margin = math.inf
    model.generation_config.eos_token_id = eos_token_ids or None
    beam_options = {}
    if width > 1:
        names = ("length_penalty", "early_stopping")
        beam_options = {name: options[name] for name in names}
        beam_options |= {"num_beams": width, "num_return_sequences": width}
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **beam_options,
    )
    rows = [cut(row[len(prompt) :].tolist(), eos_token_ids) for row in output.sequences]
    if width > 1:
        scores = output.sequences_scores.tolist()
    else:
        logprobs = [torch.log_softmax(step[0], -1) for step in output.scores]
        for step in logprobs:
            model.note(step.topk(2).values)
        total = sum(float(step[token]) for step, token in zip(logprobs, rows[0], strict=True))
        scores = [total / len(rows[0]) ** options["length_penalty"]]
    return {
        **options,
        "prompt_token_ids": prompt,
        "margin": round(model.margin, 6),
        "token_ids": rows,
        "scores": [round(score, 5) for score in scores],
    }


def cut(token_ids: list[int], eos_token_ids: list[int]) -> list[int]:
    """Takes the padding away, which comes after the first EOS."""
    ends = [i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


def cases(folder: Path) -> Iterator[dict[str, Any]]:
    """All cases of one model, the close ones too."""
    model = WatchedLlama.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    vocab_size = model.config.vocab_size
    prompts = [torch.randint(vocab_size, (n,), generator=generator) for n in PROMPT_LENGTHS]
    for prompt, (eos_token_ids, max_tokens) in itertools.product(prompts, ENDINGS[folder.name]):
        for width, penalty in itertools.product(BEAM_WIDTHS, LENGTH_PENALTIES):
            for early_stopping in EARLY_STOPPING:
                options = {
                    "model": folder.name,
                    "beam_width": width,
                    "max_tokens": max_tokens,
                    "length_penalty": penalty,
                    "early_stopping": early_stopping,
                    "eos_token_ids": eos_token_ids,
                }
                yield search(model, prompt.tolist(), options)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    goldens_dir = Path(GOLDENS_DIR.value)
    make_model().save_pretrained(goldens_dir / "beam_tiny")
    found = [case for name in ENDINGS for case in cases(goldens_dir / name)]
    kept = [case for case in found if case["margin"] >= MIN_MARGIN]
    made_by = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32, by "
        f"scripts/make_beam_goldens.py; {len(found) - len(kept)} of {len(found)} cases left out "
        f"as closer than {MIN_MARGIN}"
    )
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in kept)
    text = f'{{"made_by": {json.dumps(made_by)},\n"cases": [\n{lines}\n]}}\n'
    (goldens_dir / "beam_search.json").write_text(text)
    print(made_by)


if __name__ == "__main__":
    app.run(main)
