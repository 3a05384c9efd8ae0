"""The project's logger: lines on standard error, unless the program has its own handlers."""

import logging
import os

logger = logging.getLogger("paged_jax")


def _set_up() -> None:
    level = os.environ.get("PAGED_JAX_LOG_LEVEL", "INFO").upper()
    logger.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s paged_jax: %(message)s"))
    # A program that has set up logging gets our records through the root logger, once.
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger.addHandler(handler)


_set_up()
