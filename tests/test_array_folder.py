"""Folders of arrays: slices, dtypes, and that nothing damaged or unfinished is taken for whole."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib

import ml_dtypes
import numpy as np
import pytest

from paged_jax import array_folder, array_folder_writer
from paged_jax.array_folder import ArrayFolder, ArrayFolderError
from paged_jax.array_folder_writer import ArrayFolderWriter

KIND = "test folder"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(array_folder_writer, "_CHUNK_BYTES", 1024)
    monkeypatch.setattr(array_folder_writer, "_GROUP_BYTES", 8192)


def make_arrays():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((64, 32)).astype(np.float32),
        "b.weight": rng.standard_normal((48, 40)).astype(ml_dtypes.bfloat16),
        "b.norm": rng.standard_normal(24).astype(np.float32),
        "prime": rng.standard_normal((331, 3)).astype(np.float32),
        "c.bits": rng.integers(0, 2**16, (3, 4, 5)).astype(np.uint16),
        "c.int8": rng.integers(-127, 127, (2, 8, 16, 20)).astype(np.int8),
    }


@pytest.fixture
def arrays():
    return make_arrays()


@pytest.fixture
def folder(tmp_path, arrays):
    path = tmp_path / "folder"
    with ArrayFolderWriter(path, KIND) as writer:
        for name, values in arrays.items():
            writer.add(name, values)
        writer.commit({"note": [1, "two"]})
    return path


def data_file(folder, name, file):
    [path] = folder.glob(f"arrays/*/{name}/{file}")
    return path


def test_all_that_was_written_is_read(folder, arrays):
    opened = ArrayFolder(folder, KIND)
    assert opened.content == {"note": [1, "two"]}
    assert set(opened.arrays) == set(arrays)
    assert len(opened.arrays["a.weight"].chunk_grid()) == 8
    assert len(list((folder / "arrays").iterdir())) > 1
    for name, values in arrays.items():
        read = opened.read(name)
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values)
    assert not array_folder.partial_path(folder).exists()


def test_every_slice_equals_numpys(folder, arrays):
    opened = ArrayFolder(folder, KIND)
    rng = np.random.default_rng(1)
    for name, values in arrays.items():
        for _ in range(12):
            ends = [np.sort(rng.integers(0, n + 1, 2)) for n in values.shape]
            index = tuple(slice(int(a), int(b)) for a, b in ends)[: rng.integers(values.ndim + 1)]
            np.testing.assert_array_equal(opened.read(name, index=index), values[index])
    whole = (slice(None), slice(8, None))
    np.testing.assert_array_equal(opened.read("a.weight", index=whole), arrays["a.weight"][whole])
    with pytest.raises(ValueError, match=r"'a.weight' of shape \(64, 32\) takes slices of step 1"):
        opened.read("a.weight", index=(slice(0, 9, 2),))


def test_dtypes_of_a_kind_are_converted_and_others_refused(folder, arrays):
    opened = ArrayFolder(folder, KIND)
    index = (slice(3, 30), slice(1, 9))
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        read = opened.read("b.weight", np.dtype(dtype), index)
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, arrays["b.weight"][index].astype(dtype))
    with pytest.raises(ArrayFolderError, match=r"'c.int8' is stored as int8 and was asked for as"):
        opened.read("c.int8", np.dtype(np.float32))
    with pytest.raises(ArrayFolderError, match=r"'a.weight' is stored as float32 and was asked fo"):
        opened.read("a.weight", np.dtype(np.int8))
    with pytest.raises(ArrayFolderError, match=r"no array 'd': it holds a.weight, .* and 2 more"):
        opened.read("d")


def test_orbax_itself_restores_each_group(folder, arrays):
    import orbax.checkpoint as ocp

    restored = {}
    for group in sorted((folder / "arrays").iterdir()):
        restored |= ocp.PyTreeCheckpointer().restore(group)
    assert set(restored) == set(arrays)
    for name, values in arrays.items():
        np.testing.assert_array_equal(np.asarray(restored[name]), values)


def test_a_slice_reads_its_own_chunks_only(folder, arrays):
    opened = ArrayFolder(folder, KIND)
    assert opened.arrays["a.weight"].chunk_shape == (16, 16)
    path = data_file(folder, "a.weight", "1.0")
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    opened = ArrayFolder(folder, KIND)  # One bit is not seen by its size.
    for index in ((slice(0, 16),), (slice(32, 64),), (slice(0, 64), slice(16, 32))):
        np.testing.assert_array_equal(
            opened.read("a.weight", index=index), arrays["a.weight"][index]
        )
    with pytest.raises(
        ArrayFolderError, match=r"damaged.*'a.weight'.*1\.0 is not what was written; write or copy"
    ):
        opened.read("a.weight", index=(slice(15, 17), slice(0, 1)))


def test_a_truncated_and_a_missing_file_are_refused_at_once(folder):
    path = data_file(folder, "b.weight", "1.0")
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(
        ArrayFolderError,
        match=rf"damaged.*'b.weight'.*1\.0 has {len(content) - 10} bytes, and {len(content)} were",
    ):
        ArrayFolder(folder, KIND)
    path.unlink()
    with pytest.raises(ArrayFolderError, match=r"array 'b.weight': .*1\.0 is missing"):
        ArrayFolder(folder, KIND)


def test_a_file_lost_after_opening_is_an_error_and_no_zeros(folder):
    opened = ArrayFolder(folder, KIND)
    data_file(folder, "b.weight", "1.0").unlink()
    with pytest.raises(ArrayFolderError, match=r"array 'b.weight' cannot be read"):
        opened.read("b.weight")


def test_what_is_no_whole_folder_is_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no {KIND} at .*nothing"):
        ArrayFolder(tmp_path / "nothing", KIND)
    with pytest.raises(ArrayFolderError, match=f"is a {KIND}: give the path of a model"):
        ArrayFolder(folder, "model")
    manifest = folder / array_folder.MANIFEST_FILE
    content = manifest.read_text()
    manifest.write_text(content.replace('"version": 1', '"version": 9'))
    with pytest.raises(ArrayFolderError, match="of version 9, and this package reads version 1"):
        ArrayFolder(folder, KIND)
    manifest.write_text(content[:200])
    with pytest.raises(ArrayFolderError, match=r"paged_jax.json is not valid JSON"):
        ArrayFolder(folder, KIND)
    fields = json.loads(content)
    del fields["arrays"]["a.weight"]["crc32"]
    manifest.write_text(json.dumps(fields))
    with pytest.raises(ArrayFolderError, match="lacks or garbles 'crc32'"):
        ArrayFolder(folder, KIND)
    manifest.unlink()
    with pytest.raises(ArrayFolderError, match=r"has no paged_jax.json, which is written last"):
        ArrayFolder(folder, KIND)


def test_bad_names_empty_arrays_and_taken_paths_are_refused(folder, tmp_path):
    with pytest.raises(FileExistsError, match="exists: delete it, or give another path"):
        ArrayFolderWriter(folder, KIND)
    with ArrayFolderWriter(tmp_path / "b", KIND) as writer:
        writer.add("x", np.zeros(3))
        with pytest.raises(ValueError, match="'x' was added before"):
            writer.add("x", np.zeros(3))
        with pytest.raises(ValueError, match="'y/z': a name is that of a folder"):
            writer.add("y/z", np.zeros(3))
        with pytest.raises(ValueError, match="'y' is empty"):
            writer.add("y", np.zeros((0, 3)))


def test_only_a_folder_of_the_same_kind_is_replaced(folder, tmp_path):
    with ArrayFolderWriter(folder, KIND, overwrite=True) as writer:
        writer.add("x", np.ones(3))
        assert "a.weight" in ArrayFolder(folder, KIND).arrays  # Until the new one is whole.
        writer.commit({})
    assert list(ArrayFolder(folder, KIND).arrays) == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(FileExistsError, match="folder exists: delete it, or give another path"):
        ArrayFolderWriter(folder, "another kind", overwrite=True)
    assert list(ArrayFolder(folder, KIND).arrays) == ["x"]
    mine = tmp_path / "b.partial"
    mine.mkdir()
    with pytest.raises(FileExistsError, match=r"b\.partial is in the way: delete it, or give"):
        ArrayFolderWriter(tmp_path / "b", KIND)


def test_an_error_while_writing_leaves_nothing(tmp_path):
    path = tmp_path / "folder"
    with pytest.raises(RuntimeError, match="disk"):
        with ArrayFolderWriter(path, KIND) as writer:
            writer.add("x", np.zeros((64, 64)))
            raise RuntimeError("disk")
    assert list(tmp_path.iterdir()) == []


WRITE_FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import test_array_folder as t
from paged_jax import array_folder_writer as w
w._CHUNK_BYTES, w._GROUP_BYTES = 1024, 8192
arrays = t.make_arrays()
for i in range(10**6):
    with t.ArrayFolderWriter(f"{sys.argv[2]}/{i:06}", t.KIND) as writer:
        for name, values in arrays.items():
            writer.add(name, values)
            print("at", name, flush=True)
        writer.commit({"i": i})
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_leaves_whole_folders_and_one_that_is_refused(tmp_path, arrays, seed):
    tests = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, "-c", WRITE_FOREVER, tests, str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    rng = np.random.default_rng(seed)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        for _ in range(rng.integers(1, 3 * len(arrays))):  # In the first folder, or one of three.
            assert child.stdout.readline()
        time.sleep(float(rng.uniform(0.0, 0.01)))
        child.send_signal(signal.SIGKILL)
        child.stdout.read()
    found = list(tmp_path.iterdir())
    assert found
    for path in found:
        if path.name.endswith(".partial"):
            check_refused_and_replaced(path)
        else:
            opened = ArrayFolder(path, KIND)
            for name, values in arrays.items():
                np.testing.assert_array_equal(opened.read(name), values)


def check_refused_and_replaced(partial):
    path = partial.with_name(partial.name.removesuffix(".partial"))
    with pytest.raises(ArrayFolderError, match="was never finished: writing stopped half-way"):
        ArrayFolder(path, KIND)
    if not (partial / array_folder.MANIFEST_FILE).exists():  # Else it lacked nothing but its name.
        with pytest.raises(ArrayFolderError, match="is no whole test folder"):
            ArrayFolder(partial, KIND)
    with ArrayFolderWriter(path, KIND) as writer:  # The next attempt clears it away.
        writer.add("x", np.ones(3))
        writer.commit({})
    assert ArrayFolder(path, KIND).read("x").sum() == 3
    assert not partial.exists()


def test_checksums_are_zlibs(folder, arrays):
    [crc32] = ArrayFolder(folder, KIND).arrays["b.norm"].crc32
    assert crc32 == zlib.crc32(arrays["b.norm"].tobytes())
