"""Engines in the actors of Ray Data, on a cluster of two nodes; skipped where Ray is missing."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from model_files import tiny_config, write_byte_folder
from tiny_engine import VOCAB_SIZE

from paged_jax import LLM, SamplingParams, ray_data
from paged_jax.ray_data import RowServer, build_processor

ROOT = Path(__file__).parent.parent
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    max_num_seqs=2,
    max_num_batched_tokens=32,
    max_model_len=64,
    block_size=4,
    num_gpu_blocks_override=60,
    warmup=False,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = tiny_config(vocab_size=VOCAB_SIZE, num_layers=1)
    write_byte_folder(folder, config)
    return folder


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU and one place for an engine each."""
    ray = pytest.importorskip("ray", reason='needs pip install "paged-jax[ray]"')
    pytest.importorskip("ray.data", reason='needs pip install "paged-jax[ray]"')
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    os.environ["JAX_PLATFORMS"] = jax.default_backend()  # Workers inherit it.
    paths = [str(ROOT), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    node = dict(num_cpus=1, resources={"engine": 1}, object_store_memory=100 * 2**20)
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield ray
    ray.shutdown()
    cluster.shutdown()


def rows_of(count):
    rows = []
    for i in range(count):
        own = {"max_tokens": 3 if i % 5 == 1 else None, "temperature": None}
        rows.append({"name": f"r{i}", "prompt": "abcdef"[: i % 6 + 1], "sampling_params": own})
    rows[3]["prompt"] = "x" * 100  # Too long.
    rows[4]["sampling_params"] = {"max_tokens": None, "temperature": -1.0}
    rows[6]["prompt"] = None
    return rows


@pytest.fixture(scope="module")
def expected(folder):
    """What one engine gives, without Ray Data, row by row."""
    llm = LLM(str(folder), **OPTIONS)
    texts = {}
    for i, row in enumerate(rows_of(40)):
        if i in (3, 4, 6):
            continue
        num_tokens = row["sampling_params"]["max_tokens"] or 6
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        [output] = llm.generate(row["prompt"], params, use_tqdm=False)
        texts[row["name"]] = (output.outputs[0].text, num_tokens, len(row["prompt"]))
    return texts


def test_two_nodes_serve_a_dataset(cluster, folder, expected, monkeypatch):
    class Placed(RowServer):
        def __call__(self, table):
            import pyarrow as pa  # pyright: ignore[reportMissingImports]

            node = cluster.get_runtime_context().get_node_id()
            served = super().__call__(table)
            return served.append_column("node", pa.array([node] * len(served)))

    monkeypatch.setattr(ray_data, "RowServer", Placed)
    processor = build_processor(
        folder,
        engine_options=OPTIONS,
        sampling_params=PARAMS,
        batch_size=4,
        concurrency=2,
        num_cpus=0,
        resources={"engine": 1},
    )
    dataset = cluster.data.from_items(rows_of(40), override_num_blocks=10)
    rows = {row["name"]: row for row in processor(dataset).take_all()}
    assert rows.keys() == {f"r{i}" for i in range(40)}
    assert len({row["node"] for row in rows.values()}) == 2
    for name, (text, num_tokens, num_prompt) in expected.items():
        row = rows[name]
        assert (row["generated_text"], row["num_output_tokens"]) == (text, num_tokens)
        assert (row["num_prompt_tokens"], row["finish_reason"]) == (num_prompt, "length")
        assert row["error"] is None
    for name, message in [
        ("r3", "max_model_len=64"),
        ("r4", "temperature=-1.0"),
        ("r6", "prompt=None: it must be text, messages or token ids"),
    ]:
        assert message in rows[name]["error"]
        assert (rows[name]["finish_reason"], rows[name]["generated_text"]) == ("error", None)


def test_every_form_of_a_prompt(folder):
    pa = pytest.importorskip("pyarrow", reason='needs pip install "paged-jax[ray]"')
    server = RowServer(
        str(folder),
        engine_options={**OPTIONS},
        sampling_params=PARAMS,
        prompt_column="ask",
        chat=False,
    )
    text = server(pa.table({"ask": ["abc", ""]}))
    tokenizer = server.tokenizer
    assert tokenizer is not None
    by_ids = server(pa.table({"ask": [tokenizer.encode("abc"), [1, 5000]]}))
    assert text["generated_text"][0] == by_ids["generated_text"][0]
    assert text["error"][0].as_py() is None and text["error"][1].as_py()
    assert "5000" in by_ids["error"][1].as_py()
    messages = pa.table({"ask": [[{"role": "user", "content": "hi", "name": None}]]})
    assert "chat template" in server(messages)["error"][0].as_py()
    with pytest.raises(ValueError, match=r"prompt_column='ask', and the rows have \['prompt'\]"):
        server(pa.table({"prompt": ["abc"]}))
    with pytest.raises(ValueError, match=r"the rows have \['error'\] already"):
        server(pa.table({"ask": ["abc"], "error": [""]}))


def test_what_cannot_be_is_refused_before_anything_starts():
    pytest.importorskip("ray.data", reason='needs pip install "paged-jax[ray]"')
    with pytest.raises(ValueError, match=r"engine_options has \['seats'\]"):
        build_processor("model", engine_options={"seats": 3})
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        build_processor("model", engine_options={"max_num_seqs": 0})
    with pytest.raises(ValueError, match="n=2: rows have one text each"):
        build_processor("model", sampling_params=SamplingParams(n=2))
    with pytest.raises(ValueError, match="batch_size=0"):
        build_processor("model", batch_size=0)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ImportError, match=r'pip install "paged-jax\[ray\]"'):
        build_processor("model")
