"""llama.cpp through llama-cpp-python's low-level API (written against 0.3.36) as a worker.

Three ways of serving several prompts, by the setting "mode":

    batched  every prompt is a sequence of its own, computed whole; all decode in one batch
    serial   one after another in one sequence, which keeps the prefix that the next prompt shares
             with what it holds: what the class `Llama` does
    shared   batched, and the prefix that all prompts share is computed once and copied into each
             sequence by hand (llama_memory_seq_cp)
"""
# pyright: reportMissingImports=false

import ctypes
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from peers_protocol import serve

BATCH_TOKENS = 2048  # llama.cpp's own default for a logical batch


class LlamaPeer:
    """settings: "model", a .gguf file; max_model_len, max_num_seqs, num_threads, mode."""

    def __init__(self, settings: dict[str, Any]):
        self._mode = settings["mode"]
        num_seqs = 1 if self._mode == "serial" else settings["max_num_seqs"]
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), params)
        context = llama_cpp.llama_context_default_params()
        tokens_a_seq = -(-settings["max_model_len"] // 256) * 256
        context.n_ctx = tokens_a_seq * num_seqs
        context.n_batch = BATCH_TOKENS
        context.n_seq_max = num_seqs
        context.n_threads = context.n_threads_batch = settings["num_threads"]
        context.kv_unified = self._mode == "shared"  # Else each sequence has a cache of its own.
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context of {context.n_ctx} tokens")
        self._settings = {
            name: getattr(context, name)
            for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads", "flash_attn_type", "type_k")
        }
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def info(self) -> dict[str, Any]:
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "python": platform.python_version(),
            "system_info": system,
            "mode": self._mode,
            "cores": os.cpu_count(),
            **self._settings,
        }

    def generate(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(self._memory, False)
        started = time.perf_counter()
        if self._mode == "serial":
            outputs, num_reused = [], 0
            held: list[int] = []
            for prompt in prompts:
                kept = min(_shared_prefix([held, prompt]), len(prompt) - 1)
                llama_cpp.llama_memory_seq_rm(self._memory, 0, kept, -1)
                outputs += self._complete([prompt], kept, max_tokens, ignore_eos)
                held = prompt + outputs[-1][:-1]
                num_reused += kept
        else:
            kept = 0
            if self._mode == "shared" and len(prompts) > 1:
                kept = min(_shared_prefix(prompts), min(map(len, prompts)) - 1)
                self._share(prompts[0][:kept], len(prompts))
            num_reused = kept * (len(prompts) - 1)
            outputs = self._complete(prompts, kept, max_tokens, ignore_eos)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "token_ids": outputs, "prefix_hit_tokens": num_reused}

    def _share(self, prefix: list[int], num_seqs: int) -> None:
        self._decode([(token, i, 0, False) for i, token in enumerate(prefix)])
        for seq in range(1, num_seqs):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, 0, len(prefix))

    def _complete(
        self, prompts: Sequence[list[int]], num_held: int, max_tokens: int, ignore_eos: bool
    ) -> list[list[int]]:
        """Greedy outputs of sequences that hold the first `num_held` tokens of their prompts."""
        rows = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
            if position >= num_held
        ]
        outputs = [[token] for token in self._decode(rows)]
        ended = [not ignore_eos and self._ends(output[0]) for output in outputs]
        for step in range(1, max_tokens):
            live = [seq for seq, end in enumerate(ended) if not end]
            if not live:
                break
            tokens = self._decode(
                [(outputs[seq][-1], len(prompts[seq]) + step - 1, seq, True) for seq in live]
            )
            for seq, token in zip(live, tokens, strict=True):
                outputs[seq].append(token)
                ended[seq] = not ignore_eos and self._ends(token)
        return outputs

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Computes (token, position, sequence, wanted) rows; the likeliest next of wanted ones."""
        found = []
        batch = self._batch
        for start in range(0, len(rows), BATCH_TOKENS):
            part = rows[start : start + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for i, (token, position, seq, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            status = llama_cpp.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode of {len(part)} tokens gave {status}")
            found += [self._likeliest(i) for i, row in enumerate(part) if row[3]]
        llama_cpp.llama_synchronize(self._context)
        return found

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self._vocab_size,)).argmax())

    def _ends(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))


def _shared_prefix(prompts: Sequence[list[int]]) -> int:
    """Tokens that all of them begin with."""
    first = min(prompts)
    last = max(prompts)  # What these two share, all share.
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


if __name__ == "__main__":
    serve(LlamaPeer)
