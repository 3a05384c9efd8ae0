"""The attention kernel: decodes, then prefills, in one launch.

**Reads** from HBM: K and V of the pages that some query of a sequence sees, once a decode and once
a prefill tile; the queries as float32, once; the block tables, 512 bytes for each 128 pages.
**Writes** the outputs as float32, once, and zeros for the rows that no sequence owns.

    scalar prefetch    kv_lens, query_starts, num_seqs
    work lists         decodes: the sequences with one query row; prefills: those with more
    decode phase       attention_tpu_decode      \\  each with a pipeline of its own
    prefill phase      attention_tpu_prefill     /   (attention_tpu_pipeline), in the same VMEM
    rest               zeros

A phase without work costs a few scalar instructions, not a launch.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_tpu_decode import decode_phase
from pallas_kernels.attention_tpu_pipeline import TokenRange, WorkList, divide, token_rows
from pallas_kernels.attention_tpu_prefill import prefill_phase
from pallas_kernels.attention_tpu_spec import LANES, AttentionSpec


def attention_kernel(spec: AttentionSpec, num_tokens: int, *refs) -> None:
    """The body of the `pallas_call`.

    Args:
      num_tokens: T, the rows of q that the caller gave.
      refs: kv_lens int32[S], query_starts int32[S + 1], num_seqs int32[1] in SMEM;
        q float32, the pool, block_tables int32[S, B] in HBM; if there are any, sinks in VMEM,
        float32[num_out_rows, 128] for decodes and float32[Hkv, 8, columns] for prefills; outputs
        in HBM: out float32, lse float32 if asked for. With decode_only, q is
        [T, L * num_rows, 128], out [T, L * num_out_rows, 128] and lse [T, num_out_rows, 128],
        where L is the lane tiles of a row; else they are head-major, [L * num_rows, T, 128] and
        so on, so that a tile of tokens is a matrix for each head. Where decodes append, q has
        L * 2 * Hkv rows more, the token's key and value of each head, laid out as in the pool
        but filling both halves of a row of two tokens; the last output is the pool. Where they
        continue, the out and lse to continue from stand behind q.
    """
    kv_lens, query_starts, num_seqs, *rest = refs
    token_arrays = [rest.pop(0) for _ in range(3 if spec.continues else 1)]
    pool, tables, *rest = rest
    sinks = rest.pop(0) if spec.has_sinks else None
    prefill_sinks = rest.pop(0) if spec.has_sinks and not spec.decode_only else None
    written_pool = rest.pop() if spec.appends else None
    out, lse = rest if spec.return_lse else (*rest, None)
    count = num_seqs[0]

    def query_len(seq):
        return query_starts[seq + 1] - query_starts[seq]

    def decode_tokens(seq, tile) -> TokenRange:
        end = kv_lens[seq]
        if spec.sliding_window is None:
            return TokenRange(jnp.int32(0), end)
        return TokenRange(jnp.maximum(end - spec.sliding_window, 0), end)

    def decodes(count, seq_at) -> WorkList:
        return WorkList(
            count=count,
            seq_at=seq_at,
            num_tiles=None,
            tokens=decode_tokens,
            rows=lambda seq, tile: (query_starts[seq], 1),
        )

    def with_shared(seqs):
        num_prefixes = _sort(count, kv_lens, query_starts, None, seqs, spec, out, lse)[1]
        tile = spec.tile_tokens
        work = WorkList(
            count=num_prefixes,
            seq_at=lambda index: seqs[index],
            num_tiles=lambda seq: divide(query_len(seq) + tile - 1, tile),
            tokens=decode_tokens,
            rows=lambda seq, number: (
                query_starts[seq] + number * tile,
                jnp.minimum(query_len(seq) - number * tile, tile),
            ),
        )
        decode_phase(spec, work, token_arrays, pool, tables, sinks, out, lse, None)

    if spec.tile_tokens > 1:
        pl.run_scoped(with_shared, pltpu.SMEM(kv_lens.shape, jnp.int32))
        _fill(spec, query_starts[count], num_tokens, out, lse)
        return
    if spec.decode_only:
        work = decodes(count, lambda index: index)
        decode_phase(spec, work, token_arrays, pool, tables, sinks, out, lse, written_pool)
        _fill(spec, count, num_tokens, out, lse)
        return

    tile_tokens = spec.sizes.prefill_tile_tokens

    def first_position(seq, tile):
        return kv_lens[seq] - query_len(seq) + tile * tile_tokens

    def tile_rows(seq, tile):
        start = tile * tile_tokens
        return query_starts[seq] + start, jnp.minimum(query_len(seq) - start, tile_tokens)

    def prefill_tokens(seq, tile) -> TokenRange:
        if not spec.causal:
            return TokenRange(jnp.int32(0), kv_lens[seq])
        position = first_position(seq, tile)
        first = jnp.int32(0)
        if spec.sliding_window is not None:
            first = jnp.maximum(position - spec.sliding_window + 1, 0)
        return TokenRange(first, position + tile_rows(seq, tile)[1])

    def with_lists(decode_seqs, prefill_seqs):
        num_decodes, num_prefills = _sort(
            count, kv_lens, query_starts, decode_seqs, prefill_seqs, spec, out, lse
        )
        listed = decodes(num_decodes, lambda index: decode_seqs[index])
        decode_phase(spec, listed, token_arrays, pool, tables, sinks, out, lse, None)
        prefills = WorkList(
            count=num_prefills,
            seq_at=lambda index: prefill_seqs[index],
            num_tiles=lambda seq: divide(query_len(seq) + tile_tokens - 1, tile_tokens),
            tokens=prefill_tokens,
            rows=tile_rows,
        )
        prefill_phase(
            spec, prefills, first_position, token_arrays, pool, tables, prefill_sinks, out, lse
        )

    lists = pltpu.SMEM(kv_lens.shape, jnp.int32)
    pl.run_scoped(with_lists, lists, lists)
    _fill(spec, query_starts[count], num_tokens, out, lse)


def _sort(count, kv_lens, query_starts, decode_seqs, prefill_seqs, spec, out, lse):
    """Puts each sequence into its list; returns their lengths. Sees to rows that see nothing.

    Without a list of decodes, all go to the other.
    """

    def one(seq, lengths):
        num_decodes, num_prefills = lengths
        start, end = query_starts[seq], query_starts[seq + 1]
        sees = kv_lens[seq] > 0
        is_decode = sees & (end == start + 1) & (decode_seqs is not None)
        is_prefill = sees & (end > start) & jnp.logical_not(is_decode)

        if decode_seqs is not None:

            @pl.when(is_decode)
            def _():
                decode_seqs[num_decodes] = seq

        @pl.when(is_prefill)
        def _():
            prefill_seqs[num_prefills] = seq

        @pl.when(jnp.logical_not(sees) & (end > start))
        def _():
            _fill(spec, start, end, out, lse)

        return (
            num_decodes + is_decode.astype(jnp.int32),
            num_prefills + is_prefill.astype(jnp.int32),
        )

    return lax.fori_loop(0, count, one, (jnp.int32(0), jnp.int32(0)))


def _fill(spec: AttentionSpec, first, end, out, lse) -> None:
    """Zeros for the output rows of tokens `first` to `end`, minus infinity for their lse."""
    targets = [(out, 0.0, spec.lane_tiles)]
    if lse is not None:
        targets.append((lse, -jnp.inf, 1))

    def run(done, *sources):
        for source, (_, value, _) in zip(sources, targets, strict=True):
            source[...] = jnp.full(source.shape, value, jnp.float32)

        def one(token, carry):
            copies = [
                pltpu.make_async_copy(source, token_rows(spec, target, token), done)
                for source, (target, _, _) in zip(sources, targets, strict=True)
            ]
            for copy in copies:
                copy.start()
            return carry

        def wait(token, carry):
            for source in sources:
                pltpu.make_async_copy(source, source, done).wait()
            return carry

        lax.fori_loop(first, end, one, 0)
        lax.fori_loop(first, end, wait, 0)

    @pl.when(first < end)
    def _():
        scratch = [
            pltpu.VMEM((tiles * spec.heads.num_out_rows, LANES), jnp.float32)
            for _, _, tiles in targets
        ]
        pl.run_scoped(run, pltpu.SemaphoreType.DMA, *scratch)
