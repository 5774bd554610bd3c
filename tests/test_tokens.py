"""vLLM's block keys, computed without vLLM."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvstore import keys, tokens
from kvstore.errors import UsageError
from kvstore.keys import Prompt

GOLDEN = {
    "sha256": ("066b1e8987e02713", "b1bdb84c40e30190", "8229563374c36798", "cea8f6af77e7c744"),
    "sha256_cbor": ("9bd96a485ad84efd", "30653d0f357fa985", "1287f299a9498907", "bf156887810cd717"),
}
"""What vLLM 0.32 computes for blocks of 32 tokens: none, 0 to 31, 32 to 63, 0 to 31 with a salt."""


@pytest.mark.parametrize("algorithm", GOLDEN)
def test_hashes_are_those_of_vllm(algorithm: str) -> None:
    none, first, second, salted = GOLDEN[algorithm]
    assert keys.none_hash(algorithm).hex().startswith(none)
    hashes = keys.block_hashes(Prompt(range(70)), 32, algorithm)
    assert [one.hex()[:16] for one in hashes] == [first, second]
    hashes = keys.block_hashes(Prompt(range(64), salt="s"), 32, algorithm)
    assert hashes[0].hex().startswith(salted)
    assert not hashes[1].hex().startswith(second)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"), (23, "17"), (24, "1818"), (255, "18ff"), (256, "190100"), (65536, "1a00010000"),
        (1 << 32, "1b0000000100000000"), (-1, "20"), (-500, "3901f3"), (None, "f6"), ("", "60"),
        ("ü", "62c3bc"), (b"\x01\x02", "420102"), ((1, (2, "a")), "820182026161"),
        (tuple(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
    ],
)  # fmt: skip
def test_cbor_is_canonical(value: object, encoded: str) -> None:
    """Examples of RFC 8949, appendix A, and some of their kind."""
    expected = hashlib.sha256(bytes.fromhex(encoded)).digest()
    assert keys._hash("sha256_cbor", value) == expected


@pytest.mark.parametrize("value", [1.5, True, 1 << 64, {}])
def test_what_cannot_be_in_a_hash_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        keys._hash("sha256_cbor", value)


@pytest.mark.parametrize("algorithm", GOLDEN)
def test_integers_of_numpy_make_the_same_keys(algorithm: str) -> None:
    plain = keys.block_hashes(Prompt(range(64)), 32, algorithm)
    array = np.arange(64, dtype=np.int32)
    assert keys.block_hashes(Prompt(array.tolist()), 32, algorithm) == plain
    assert keys.block_hashes(Prompt(list(array)), 32, algorithm) == plain


def test_adapters_and_seeds_change_every_key() -> None:
    variants = [
        keys.block_hashes(Prompt(range(64)), 32),
        keys.block_hashes(Prompt(range(64)), 32, seed="0"),
        keys.block_hashes(Prompt(range(64), lora=("a", "/a")), 32),
        keys.block_hashes(Prompt(range(64), lora=("a", "/b")), 32),
    ]
    assert len({one for hashes in variants for one in hashes}) == 8


def test_a_chunk_is_named_by_its_last_block_and_its_group() -> None:
    hashes = keys.block_hashes(Prompt(range(7 * 16)), 16)
    chunks = keys.block_keys(hashes, group=258, blocks=3)
    assert chunks == [hashes[2] + b"\0\0\1\2", hashes[5] + b"\0\0\1\2"]
    assert {len(name) for name in chunks} == {36}
    assert keys.block_keys(hashes[:2], blocks=3) == []


def test_unknown_algorithms_and_empty_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="xxhash"):
        keys.block_hashes(Prompt(range(4)), 2, "xxhash")
    with pytest.raises(UsageError):
        keys.block_hashes(Prompt(range(4)), 0)
    with pytest.raises(UsageError):
        keys.block_keys([], blocks=0)


RECORD = {
    "engine": "vllm",
    "hash": "sha256_cbor",
    "seed": "vllm-none-hash",
    "tokens_per_hash": 16,
    "blocks_per_chunk": 2,
    "groups": [{"id": 0, "tokens": 16}, {"id": 3, "tokens": 32}],
}


def test_keys_of_a_prompt_in_a_namespace() -> None:
    prompt = Prompt(range(130), salt="s")
    hashes = keys.block_hashes(prompt, 16, "sha256_cbor")
    expected = [hashes[n] + bytes(4) for n in (1, 3, 5, 7)]
    expected += [hashes[n] + b"\0\0\0\3" for n in (3, 7)]
    assert tokens.keys_in(RECORD, prompt) == expected


@pytest.mark.parametrize("change", [{"engine": "sglang"}, {"random_seed": 1}])
def test_there_are_no_keys_of_other_namespaces(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        tokens.keys_in(RECORD | change, Prompt([1]))


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ("[1, 2]", Prompt([1, 2])),
        ('{"model": "m", "prompt": [3], "cache_salt": "s"}', Prompt([3], "s")),
        ('{"prompt": [3], "cache_salt": null}', Prompt([3])),
    ],
)
def test_prompts_are_read(line: str, prompt: Prompt) -> None:
    assert tokens.read_prompt(line) == prompt


@pytest.mark.parametrize(
    "line", ["", "1 2", "{}", "[1.5]", "[true]", '["a"]', '{"prompt": "text"}', "[" * 99999, "7",
             '{"prompt": [1], "cache_salt": 1}'],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        tokens.read_prompt(line)
