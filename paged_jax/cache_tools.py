"""What an `LLM` offers around its KV cache: accounts, pins, events, and why a prefix missed."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax

from paged_jax.calls import Calls
from paged_jax.engine import Engine
from paged_jax.kv_events import KVEvents
from paged_jax.memory_report import MemoryReport
from paged_jax.models.loader import LoadedModel
from paged_jax.outputs import RequestOutput
from paged_jax.pool_snapshot import snapshot
from paged_jax.prefix_journal import PrefixMiss
from paged_jax.prefix_snapshot import Fingerprint, load_blocks, save_blocks
from paged_jax.prometheus import MetricsServer, start_metrics_server
from paged_jax.prompts import ParsedPrompt, Prompt, parse_prompt
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams
from paged_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PinnedPrefix:
    """A prefix that stays in the pool until `LLM.unpin_prefix`."""

    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    num_tokens: int


class CacheTools:
    """The part of `LLM` that is about its memory."""

    engine: Engine
    model: LoadedModel
    _calls: Calls
    _tokenizer: Tokenizer | None

    def get_metrics(self) -> dict[str, Any]:
        """The engine's counters since it was made; see `paged_jax.accounts.collect` for each."""
        return self.engine.get_metrics()

    def start_metrics_server(
        self, port: int = 0, *, host: str = "127.0.0.1", namespace: str = "paged_jax"
    ) -> MetricsServer:
        """Serves `get_metrics` to Prometheus over HTTP, from a thread of its own.

        Args:
          port: 0 takes a free one, see the result's `url`.
          host: address to listen on.
          namespace: what stands before each name; "vllm" suits dashboards made for it.

        Raises:
          OSError: the port is in use.
          ImportError: prometheus_client is not installed.
        """
        return start_metrics_server(self.get_metrics, port=port, host=host, namespace=namespace)

    def memory_report(self, shard: int = 0) -> MemoryReport:
        """Who holds which bytes, and a picture of the pool; print it, or let a notebook show it.

        shard: with data_parallel_size above 1, which of the pools.
        """
        with self._calls.idle():
            scheduler = self._shard(shard).scheduler
            live = [*scheduler.requests.values(), *scheduler.held.values()]
            return MemoryReport(
                pool=snapshot(scheduler.blocks, live),
                block_bytes=self.engine.runner.mover.bytes_a_block,
                weights_bytes=self.engine.runner.num_weight_bytes,
                temporary_bytes=self.engine.runner.temporary_bytes,
            )

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing changed, while any block is in use."""
        return self.engine.reset_prefix_cache()

    def kv_events(self, shard: int = 0) -> KVEvents:
        """What the prefix cache stores and removes from now on, for a router to follow.

        shard: with data_parallel_size above 1, of which pool.

        `subscribe(callback)` or `open_queue()`; the events are in `paged_jax.kv_events`.
        """
        return self._shard(shard).scheduler.blocks.listeners.events

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Computes a prompt and keeps its full blocks, a system prompt that must stay, say.

        They take room of the pool until `unpin_prefix`, and keep `reset_prefix_cache` from doing
        anything. After a fault of the engine they are kept again as soon as some request computes
        them; so are they in each further pool, with data_parallel_size above 1.

        Raises:
          ValueError: prefix caching is off, the prompt has no full block, or what is pinned would
            leave no room for one request of the maximum length.
        """
        parsed = parse_prompt(prompt, self._tokenizer)
        request = self._request_of(parsed)
        size = self.engine.config.block_size
        num_blocks = len(parsed.token_ids) // size
        if not self.engine.config.enable_prefix_caching:
            raise ValueError("enable_prefix_caching=False: nothing is cached that could be pinned")
        if not num_blocks:
            raise ValueError(
                f"the prompt has {len(parsed.token_ids)} tokens, and a block {size}; only full "
                "blocks are shared, so pin a longer one"
            )
        request.extend_hashes(num_blocks, size)
        hashes = tuple(request.block_hashes)
        with self._calls.idle():
            for shard in self.engine.shards:
                blocks = shard.scheduler.blocks
                longest = blocks.num_blocks_for(self.engine.config.max_model_len)
                blocks.pins.pin(hashes, num_blocks_to_spare=longest)
        try:
            params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            [output] = self._calls.run([parsed], [params], use_tqdm=False)
            if output.error is not None:
                raise RuntimeError(output.error)
        except BaseException:
            self._unpin(hashes)
            raise
        return PinnedPrefix(tuple(parsed.token_ids), hashes, num_blocks * size)

    def unpin_prefix(self, pinned: PinnedPrefix) -> None:
        """Lets a pinned prefix go; it stays cached until its blocks are needed."""
        self._unpin(pinned.block_hashes)

    def explain_prefix_miss(self, request: RequestOutput | Prompt) -> PrefixMiss:
        """Says why a request hit no more of the prefix cache than it did, or would now.

        Args:
          request: an output of this engine, explained from what was cached when it was admitted;
            or a prompt that was never sent, from what is cached now.

        Returns:
          The nearest earlier prompt, where the two part, and the reason; printing it says so in
          words, with the text around that place if there is a tokenizer.
        """
        with self._calls.idle():
            size = self.engine.config.block_size
            if isinstance(request, RequestOutput):
                name, tokens = request.request_id, request.prompt_token_ids
                if len(request.outputs) > 1:
                    name += "/0"
                shards = [s for s in self.engine.shards if s.journal.has(name)]
                shards = shards or [self.engine.shards[0]]
                keys = shards[0].journal.keys_of(name)
                twin = self._request_of(ParsedPrompt(token_ids=tokens), keys)
                hits = [request.num_cached_tokens // size]
            else:
                parsed = parse_prompt(request, self._tokenizer)
                name, twin = "this prompt", self._request_of(parsed)
                shards = self.engine.shards
                hits = [len(s.scheduler.blocks.find_cached(twin)) for s in shards]
            twin.extend_hashes(twin.num_tokens // size, size)
            misses = [
                shard.journal.explain(
                    name,
                    twin.token_ids,
                    twin.extra_keys_of(0),
                    twin.block_hashes,
                    num_hits,
                    caching_enabled=self.engine.config.enable_prefix_caching,
                )
                for shard, num_hits in zip(shards, hits, strict=False)
            ]
        return max(misses, key=lambda miss: (miss.num_hit_tokens, miss.num_common_tokens))

    def save_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Saves the prefix cache of the device, for `load_prefix_cache` of a later process.

        Requests may be under way; no step runs meanwhile. Host memory beside the pool stays near
        128 MiB. What a killed process leaves is `<path>.partial`, which is never taken for a
        snapshot; an earlier snapshot at path is replaced once this one is whole.

        Returns:
          How many blocks were saved.

        Raises:
          ValueError: prefix caching is off, or the engine runs in several processes.
          FileExistsError: there is something else at path.
        """
        self._check_snapshots()
        with self._calls.idle():
            runner = self.engine.runner
            schedulers = [shard.scheduler for shard in self.engine.shards]
            live = [[*s.requests.values(), *s.held.values()] for s in schedulers]
            rows = [(s.blocks, own) for s, own in zip(schedulers, live, strict=True)]
            return save_blocks(path, Fingerprint.of(self.model.config, runner), runner, rows)

    def load_prefix_cache(self, path: str | os.PathLike[str]) -> int:
        """Brings a saved prefix cache back, into blocks of the pool that hold nothing.

        A pool with less room takes the prefixes that were used last. Nothing that is cached or in
        use changes, and requests may be under way; no step runs meanwhile. With
        data_parallel_size above 1 each pool gets its own back.

        Returns:
          How many blocks were restored.

        Raises:
          FileNotFoundError: there is nothing at path.
          ArrayFolderError: a ValueError: the snapshot is unfinished or damaged, or belongs to other
            weights, another dtype or block size; or to other scales of an int8 pool, where this one
            holds blocks already.
          ValueError: prefix caching is off, or the engine runs in several processes.
        """
        self._check_snapshots()
        with self._calls.idle():
            runner = self.engine.runner
            rows = [shard.scheduler.blocks for shard in self.engine.shards]
            return load_blocks(path, Fingerprint.of(self.model.config, runner), runner, rows)

    def _check_snapshots(self) -> None:
        if not self.engine.config.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching=False: there is no prefix cache to save or load"
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes share this engine, and a snapshot of the prefix "
                "cache is one process's; compute the prefixes anew"
            )

    def _request_of(self, prompt: ParsedPrompt, keys: Any = None) -> Request:
        """A request that is never queued, to hash by."""
        _, extra_keys, salt, _ = keys or (None, prompt.extra_keys, prompt.cache_salt, None)
        return Request(
            "",
            self.engine.check_prompt(prompt.token_ids),
            SamplingParams(),
            max_model_len=self.engine.config.max_model_len,
            cache_salt=salt,
            extra_keys=extra_keys or (),
        )

    def _unpin(self, block_hashes: tuple[bytes, ...]) -> None:
        with self._calls.idle():
            for shard in self.engine.shards:
                shard.scheduler.blocks.pins.unpin(block_hashes)

    def _shard(self, index: int) -> Engine:
        shards = self.engine.shards
        if not 0 <= index < len(shards):
            raise ValueError(f"shard={index}: there are {len(shards)}, counted from 0")
        return shards[index]
