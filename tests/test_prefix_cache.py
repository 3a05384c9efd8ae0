import subprocess
import sys

import pytest

from paged_jax.prefix_cache import PrefixCache, hash_block


def test_hash_depends_on_tokens_parent_and_extra_keys():
    tokens = list(range(16))
    base = hash_block(None, tokens)
    assert base == hash_block(None, tokens)
    others = [
        hash_block(None, tokens[::-1]),
        hash_block(None, tokens[:-1]),
        hash_block(base, tokens),
        hash_block(None, tokens, ("salt",)),
        hash_block(None, tokens, (1,)),
        hash_block(None, tokens, ("1",)),
        hash_block(None, tokens, (1, "salt")),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_hash_is_the_same_in_another_process():
    program = (
        "from paged_jax.prefix_cache import hash_block;"
        "print(hash_block(hash_block(None, range(16)), range(16, 32), (7, 'salt')).hex())"
    )
    printed = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    here = hash_block(hash_block(None, range(16)), range(16, 32), (7, "salt")).hex()
    assert [p.stdout.strip() for p in printed] == [here, here]


def test_match_gives_the_longest_chain_and_the_first_of_equals():
    cache = PrefixCache()
    cache.insert(b"a", 5)
    cache.insert(b"a", 3)
    cache.insert(b"c", 4)
    assert cache.match([b"a", b"b", b"c"]) == [5]
    assert cache.drop(5)
    assert not cache.drop(5)
    assert cache.match([b"a", b"c"]) == [3, 4]
    with pytest.raises(ValueError, match="block 3 carries a hash already"):
        cache.insert(b"z", 3)


def test_host_half_imports_no_jax():
    program = (
        "import sys, paged_jax.scheduler, paged_jax.tokenizer, paged_jax.detokenizer;"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
