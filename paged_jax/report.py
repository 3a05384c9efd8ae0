"""The short report that a run ends with."""

from __future__ import annotations

from paged_jax.llm import LLM

_MIB = 2**20


def report(llm: LLM, seconds: float) -> str:
    """What a run did: requests, tokens, speed, KV pool, prefix hits, preemptions.

    Args:
      llm: the engine, which has done nothing else since it was made.
      seconds: how long the run took, loading and warm-up left out. What it waited for step shapes
        to be compiled is shown, and no part of its speed.
    """
    metrics = llm.get_metrics()
    config, num_pools = llm.engine.config, len(llm.engine.shards)
    reasons = metrics["request_success"]
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "none"
    queries, hits = metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]
    tokens_out = metrics["generation_tokens"]
    runner = llm.engine.runner
    compiling = runner.compile_seconds
    waited = f"; {runner.num_programs} step shapes made ready in {compiling:.1f} s before that"
    peak = metrics["kv_cache_peak_usage_perc"]
    rows = [
        ("requests", f"{sum(reasons.values())}  ({ends})"),
        (
            "tokens",
            f"{metrics['prompt_tokens']:,} in, {tokens_out:,} out, in {seconds - compiling:.1f} s"
            + (waited if compiling else ""),
        ),
        ("speed", f"{tokens_out / (seconds - compiling):.1f} output tokens/s"),
        (
            "KV pool",
            (f"{num_pools} x " if num_pools > 1 else "")
            + f"{config.num_blocks - 1:,} blocks of {config.block_size} tokens, "
            f"{runner.pool.num_bytes / _MIB:.0f} MiB; peak use {100 * peak:.1f}%",
        ),
        ("prefix hits", f"{hits:,} of {queries:,} tokens ({100 * hits / max(queries, 1):.1f}%)"),
        ("preemptions", f"{metrics['num_preemptions']}"),
    ]
    return "\n".join(f"  {name:<12} {text}" for name, text in rows)
