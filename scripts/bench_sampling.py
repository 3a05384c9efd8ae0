"""Times the sampler: milliseconds a call, by batch size, vocabulary and what the rows ask for.

    python scripts/bench_sampling.py --num_rows=32 --vocab_size=49152

Prints a table as it measures; the last line is one JSON object with the same figures. `--reference`
adds what the parts would cost done in other ways.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from paged_jax.sampling import MAX_MASKED_TOKENS, SamplingBatch, sample

NUM_ROWS = flags.DEFINE_multi_integer("num_rows", [1, 8, 32], "Rows in a batch.", lower_bound=1)
VOCAB_SIZE = flags.DEFINE_multi_integer(
    "vocab_size", [49152, 128256], "Tokens in the vocabulary.", lower_bound=2
)
NUM_REPEATS = flags.DEFINE_integer("num_repeats", 15, "Timed calls of each case.", lower_bound=1)
LOGIT_SCALE = flags.DEFINE_float(
    "logit_scale",
    3.0,
    "Standard deviation of the normal logits. At 3 the nucleus of top_p 0.9 holds some 1,500 "
    "tokens of 49,152; a trained model's is mostly narrower.",
    lower_bound=0.0,
)
REFERENCE = flags.DEFINE_boolean("reference", False, "Also time other ways to do the parts.")

# Each case: the fields in which all rows differ from greedy rows without logprobs.
CASES = {
    "greedy": {},
    "temperature": dict(temperature=0.8),
    "min_p": dict(temperature=0.8, min_p=0.05),
    "top_k": dict(temperature=0.8, top_k=50),
    "top_p": dict(temperature=0.8, top_p=0.9),
    "top_k top_p": dict(temperature=0.8, top_k=50, top_p=0.9),
    "all": dict(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, masked_tokens=2),
    "greedy logprobs": dict(num_logprobs=5),
    "all logprobs": dict(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, masked_tokens=2, num_logprobs=5
    ),
    "wide top_k": dict(temperature=0.8, top_k=20_000),
    "wide top_p": dict(temperature=2.0, top_p=0.99),
}


def make_batch(num_rows: int, **fields: float) -> SamplingBatch:
    """A batch of `num_rows` equal rows but for their seeds; see `SamplingBatch` for the fields."""
    defaults = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, masked_tokens=-1)
    values = {**defaults, "num_logprobs": -1, "forced_tokens": -1, **fields}
    full = {
        name: jnp.full(num_rows, value, jnp.int32 if isinstance(value, int) else jnp.float32)
        for name, value in values.items()
        if name != "masked_tokens"
    }
    seeds = np.arange(2 * num_rows, dtype=np.uint32).reshape(num_rows, 2)
    masked = np.full((num_rows, MAX_MASKED_TOKENS), -1, np.int32)
    masked[:, 0] = values["masked_tokens"]
    return SamplingBatch(
        **full,
        seed=jnp.asarray(seeds),
        positions=jnp.arange(num_rows, dtype=jnp.int32),
        masked_tokens=jnp.asarray(masked),
    )


def make_logits(num_rows: int, vocab_size: int) -> jax.Array:
    """float32[num_rows, vocab_size]: independent normal logits."""
    normal = np.random.default_rng(0).standard_normal((num_rows, vocab_size), np.float32)
    return jnp.asarray(normal * LOGIT_SCALE.value)


def median_milliseconds(function, *args) -> float:
    """The median time of a call once compiled, results awaited."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(NUM_REPEATS.value):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def reference_parts(logits: jax.Array) -> dict[str, float]:
    """Milliseconds of other ways to do a part of the sampler's work on the same logits."""
    num_rows, vocab_size = logits.shape
    key = jax.random.key(0, impl="threefry2x32")
    keys = jax.random.split(key, num_rows)

    def gumbel_argmax(logits, keys):
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(keys)
        return jnp.argmax(logits + noise, axis=-1)

    def inverse_cdf(logits, keys):
        totals = jnp.cumsum(jax.nn.softmax(logits), axis=-1)
        uniform = jax.vmap(lambda key: jax.random.uniform(key))(keys)
        return jnp.sum(totals <= uniform[:, None] * totals[:, -1:], axis=-1)

    parts = {
        "jnp.argmax": (lambda logits, keys: jnp.argmax(logits, axis=-1)),
        "gumbel over the vocabulary": gumbel_argmax,
        "inverse CDF by cumsum": inverse_cdf,
        "lax.top_k of 64": (lambda logits, keys: lax.top_k(logits, 64)),
        "lax.top_k of 1024": (lambda logits, keys: lax.top_k(logits, 1024)),
        "lax.sort": (lambda logits, keys: lax.sort(logits)),
    }
    return {name: median_milliseconds(jax.jit(f), logits, keys) for name, f in parts.items()}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; all settings are flags")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, milliseconds a call (median)")
    print(f"{'case':<28}{'num_rows':>10}{'vocab_size':>12}{'ms':>10}")
    step = jax.jit(sample)
    results = []
    for vocab_size in VOCAB_SIZE.value:
        for num_rows in NUM_ROWS.value:
            logits = make_logits(num_rows, vocab_size)
            times = {
                name: median_milliseconds(step, logits, make_batch(num_rows, **fields))
                for name, fields in CASES.items()
            }
            if REFERENCE.value:
                parts = reference_parts(logits)
                times |= {f"reference: {name}": value for name, value in parts.items()}
            for name, milliseconds in times.items():
                print(f"{name:<28}{num_rows:>10}{vocab_size:>12}{milliseconds:>10.3f}")
                results.append(
                    dict(
                        case=name,
                        num_rows=num_rows,
                        vocab_size=vocab_size,
                        milliseconds=round(milliseconds, 4),
                    )
                )
    print(json.dumps({"jax": jax.__version__, "results": results}))


if __name__ == "__main__":
    app.run(main)
