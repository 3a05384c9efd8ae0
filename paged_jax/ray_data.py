"""Batches over many machines by Ray Data: a dataset of prompts in, the same rows with answers out.

    processor = build_processor("org/model", sampling_params=SamplingParams(max_tokens=128),
                                concurrency=8, num_gpus=1)
    answers = processor(ray.data.read_json("prompts/"))
    answers.write_parquet("answers/")

Each of `concurrency` actors holds an engine of its own, on the devices that Ray gives it; Ray Data
reads, hands out batches, starts actors anew where machines are lost, and writes. Nothing is shared
between engines, so this is for models that fit one host; a model over several hosts is `multihost`.

Needs the extra `ray`: pip install "paged-jax[ray]".
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paged_jax.config import EngineConfig
from paged_jax.llm import LLM
from paged_jax.offline import Line, serve_lines
from paged_jax.sampling_params import SamplingParams
from paged_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ray.data import Dataset  # pyright: ignore[reportMissingImports]

PARAMS_COLUMN = "sampling_params"
OUTPUT_COLUMNS = (
    "generated_text",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "error",
)


def build_processor(
    model: str | os.PathLike[str],
    *,
    engine_options: Mapping[str, Any] | None = None,
    sampling_params: SamplingParams | None = None,
    prompt_column: str = "prompt",
    chat: bool = False,
    batch_size: int = 256,
    concurrency: int | tuple[int, int] = 1,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    **map_options: Any,
) -> Callable[[Dataset], Dataset]:
    """A function from a dataset of prompts to the dataset of its answers, computed as it is read.

    Args:
      model: a path that every node has, or a hub id; see `LLM`.
      engine_options: keyword arguments of `LLM`, such as fields of `EngineConfig`.
      sampling_params: of all rows; None takes the model's own. A column "sampling_params" of
        objects, where there is one, sets fields of single rows; what is null in it stays. Rows
        without a seed sample what their engine draws, which differs from run to run: give `seed`.
      prompt_column: text, messages ({"role": ..., "content": ...}) or token ids.
      chat: send text through the model's chat template as a user's message (messages always are).
      batch_size: rows that an engine gets at once. It should be several times max_num_seqs, since
        seats stand empty at each batch's end.
      concurrency: engines, or the fewest and most of them.
      num_cpus, num_gpus, resources: what an engine takes of its node, such as {"TPU": 4}.
      **map_options: further ones of `Dataset.map_batches`.

    Returns:
      dataset -> dataset. Rows keep their columns, and get generated_text, finish_reason,
      num_prompt_tokens, num_output_tokens and error. A row that cannot be served has the
      finish_reason "error", no text, and says why in `error`, which is null otherwise; it costs the
      others nothing.

    Raises:
      ImportError: the extra is not installed.
      ValueError: an option is unknown or out of range, or sampling_params ask for several outputs
        or logprobs.
    """
    try:
        import ray.data  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError('Ray Data is not installed: pip install "paged-jax[ray]"') from error
    options = dict(engine_options or {})
    _check_options(options)
    if sampling_params is not None:
        _check_params(sampling_params)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: it must be at least 1")
    given = dict(num_cpus=num_cpus, num_gpus=num_gpus, resources=resources and dict(resources))
    map_options |= {name: value for name, value in given.items() if value is not None}

    def process(dataset: Dataset) -> Dataset:
        return dataset.map_batches(
            RowServer,
            fn_constructor_kwargs=dict(
                model=os.fspath(model),
                engine_options=options,
                sampling_params=sampling_params,
                prompt_column=prompt_column,
                chat=chat,
            ),
            batch_size=batch_size,
            batch_format="pyarrow",
            concurrency=concurrency,
            **map_options,
        )

    return process


class RowServer:
    """An engine for `Dataset.map_batches` with batch_format="pyarrow"; see `build_processor`."""

    def __init__(
        self,
        model: str,
        *,
        engine_options: Mapping[str, Any],
        sampling_params: SamplingParams | None,
        prompt_column: str,
        chat: bool,
    ):
        self._llm = LLM(model, **engine_options)
        self._defaults = sampling_params or self._llm.get_default_sampling_params()
        self._prompt_column = prompt_column
        self._chat = chat

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's, None if it has none."""
        return self._llm.get_tokenizer()

    def __call__(self, table: Any) -> Any:
        """Serves a `pyarrow.Table`, and appends `OUTPUT_COLUMNS` to it.

        Raises:
          ValueError: the table has no column of prompts, or has one of the output's.
        """
        import pyarrow as pa  # pyright: ignore[reportMissingImports]

        names = table.column_names
        if self._prompt_column not in names:
            raise ValueError(f"prompt_column={self._prompt_column!r}, and the rows have {names}")
        if taken := sorted(set(names).intersection(OUTPUT_COLUMNS)):
            raise ValueError(f"the rows have {taken} already; rename or drop these columns")
        prompts = table[self._prompt_column].to_pylist()
        own = table[PARAMS_COLUMN].to_pylist() if PARAMS_COLUMN in names else [None] * len(prompts)
        lines = [
            self._line(i, prompt, params)
            for i, (prompt, params) in enumerate(zip(prompts, own, strict=True))
        ]
        results: list[dict[str, Any]] = [{}] * len(lines)

        def take(row: dict[str, Any]) -> None:
            results[row["index"]] = row

        serve_lines(self._llm, lines, take, chat=self._chat)
        text, count = pa.string(), pa.int64()
        columns = [
            (text, [None if r["error"] else r["text"] for r in results]),
            (text, [r["finish_reason"] for r in results]),
            (count, [r["num_prompt_tokens"] for r in results]),
            (count, [r["num_output_tokens"] for r in results]),
            (text, [r["error"] for r in results]),
        ]
        for name, (kind, values) in zip(OUTPUT_COLUMNS, columns, strict=True):
            table = table.append_column(name, pa.array(values, kind))
        return table

    def _line(self, index: int, prompt: Any, own: Any) -> Line:
        """A row as a line of `serve_lines`."""
        try:
            if not isinstance(prompt, (str, list)):
                raise ValueError(
                    f"{self._prompt_column}={prompt!r}: it must be text, messages or token ids"
                )
            params = self._defaults
            if own:
                fields = {name: value for name, value in own.items() if value is not None}
                params = _check_params(dataclasses.replace(params, **fields))
        except (ValueError, TypeError, AttributeError) as error:
            return Line(index=index, number=index + 1, error=str(error))
        return Line(index=index, number=index + 1, prompt=_without_nulls(prompt), params=params)


def _without_nulls(prompt: Any) -> Any:
    """Messages with the fields that were set: Arrow gives each those of all, and nulls."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return [
            {name: value for name, value in part.items() if value is not None}
            if isinstance(part, Mapping)
            else part
            for part in prompt
        ]
    return prompt


def _check_params(params: SamplingParams) -> SamplingParams:
    for name, plain in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
        if getattr(params, name) != plain:
            raise ValueError(
                f"{name}={getattr(params, name)}: rows have one text each and no logprobs; leave "
                f"{name} out"
            )
    return params


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuses here what `LLM` would refuse in every actor."""
    own = {name: v for name, v in options.items() if name in EngineConfig.__dataclass_fields__}
    unknown = sorted(set(options) - set(own) - {"tokenizer", "skip_tokenizer_init"})
    if unknown:
        raise ValueError(
            f"engine_options has {unknown}, which LLM does not take; see help(paged_jax.LLM)"
        )
    EngineConfig(**own)
