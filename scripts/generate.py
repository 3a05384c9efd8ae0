"""Answers prompts from a file or standard input: `python scripts/generate.py --help`."""

from paged_jax.cli import generate

if __name__ == "__main__":
    generate()
