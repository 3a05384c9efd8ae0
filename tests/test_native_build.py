"""The C++ kernel's build: found, cached, switched off, broken; and never needed."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from pallas_kernels import native_build
from pallas_kernels.native_build import NativeBuildError, build_library

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is found"
)
SOURCE = 'extern "C" int answer() { return 42; }\n'

# Attends with the default implementation and with the named ones, and tells what was used.
PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels import ragged_paged_attention
rng = np.random.default_rng(0)
arrays = [
    jnp.asarray(rng.standard_normal((4, 4, 16)), jnp.float32),
    jnp.asarray(rng.standard_normal((5, 4, 4, 16)), jnp.float32),
    *(jnp.asarray(a, jnp.int32) for a in ([3, 6], [[1, 0], [2, 3]], [0, 1, 4], 2)),
]
attend = lambda name: jax.jit(
    lambda *arrays: ragged_paged_attention(*arrays, scale=0.25, implementation=name)
)
best = attend(None)
for _ in range(2):
    out = best(*arrays)
np.testing.assert_allclose(out, attend("xla")(*arrays), rtol=1e-5, atol=1e-6)
print("uses", "cpu" if "paged_attention_" in best.lower(*arrays).as_text() else "xla")
try:
    attend("cpu")(*arrays)
except ValueError as error:
    print("refused:", error)
"""


def run_program(program: str = PROGRAM, **environment: str) -> str:
    settings = {k: v for k, v in os.environ.items() if k != "PAGED_JAX_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=settings | {"JAX_PLATFORMS": "cpu"} | environment,
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.delenv("PAGED_JAX_NATIVE", raising=False)
    monkeypatch.setenv("PAGED_JAX_NATIVE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answer.cc"
    path.write_text(SOURCE)
    return path


def counting_compiler(folder: pathlib.Path) -> pathlib.Path:
    """A compiler that notes each compilation in `folder`/calls."""
    script = folder / "counted-c++"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec c++ "$@"\n')
    script.chmod(0o755)
    return script


@needs_compiler
def test_a_library_is_built_once_for_its_source_and_headers(source, tmp_path, monkeypatch) -> None:
    header = tmp_path / "answer.h"
    header.write_text("// one\n")
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))

    def compilations() -> int:
        return (tmp_path / "calls").read_text().count("-shared")

    first = build_library(source, [header])
    assert build_library(source, [header]) == first
    assert compilations() == 1
    header.write_text("// two\n")
    second = build_library(source, [header])
    assert second != first
    assert compilations() == 2
    # Nothing half-built is left behind.
    assert sorted(first.parent.iterdir()) == sorted([first, second])


@needs_compiler
def test_the_key_tells_compilers_arguments_and_jax_apart(source, monkeypatch) -> None:
    libraries = {build_library(source)}
    monkeypatch.setenv("CXX", "c++ -DOTHER")
    libraries.add(build_library(source))
    monkeypatch.setattr("jax.__version__", "0.0.0")
    libraries.add(build_library(source))
    monkeypatch.setattr(native_build, "_machine", lambda: "another")
    libraries.add(build_library(source))
    assert len(libraries) == 4


@needs_compiler
def test_a_failed_build_says_why_and_leaves_nothing(source) -> None:
    source.write_text("#error this cannot be\n")
    with pytest.raises(NativeBuildError, match="this cannot be"):
        build_library(source)
    assert not list(native_build.cache_folder().iterdir())


def test_what_is_missing_is_named(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(NativeBuildError, match="CXX is 'no-such-compiler -O3', which is not"):
        build_library(source)
    monkeypatch.delenv("CXX")
    with monkeypatch.context() as changes:
        changes.setenv("PATH", str(tmp_path))
        with pytest.raises(NativeBuildError, match="no C\\+\\+ compiler is found"):
            build_library(source)
    monkeypatch.setenv("PAGED_JAX_NATIVE", "0")
    with pytest.raises(NativeBuildError, match="PAGED_JAX_NATIVE is 0"):
        build_library(source)


@needs_compiler
def test_a_cache_folder_that_cannot_be_made_is_no_crash(source, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGED_JAX_NATIVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NativeBuildError, match=r"answer\.cc cannot be built"):
        build_library(source)


@needs_compiler
def test_attention_uses_the_kernel_where_there_is_a_compiler() -> None:
    out = run_program()
    assert "uses cpu" in out
    assert "refused" not in out


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (dict(CXX="no-such-compiler"), "CXX is 'no-such-compiler'"),
        (dict(CXX="false"), "false ended with 1"),
        (dict(PAGED_JAX_NATIVE="0"), "PAGED_JAX_NATIVE is 0"),
    ],
)
def test_attention_falls_back_to_xla_and_says_so_once(environment, reason, tmp_path) -> None:
    out = run_program(PAGED_JAX_NATIVE_CACHE=str(tmp_path), **environment)
    assert "uses xla" in out
    assert out.count("attention on CPU runs in XLA") == 1
    assert "refused: implementation 'cpu' cannot run this" in out
    assert out.count(reason) == 2  # once in the log, once in the refusal


@needs_compiler
def test_a_second_process_takes_library_and_program_from_their_caches(tmp_path) -> None:
    program = """
    import jax
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    """
    program = textwrap.dedent(program) + PROGRAM
    program += 'print("hits", events.count("/jax/compilation_cache/cache_hits"))\n'
    program += 'print("misses", events.count("/jax/compilation_cache/cache_misses"))\n'
    settings = dict(
        CXX=str(counting_compiler(tmp_path)),
        PAGED_JAX_NATIVE_CACHE=str(tmp_path / "native"),
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "xla"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    run_program(program, **settings)
    second = run_program(program, **settings)
    assert "uses cpu" in second
    assert "misses 0" in second
    assert (tmp_path / "calls").read_text().count("-shared") == 1
