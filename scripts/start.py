"""The two first commands, on a machine with nothing but Python:

    python3 scripts/start.py demo     answer two dozen prompts with a small model
    python3 scripts/start.py test     run the tests

Each makes its environment below .venv/ when it is first run, from the newest suitable Python that
it finds (newer Pythons get a newer jax, which is faster on CPUs). Further arguments are passed on,
to the demo or to pytest: "demo --help" lists the demo's. This file runs under any Python from 3.8
on and needs no package.
"""

import argparse
import glob
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSIONS = ("3.13", "3.12", "3.11")
EXTRAS = {"demo": "demo", "test": "test"}
IS_WINDOWS = os.name == "nt"


def candidates(version):
    """Commands that may be a Python of this version: on the path, pyenv's, and this very one."""
    yield [sys.executable]
    if IS_WINDOWS:
        yield ["py", "-" + version]
    found = shutil.which("python" + version)
    if found:
        yield [found]
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    folders = sorted(glob.glob(os.path.join(pyenv, "versions", version + ".*")), reverse=True)
    for folder in folders:
        yield [os.path.join(folder, "bin", "python")]


def is_suitable(command, version):
    """Whether a command runs a 64-bit Python of this version that can make environments."""
    program = (
        "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2], sys.maxsize > 2**32)"
    )
    try:
        # A pyenv shim exists for versions that are not active, and fails when it is run.
        done = subprocess.run(
            [*command, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [version, "True"]


def find_python(wanted):
    """The newest suitable Python (or the one of the wanted version): (version, command)."""
    for version in (wanted,) if wanted else VERSIONS:
        for command in candidates(version):
            if is_suitable(command, version):
                return version, command
    return None, None


def make_environment(version, command, extra):
    """An environment with the project installed into it, made anew if pyproject.toml changed."""
    folder = ROOT / ".venv" / version
    python = folder / ("Scripts/python.exe" if IS_WINDOWS else "bin/python")
    stamp = folder / ("installed-" + extra)
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest() + str(ROOT)
    if stamp.exists() and stamp.read_text() == state:
        return python
    where = folder.relative_to(ROOT)
    if python.exists():
        print(f"Installing what is missing in {where}", flush=True)
    else:
        print(f"Making an environment with Python {version} in {where}", flush=True)
        subprocess.check_call([*command, "-m", "venv", "--clear", str(folder)])
        print("Installing paged-jax and what it needs (about 700 MB, a minute or two)", flush=True)
    target = ["--editable", f"{ROOT}[{extra}]"]
    subprocess.check_call(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *target]
    )
    stamp.write_text(state)
    return python


def parse(arguments):
    """What to do, and the arguments that are not this program's: (options, rest)."""
    # Without -h and abbreviations of its own, "demo --help" and pytest's "--py..." pass through.
    parser = argparse.ArgumentParser(
        usage="start.py {demo,test} [--python X.Y] [--which] [further arguments]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=["demo", "test"])
    parser.add_argument("--python", metavar="X.Y", help="the Python version to use")
    parser.add_argument("--which", action="store_true", help="print the version it would use")
    has_command = "demo" in arguments or "test" in arguments
    if not has_command and ("-h" in arguments or "--help" in arguments):
        parser.print_help()
        sys.exit()
    return parser.parse_known_args(arguments)


def main():
    args, rest = parse(sys.argv[1:])
    version, command = find_python(args.python)
    if command is None:
        sys.exit(
            f"No Python {args.python or '3.11 to 3.13'} with venv and pip was found. Install one "
            "(on Debian and Ubuntu the package python3-venv too) and run this again."
        )
    if args.which:
        print(version)
        return
    try:
        python = make_environment(version, command, EXTRAS[args.what])
    except subprocess.CalledProcessError as error:
        sys.exit(f"The environment could not be made: {error}")
    module = {"demo": "paged_jax.demo", "test": "pytest"}[args.what]
    os.chdir(str(ROOT))
    sys.exit(subprocess.call([str(python), "-m", module, *rest]))


if __name__ == "__main__":
    main()
