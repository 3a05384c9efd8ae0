"""Where the project keeps what it can make again: downloads and compiled programs."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """$PAGED_JAX_CACHE, or paged-jax in the user's cache folder; it need not exist yet."""
    if own := os.environ.get("PAGED_JAX_CACHE"):
        return pathlib.Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(shared).expanduser() / "paged-jax"
    return pathlib.Path.home() / ".cache" / "paged-jax"
