"""`LLM`: a model in a notebook or a script, with the names that vLLM's users know."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from paged_jax.compile import StepRunner, enable_persistent_cache
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.kv_pool import KVPool
from paged_jax.log import logger
from paged_jax.models.loader import GgufSource, LoadedModel, load_model
from paged_jax.outputs import RequestOutput
from paged_jax.prompts import (
    ParsedPrompt,
    Prompt,
    as_prompt_list,
    parse_prompt,
    render_prompt,
)
from paged_jax.sampling_params import SamplingParams
from paged_jax.sizing import resolve
from paged_jax.tokenizer import Tokenizer, load_tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A language model and its paged KV cache.

    Args:
      model: a .gguf file, a Hugging Face folder, a hub id ("org/name"), or a `LoadedModel`.
      tokenizer: a tokenizer of your own (an AutoTokenizer, a `tokenizers.Tokenizer`) or a folder
        that holds one; None takes the model's.
      skip_tokenizer_init: serve token ids only; texts come back empty.
      **options: fields of `EngineConfig`: dtype, seed, gpu_memory_utilization,
        kv_cache_memory_bytes, max_model_len, max_num_seqs, max_num_batched_tokens, block_size,
        enable_prefix_caching, num_gpu_blocks_override, disable_log_stats, and others.

    Raises:
      ValueError: an option is out of range, the model is not supported, or the pool cannot hold
        one request of the maximum length; each names the field, the value and the mend.
      FileNotFoundError: there is no such model.

    Weights and pool are freed when the object is deleted, or at once by `close`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        tokenizer: Any = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ):
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"unknown option {unknown[0]!r}; LLM takes model, tokenizer, skip_tokenizer_init, "
                f"{', '.join(EngineConfig.__dataclass_fields__)}"
            )
        if skip_tokenizer_init and tokenizer is not None:
            raise ValueError("skip_tokenizer_init=True and a tokenizer were given; give one")
        self.config = EngineConfig(**options)
        enable_persistent_cache()
        if not isinstance(model, LoadedModel):
            model = load_model(model, dtype=self.config.dtype)
        self.model = model
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            self._tokenizer = (
                _tokenizer_of(model) if tokenizer is None else load_tokenizer(tokenizer)
            )
        self.engine = _make_engine(model, self._tokenizer, self.config)
        self._num_calls = 0
        # Outputs that a step gave while another call's loop was running it: the newest of each.
        self._mailbox: dict[str, RequestOutput] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, many at once.

        Args:
          prompts: a string, a list of token ids, a dict with "prompt" or "prompt_token_ids" (and
            "cache_salt"), or a list of these.
          sampling_params: one for all, or one for each prompt; None takes
            `get_default_sampling_params()`. They are not changed.
          use_tqdm: show a progress bar.

        Returns:
          One output a prompt, in the order of the prompts. A prompt that cannot be served costs the
          others nothing: its output has finish reason "error", and `error` says why.

        Raises:
          ValueError: sampling_params are not as many as prompts; or not one of the prompts can be
            served (the error is that of the first).
        """
        parsed = [self._try_parse(prompt) for prompt in as_prompt_list(prompts)]
        return self._run_all(parsed, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations through the model's chat template.

        Args:
          messages: a list of {"role": ..., "content": ...}, or a list of such lists.
          sampling_params, use_tqdm: as in `generate`.
          add_generation_prompt: open the assistant's turn at the end.
          continue_final_message: leave the last message open, to be continued; then
            add_generation_prompt must be False.
          tools: given to the template.
          chat_template: a template of your own, instead of the model's.
          chat_template_kwargs: further variables of the template.

        Returns, raises: as `generate`; a conversation that the template refuses is a prompt that
        cannot be served.
        """
        conversations = [messages] if _is_conversation(messages) else list(messages)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template": chat_template,
            **(chat_template_kwargs or {}),
        }
        parsed = [self._try_render(conversation, options) for conversation in conversations]
        return self._run_all(parsed, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes prompts, and yields each one's output so far whenever it has grown.

        Outputs are whole, not differences: text and token_ids begin at the beginning, and `text`
        only ever grows. `request_id` is the prompt's index as a string; `finished` marks the last
        output of each. A prompt that cannot be served yields one finished output with its `error`.
        Leaving the loop early (break, an exception) aborts what is left; `abort(request_id)`
        ends one request from within the loop.
        """
        prompt_list = as_prompt_list(prompts)
        all_params = self._params_for(len(prompt_list), sampling_params)
        prefix = self._next_prefix()
        added = []
        try:
            for i, (prompt, params) in enumerate(zip(prompt_list, all_params, strict=True)):
                try:
                    self._add(f"{prefix}{i}", self._try_parse(prompt), params, stream=True)
                except ValueError as error:
                    yield RequestOutput.refused(f"{prefix}{i}", str(error))
                else:
                    added.append(f"{prefix}{i}")
            pending = set(added)
            while pending:
                for output in self._step(pending):
                    if output.finished:
                        pending.remove(output.request_id)
                    yield output
        finally:
            self._drop(added)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends an unfinished request at once; its output so far, or None if there is none such.

        The loop that waits for the request gets the same output.
        """
        output = self.engine.abort(request_id)
        if output is not None:
            self._mailbox[request_id] = output
        return output

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with skip_tokenizer_init."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own advice (generation_config.json) where it gives any, else the defaults."""
        return SamplingParams(**self.model.generation_defaults)  # pyright: ignore[reportArgumentType]

    def get_metrics(self) -> dict[str, Any]:
        """The engine's counters, under the names that Prometheus dashboards for vLLM know."""
        return self.engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, with nothing changed, while any block is in use."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Frees weights and pool now; the object can do nothing afterwards."""
        if hasattr(self, "engine"):
            del self.engine, self.model

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_parse(self, prompt: Prompt) -> ParsedPrompt | ValueError:
        try:
            return parse_prompt(prompt, self._tokenizer)
        except ValueError as error:
            return error

    def _try_render(self, messages: Any, options: dict[str, Any]) -> ParsedPrompt | ValueError:
        try:
            return render_prompt(messages, self._tokenizer, **options)
        except ValueError as error:
            return error

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        params = list(params)
        if len(params) != count:
            raise ValueError(
                f"sampling_params has {len(params)} entries for {count} prompts; give one for all, "
                "or one for each"
            )
        return params

    def _next_prefix(self) -> str:
        """Keeps the ids of one call apart from those of another that is not finished."""
        self._num_calls += 1
        return f"{self._num_calls}-" if self.engine.has_unfinished() else ""

    def _step(self, request_ids: set[str]) -> list[RequestOutput]:
        """Runs a step; gives what came for these requests, in this call's steps or others'."""
        for output in self.engine.step():
            self._mailbox[output.request_id] = output
        mine = [request_id for request_id in self._mailbox if request_id in request_ids]
        return [self._mailbox.pop(request_id) for request_id in mine]

    def _drop(self, request_ids: list[str]) -> None:
        """Ends what is left of a call's requests."""
        for request_id in request_ids:
            self.engine.abort(request_id)
            self._mailbox.pop(request_id, None)

    def _add(
        self,
        request_id: str,
        parsed: ParsedPrompt | ValueError,
        params: SamplingParams,
        *,
        stream: bool = False,
    ) -> None:
        if isinstance(parsed, ValueError):
            raise parsed
        self.engine.add_request(
            request_id,
            parsed.token_ids,
            params,
            prompt=parsed.text,
            cache_salt=parsed.cache_salt,
            stream=stream,
        )

    def _run_all(
        self,
        parsed: list[ParsedPrompt | ValueError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        all_params = self._params_for(len(parsed), sampling_params)
        prefix = self._next_prefix()
        ids = [f"{prefix}{i}" for i in range(len(parsed))]
        outputs: dict[str, RequestOutput] = {}
        errors: list[ValueError] = []
        added: list[str] = []
        try:
            for request_id, prompt, params in zip(ids, parsed, all_params, strict=True):
                try:
                    self._add(request_id, prompt, params)
                    added.append(request_id)
                except ValueError as error:
                    errors.append(error)
                    text = None if isinstance(prompt, ValueError) else prompt.text
                    outputs[request_id] = RequestOutput.refused(request_id, str(error), prompt=text)
            if errors and not added:
                raise errors[0]
            if errors:
                logger.warning("%d of %d prompts refused: %s", len(errors), len(ids), errors[0])
            with Progress(len(added), enabled=use_tqdm) as progress:
                pending = set(added)
                while pending:
                    for output in self._step(pending):
                        pending.remove(output.request_id)
                        outputs[output.request_id] = output
                        progress.update(output)
        finally:
            self._drop(added)
        return [outputs[request_id] for request_id in ids]


class Progress:
    """A progress bar over requests, with the speed of tokens in and out so far."""

    def __init__(self, total: int, *, enabled: bool):
        self._bar = tqdm(
            total=total, desc="Processed prompts", dynamic_ncols=True, disable=not enabled
        )
        self._num_input = self._num_output = 0

    def update(self, output: RequestOutput) -> None:
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(o.token_ids) for o in output.outputs)
        elapsed = self._bar.format_dict["elapsed"]
        if elapsed:
            self._bar.postfix = (
                f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
                f"output: {self._num_output / elapsed:.2f} toks/s"
            )
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _is_conversation(messages: Any) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping)


def _tokenizer_of(model: LoadedModel) -> Tokenizer:
    source = model.tokenizer_source
    if isinstance(source, GgufSource):
        return Tokenizer.from_gguf(source.metadata)
    return Tokenizer.from_folder(source.path)


def _make_engine(model: LoadedModel, tokenizer: Tokenizer | None, config: EngineConfig) -> Engine:
    device = jax.devices()[0]
    dtype = jnp.dtype(model.dtype)
    scheduler_config, buckets = resolve(
        config, model.config, model.params, dtype=dtype, device=device
    )
    pool = KVPool.create(
        model.config,
        num_blocks=scheduler_config.num_blocks,
        block_size=scheduler_config.block_size,
        dtype=dtype,
    )
    runner = StepRunner(
        model.params,
        pool,
        config=model.config,
        buckets=buckets,
        attention_implementation=config.attention_implementation,
    )
    if config.warmup:
        runner.warm_up()
    return Engine(
        runner,
        scheduler_config,
        buckets,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer=tokenizer,
        seed=config.seed,
        log_stats=not config.disable_log_stats,
    )
