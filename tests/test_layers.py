"""The architecture, held to: imports point to earlier layers only, and files stay readable."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# A module may import modules of earlier lines and of its own line; see docs/design.md.
LAYERS = [
    "pallas_kernels",
    "paged_jax.log paged_jax.paths paged_jax.process_memory paged_jax.interrupts "
    "paged_jax.watchman paged_jax.process_watch "
    "paged_jax.sampling_params paged_jax.config",
    "paged_jax.block_moves paged_jax.block_stats paged_jax.prefix_cache paged_jax.kv_events "
    "paged_jax.prefix_journal paged_jax.prefix_watch paged_jax.rates paged_jax.block_pool "
    "paged_jax.prompt_lookup",
    "paged_jax.request paged_jax.drafter paged_jax.prefix_pins paged_jax.host_tier "
    "paged_jax.cache_listeners paged_jax.block_manager paged_jax.preemption "
    "paged_jax.waiting paged_jax.scheduled_step paged_jax.lookahead paged_jax.scheduler "
    "paged_jax.placement "
    "paged_jax.pool_snapshot paged_jax.pool_picture paged_jax.memory_report",
    "paged_jax.chat paged_jax.tokenizer_gguf paged_jax.tokenizer paged_jax.detokenizer "
    "paged_jax.demo_model paged_jax.prompts paged_jax.beam_search paged_jax.beam_driver "
    "paged_jax.simulate",
    "paged_jax.bisection paged_jax.sampling paged_jax.batch paged_jax.decode_rows "
    "paged_jax.step_programs paged_jax.batch_builder "
    "paged_jax.kv_pool paged_jax.block_mover paged_jax.array_folder "
    "paged_jax.array_folder_writer",
    "paged_jax.models",
    "paged_jax.attend paged_jax.step paged_jax.sharding paged_jax.decode_loop paged_jax.compile "
    "paged_jax.dispatch "
    "paged_jax.sizing paged_jax.prefix_snapshot paged_jax.kv_calibration",
    "paged_jax.outputs paged_jax.metrics paged_jax.sequence paged_jax.accounts",
    "paged_jax.intake paged_jax.engine paged_jax.data_parallel paged_jax.assembly "
    "paged_jax.calls paged_jax.session paged_jax.prometheus "
    "paged_jax.cache_tools paged_jax.llm",
    "paged_jax.gpu_targets paged_jax.hardware paged_jax.plan paged_jax.report "
    "paged_jax.offline paged_jax.demo "
    "paged_jax.cli paged_jax.multihost paged_jax.ray_data",
]
HOST_LAYERS = range(1, 5)


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "models":
        return "paged_jax.models"
    return parts[0] if parts[0] == "pallas_kernels" else ".".join(parts)


def layer_of(module: str) -> int:
    for i, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names.split()):
            return i
    raise AssertionError(f"{module} stands in no layer; add it to LAYERS and to docs/design.md")


def imports_of(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            assert node.module is not None
            # `from pallas_kernels import x` may name a module; the package will do.
            found.add(node.module)
    return found


def sources() -> list[pathlib.Path]:
    folders = ("pallas_kernels", "paged_jax", "paged_jax/simulate", "models")
    paths = [p for f in folders for p in sorted((ROOT / f).glob("*.py"))]
    return [p for p in paths if p != ROOT / "paged_jax" / "__init__.py"]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_to_earlier_layers(path):
    layer = layer_of(module_of(path))
    for name in imports_of(path):
        assert not name.startswith("jax._src"), f"{path} imports {name}"
        if name.split(".")[0] in ("pallas_kernels", "paged_jax"):
            assert layer_of(name) <= layer, f"{path} imports {name}, of a later layer"
        if layer in HOST_LAYERS:
            assert name.split(".")[0] not in ("jax", "jaxlib", "flax"), f"{path} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 450, "a file this long has two jobs"
