"""A request whose tokens nobody knows: the scheduler sees its lengths, and what it shares."""

from __future__ import annotations

from array import array

from paged_jax.prefix_cache import hash_block
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams
from paged_jax.simulate.traffic import TraceRequest

# As many tokens as `max_model_len` leaves room for: the length ends it.
_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


class SimulatedRequest(Request):
    """Stands for a request of a trace.

    Its token ids are a byte each and all 0; blocks are told apart by keys in place of hashes. A
    block of the prompt has the hash of its tokens where they are known, or a key of the trace's
    prefix number, which stands for all tokens before it too. Every other block is its own.

    Args:
      serial: its number in the run, from which its id follows.
      trace: lengths and prefixes.

    Attributes:
      arrival_seconds: when it came.
    """

    __slots__ = ("arrival_seconds", "serial", "trace")

    def __init__(self, serial: int, trace: TraceRequest):
        total = trace.num_prompt_tokens + trace.num_output_tokens
        super().__init__(str(serial), [], _PARAMS, max_model_len=total)
        self.token_ids = bytearray(trace.num_prompt_tokens)  # pyright: ignore
        self.num_prompt_tokens = trace.num_prompt_tokens
        self.arrival_seconds = trace.arrival_seconds
        self.serial = serial
        self.trace = trace

    def extend_hashes(self, num_blocks: int, block_size: int) -> None:
        """Makes `block_hashes` cover the first `num_blocks` blocks: hashes or keys, see above."""
        hashes, trace = self.block_hashes, self.trace
        num_known = self.num_prompt_tokens if trace.token_ids or trace.prefix_ids else 0
        num_shared = min(num_blocks, num_known // block_size)
        for i in range(len(hashes), num_shared):
            start, end = i * block_size, (i + 1) * block_size
            if trace.token_ids:
                tokens = array("i", trace.token_ids[start:end])
                hashes.append(hash_block(hashes[-1] if i else None, tokens))
            else:
                prefix = trace.prefix_ids[(end - 1) // trace.prefix_tokens]
                hashes.append(b"p%d/%d" % (prefix, i))
        own = b"o%d/" % self.serial
        hashes.extend(own + b"%d" % i for i in range(len(hashes), num_blocks))
