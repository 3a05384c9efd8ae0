"""Which module decodes which architecture. A new family is one file and one line here.

A family's module offers `HF_ARCHITECTURE`, `param_specs`, `forward` and `logits`, with the
signatures of llama.py.
"""

from types import ModuleType

from paged_jax.models import llama
from paged_jax.models.config import ModelConfig

# Keys are ModelConfig.architecture and a GGUF file's general.architecture.
MODELS: dict[str, ModuleType] = {
    "llama": llama,
}


def model_module(config: ModelConfig) -> ModuleType:
    """The module with param_specs, forward and logits for config.architecture.

    Raises: ValueError naming the architecture when none is registered for it.
    """
    if config.architecture not in MODELS:
        raise ValueError(
            f"architecture={config.architecture!r} is not supported: use one of {sorted(MODELS)}"
        )
    return MODELS[config.architecture]
