"""The programs of scripts/ as modules: several of them in one process."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from absl import flags

SCRIPTS = Path(__file__).parent.parent / "scripts"


def import_script(name: str) -> ModuleType:
    """A module of scripts/, without its flags: those of two programs may have one name."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    known = set(flags.FLAGS)
    module = importlib.import_module(name)
    flags.FLAGS.remove_flag_values(set(flags.FLAGS) - known)
    return module
