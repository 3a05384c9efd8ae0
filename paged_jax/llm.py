"""`LLM`: a model in a notebook or a script, with the names that vLLM's users know."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from paged_jax.assembly import choose_mesh, make_engine
from paged_jax.beam_driver import BeamSearchOutput, run_beam_search
from paged_jax.beam_search import BeamSearchParams
from paged_jax.cache_tools import CacheTools
from paged_jax.calls import Calls
from paged_jax.compile import enable_persistent_cache
from paged_jax.config import EngineConfig
from paged_jax.models.loader import LoadedModel, load_model, spread_model
from paged_jax.outputs import RequestOutput
from paged_jax.process_memory import release_unused
from paged_jax.prompts import (
    ParsedPrompt,
    Prompt,
    as_prompt_list,
    parse_prompt,
    render_prompt,
)
from paged_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from paged_jax.session import SequenceStore, Session
from paged_jax.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels import IMPLEMENTATIONS

Messages = Sequence[Mapping[str, Any]]


class LLM(CacheTools):
    """A language model and its paged KV cache.

    Args:
      model: a .gguf file, a Hugging Face folder, a hub id ("org/name"), one file of a hub
        repository ("org/name:file.gguf"), an orbax checkpoint of
        scripts/convert_checkpoint.py, or a `LoadedModel`.
      tokenizer: a tokenizer of your own (an AutoTokenizer, a `tokenizers.Tokenizer`) or a folder
        that holds one; None takes the model's.
      skip_tokenizer_init: serve token ids only; texts come back empty.
      mesh: devices of your choice, with the axes "data" and "tensor"; None takes
        data_parallel_size x tensor_parallel_size of them.
      **options: fields of `EngineConfig`: dtype, quantization, kv_cache_dtype, seed,
        gpu_memory_utilization, kv_cache_memory_bytes, max_model_len, max_num_seqs,
        max_num_batched_tokens, block_size, enable_prefix_caching, num_gpu_blocks_override,
        scheduling_policy, preemption_mode, swap_space_bytes, disable_log_stats, warmup and others;
        what each means and takes by default stands in `help(paged_jax.EngineConfig)`.

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
        mesh: jax.sharding.Mesh | None = None,
        **options: Any,
    ):
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"unknown option {unknown[0]!r}; LLM takes model, tokenizer, skip_tokenizer_init, "
                "mesh, "
                f"{', '.join(EngineConfig.__dataclass_fields__)}"
            )
        if skip_tokenizer_init and tokenizer is not None:
            raise ValueError("skip_tokenizer_init=True and a tokenizer were given; give one")
        self.config = EngineConfig(**options)
        implementation = self.config.attention_implementation
        if implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"attention_implementation={implementation!r}: it must be None or one of "
                f"{list(IMPLEMENTATIONS)}"
            )
        enable_persistent_cache()
        mesh = choose_mesh(self.config, mesh)
        if not isinstance(model, LoadedModel):
            model = load_model(
                model,
                dtype=self.config.dtype,
                quantization=self.config.quantization,  # pyright: ignore[reportArgumentType]
                mesh=mesh,
            )
        elif self.config.dtype not in ("auto", model.dtype):
            raise ValueError(
                f"dtype={self.config.dtype!r}, and the model was loaded as {model.dtype}; leave "
                "dtype at 'auto', or load the model in the dtype you want"
            )
        elif self.config.quantization not in (None, model.quantization):
            raise ValueError(
                f"quantization={self.config.quantization!r}, and the model was loaded with "
                f"quantization={model.quantization!r}; leave it out, or load the model so"
            )
        if mesh is not None and mesh != model.mesh:
            model = spread_model(model, mesh)
        release_unused()  # What loading left, before the pool takes as much again.
        self.model = model
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            self._tokenizer = (
                model.load_tokenizer() if tokenizer is None else load_tokenizer(tokenizer)
            )
        self.engine = make_engine(model, self._tokenizer, self.config)
        self._calls = Calls(self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, many at once.

        Args:
          prompts: a string, a list of token ids, a dict with "prompt" or "prompt_token_ids" (and
            "cache_salt"; of both, the ids are used), or a list of these.
          sampling_params: one for all, or one for each prompt; None takes
            `get_default_sampling_params()`. They are not changed.
          use_tqdm: show a progress bar.
          priority: with scheduling_policy="priority": one for all or one for each prompt, a smaller
            one is served first, and preempted last.

        Returns:
          One output a prompt, in the order of the prompts. A prompt that cannot be served costs the
          others nothing: its output has finish reason "error", and `error` says why.

        Raises:
          ValueError: sampling_params are not as many as prompts; or not one of the prompts can be
            served (the error is that of the first).
        """
        parsed = self._parse_all(prompts)
        all_params = self._params_for(len(parsed), sampling_params)
        priorities = _priorities_for(len(parsed), priority)
        return self._calls.run(parsed, all_params, use_tqdm=use_tqdm, priorities=priorities)

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
        parsed = self._render_all(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        all_params = self._params_for(len(parsed), sampling_params)
        return self._calls.run(parsed, all_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes prompts, and yields each one's output so far whenever it has grown.

        Outputs are whole, not differences: text and token_ids begin at the beginning, and `text`
        only ever grows. `prompt_index` is the prompt's place in the call; `finished` marks the last
        output of each. A prompt that cannot be served yields one finished output with its `error`.

        Requests are queued when the loop begins. Leaving it early (break, an exception) aborts what
        is left; `abort(output.request_id)` ends one request from within the loop. Other calls of
        the engine may be made from within it, too.

        Raises:
          ValueError: as `generate`; at once for sampling_params, when the loop begins for prompts.
        """
        parsed = self._parse_all(prompts)
        return self._calls.stream(parsed, self._params_for(len(parsed), sampling_params))

    def stream_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> Iterator[RequestOutput]:
        """As `stream`, of conversations; template_options are those of `chat`."""
        parsed = self._render_all(messages, **template_options)
        return self._calls.stream(parsed, self._params_for(len(parsed), sampling_params))

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends an unfinished request at once; its output so far, or None if there is none such.

        The loop that waits for the request gets the same output.
        """
        return self._calls.abort(request_id)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with skip_tokenizer_init."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own advice (generation_config.json) where it gives any, else the defaults."""
        return SamplingParams(**self.model.generation_defaults)  # pyright: ignore[reportArgumentType]

    def start(self, prompt: Prompt) -> Session:
        """Begins a sequence to fork, extend, score and continue; all but its last token is
        computed now.

        Raises:
          ValueError: the prompt cannot be served.
        """
        store = SequenceStore(self._calls)
        session = Session(
            store, store.start(parse_prompt(prompt, self._tokenizer)), self._tokenizer
        )
        session.compute()
        return session

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """Finds likely completions of each prompt, by beam search; beams are forks of sequences.

        Args:
          prompts: as in `generate`.
          params: beam_width and max_tokens, and how hypotheses are scored.

        Returns:
          For each prompt its hypotheses, the best first.

        Raises:
          ValueError: a prompt cannot be served, or beam_width is too large.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={params!r}: it must be BeamSearchParams")
        store = SequenceStore(self._calls)
        num_eos = 0 if params.ignore_eos else len(self.engine.intake.eos_token_ids)
        if params.beam_width + num_eos > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width={params.beam_width}: with {num_eos} EOS tokens it may be at most "
                f"{MAX_LOGPROBS - num_eos}"
            )
        parsed = [parse_prompt(prompt, self._tokenizer) for prompt in as_prompt_list(prompts)]
        for prompt in parsed:
            self.engine.check_prompt(prompt.token_ids)
        return run_beam_search(store, parsed, params, tokenizer=self._tokenizer)

    def close(self) -> None:
        """Frees weights and pool now; the object can do nothing afterwards."""
        if "engine" in self.__dict__:
            self._calls.close()
            del self.engine, self.model, self._calls

    def __getattr__(self, name: str) -> Any:
        if name in ("engine", "model", "_calls"):
            raise RuntimeError("this LLM is closed; make a new one")
        raise AttributeError(f"LLM has no attribute {name!r}")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parse_all(self, prompts: Prompt | Sequence[Prompt]) -> list[ParsedPrompt | ValueError]:
        def try_parse(prompt: Prompt) -> ParsedPrompt | ValueError:
            try:
                return parse_prompt(prompt, self._tokenizer)
            except ValueError as error:
                return error

        return [try_parse(prompt) for prompt in as_prompt_list(prompts)]

    def _render_all(self, messages: Any, **options: Any) -> list[ParsedPrompt | ValueError]:
        extra = options.pop("chat_template_kwargs", None) or {}
        if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
            raise ValueError(f"chat_template_kwargs={extra!r}: it must be a dict of variables")
        taken = sorted({"messages", *options} & extra.keys())
        if taken:
            raise ValueError(
                f"chat_template_kwargs sets {taken}, which have arguments of their own"
            )

        def try_render(conversation: Any) -> ParsedPrompt | ValueError:
            try:
                return render_prompt(conversation, self._tokenizer, {**options, **extra})
            except ValueError as error:
                return error

        return [try_render(conversation) for conversation in _as_conversations(messages)]

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        entries: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
        for entry in entries:
            if not isinstance(entry, SamplingParams):
                raise ValueError(
                    f"sampling_params={entry!r} is of type {type(entry).__name__}; it must be a "
                    "SamplingParams, or a list of them"
                )
        if len(entries) != count:
            raise ValueError(
                f"sampling_params has {len(entries)} entries for {count} prompts; give one for "
                "all, or one for each"
            )
        return entries


def _priorities_for(count: int, priority: int | Sequence[int] | None) -> list[int]:
    if priority is None:
        return [0] * count
    entries: list[Any] = (
        list(priority) if isinstance(priority, (list, tuple)) else [priority] * count
    )
    if len(entries) != count:
        raise ValueError(
            f"priority has {len(entries)} entries for {count} prompts; give one for all, or one "
            "for each"
        )
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise ValueError(f"priority={entry!r}: it must be an integer, smaller is served first")
    return entries


def _as_conversations(messages: Any) -> list[Any]:
    """A list of conversations, of one or of several; what they hold is checked when rendered."""
    if messages is None or isinstance(messages, (str, bytes)) or not hasattr(messages, "__iter__"):
        raise ValueError(
            f"messages={messages!r}: it must be a list of {{'role': ..., 'content': ...}}, or a "
            "list of such lists"
        )
    if isinstance(messages, Mapping):
        return [messages]
    messages = list(messages)
    return [messages] if messages and isinstance(messages[0], Mapping) else messages
