"""The tier as vLLM calls it, and the namespace of a vLLM; vLLM itself is not needed."""

from __future__ import annotations

import importlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import UsageError
from kvstore.integrations import vllm_namespace, vllm_versions, weights
from kvstore.keys import namespace_id
from tests import fake_vllm
from tests.fake_daemon import FakeDaemon
from tests.fake_vllm import LookupResult, job, request

ROWS, ROW = 16, 4096


def key(number: int) -> bytes:
    return b"%036d" % number


def write_model(folder: Path, *tensors: bytes, config: str = "{}") -> Path:
    """Write a model of these tensors as safetensors does."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    header, at = {}, 0
    for number, data in enumerate(tensors):
        header[f"t{number}"] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    content = struct.pack("<Q", len(text)) + text + b"".join(tensors)
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", bytes(5000), b"\1" * 100_000)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path / "socket")
    yield daemon
    daemon.close()


Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, fake: FakeDaemon, model: Path) -> Iterator[Make]:
    """Makes tiers as vLLM does; ``view`` of one is the memory that it was lent."""
    made = []
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def act(events: bool = False, version: str = "0.32.0", **settings: Any) -> Any:
        fake_vllm.install(monkeypatch, version)
        module = importlib.import_module("kvstore.integrations.vllm")
        memory = bytearray(ROWS * ROW)
        view = memoryview(memory).cast("b", (ROWS, ROW))
        spec = fake_vllm.spec(str(model), events=events)
        settings = {"socket": fake.address, "load_seconds": 10, **settings}
        tier = module.KvstoreTier(spec, view, "kvstore", None, **settings)
        tier.memory, tier.view = memory, view
        made.append(tier)
        return tier

    yield act
    for tier in made:
        tier.shutdown()


def finished(tier: Any) -> list[Any]:
    tier.drain_jobs()
    return list(tier.get_finished_jobs())


def looked_up(tier: Any, name: bytes, who: str = "r") -> LookupResult:
    while True:
        found: LookupResult = tier.lookup(name, request(who))
        if found != LookupResult.RETRY:
            return found
        tier.on_schedule_end(None)
        time.sleep(0.005)


# -- the tier -------------------------------------------------------------------------------------


def test_chunks_go_and_come_back(make: Make) -> None:
    tier = make()
    flat = tier.view.cast("B")
    flat[ROW : 2 * ROW] = b"x" * ROW
    tier.on_new_request(request("r"))
    assert looked_up(tier, key(1)) == LookupResult.MISS
    tier.submit_store(job(7, [key(1)], [1]))
    (result,) = finished(tier)
    assert (result.job_id, result.success, result.transfer_bytes) == (7, True, ROW)
    tier.on_request_finished(request("r"))
    assert looked_up(tier, key(1)) == LookupResult.HIT
    tier.submit_load(job(8, [key(1)], [3]))
    (result,) = finished(tier)
    assert (result.job_id, result.success, result.successful_keys) == (8, True, None)
    assert flat[3 * ROW : 4 * ROW] == b"x" * ROW
    assert list(tier.get_finished_jobs()) == []


def test_part_of_a_load(make: Make, fake: FakeDaemon) -> None:
    tier = make()
    fake.blocks[1, 0, key(1)] = bytes(ROW)
    tier.submit_load(job(1, [key(1), key(2)], [1, 2]))
    (result,) = finished(tier)
    assert (result.success, result.successful_keys) == (False, (key(1),))
    tier.submit_load(job(2, [key(3)], [1]))
    (result,) = finished(tier)
    assert (result.success, result.successful_keys) == (False, None)


def test_events_are_told_where_they_are_wanted(make: Make) -> None:
    tier = make(events=True, enable_kv_events=True, locality="LOCAL")
    tier.submit_store(job(1, [key(1), key(2)], [1, 2]))
    finished(tier)
    (event,) = tier.take_events()
    assert (event.keys, event.removed, event.ownership) == ([key(1), key(2)], False, "kvstore")
    assert event.locality == fake_vllm.Locality.LOCAL
    assert list(tier.take_events()) == []
    quiet = make(events=False, enable_kv_events=True)
    quiet.submit_store(job(1, [key(3)], [1]))
    finished(quiet)
    assert list(quiet.take_events()) == []


def test_vllm_can_take_its_memory_back(make: Make) -> None:
    tier = make()
    tier.submit_store(job(1, [key(1)], [1]))
    tier.shutdown()
    tier.view.release()
    tier.memory.append(0)  # BufferError if somebody held it


def test_jobs_of_older_versions_name_their_rows_otherwise() -> None:
    assert vllm_versions.rows_of(SimpleNamespace(block_ids=[1, 2])) == [1, 2]
    assert vllm_versions.blocks_per_chunk(SimpleNamespace(block_size_factor=4)) == 4


def test_older_versions_lack_fields_of_messages() -> None:
    @dataclass
    class Older:
        job_id: int

    assert vllm_versions.made(Older, job_id=3, transfer_time=1.0) == Older(3)


@pytest.mark.parametrize("version", ["0.24.9", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused(make: Make, version: str) -> None:
    with pytest.raises(UsageError, match=r"0\.25 to 0\.33"):
        make(version=version)


@pytest.mark.parametrize("version", ["0.25.0", "0.32.0+cpu", "0.33.1rc2"])
def test_versions_that_are_known(version: str) -> None:
    assert version.startswith(vllm_versions.check(version))


@pytest.mark.parametrize("settings", [{"sokcet": "x"}, {"load_seconds": 0}, {"load_seconds": "1"}])
def test_settings_that_make_no_sense_are_refused(make: Make, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**settings)


def test_seeds_that_are_new_in_every_process_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm.install(monkeypatch)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert vllm_versions.seed("sha256") == "vllm-none-hash"
    assert vllm_versions.seed("xxhash") is None
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert vllm_versions.seed("xxhash") == "7"
    monkeypatch.delenv("PYTHONHASHSEED")
    import vllm.v1.core.kv_cache_utils as older

    del older.DEFAULT_NONE_HASH_SEED
    assert vllm_versions.seed("sha256") is None


def test_settings_are_found_among_the_callers() -> None:
    def connector(vllm_config: str) -> Any:
        return vllm_versions.at_hand(SimpleNamespace(), "vllm_config")

    assert connector("settings") == "settings"
    assert vllm_versions.at_hand(SimpleNamespace(vllm_config="own"), "vllm_config") == "own"
    assert vllm_versions.at_hand(SimpleNamespace(), "nobody_has_this") is None


# -- the namespace --------------------------------------------------------------------------------


def record(model: Path | str, **changes: Any) -> dict[str, object]:
    config = {name: changes.pop(name) for name in list(changes) if name in CONFIG}
    vllm = {name: changes.pop(name) for name in list(changes) if name in VLLM}
    how: dict[str, Any] = {
        "version": "0.32",
        "row_bytes": ROW,
        "blocks_per_chunk": 1,
        "seed": "vllm-none-hash",
    }
    return vllm_namespace.record_of(
        fake_vllm.config(str(model), **config),
        fake_vllm.vllm_config(**vllm),
        fake_vllm.kv_cache_config(),
        **how | changes,
    )


CONFIG = vars(fake_vllm.config(""))
VLLM = vars(fake_vllm.vllm_config())
PARALLEL = vars(fake_vllm.config("").parallel)
ROPE = SimpleNamespace(rope_parameters={"rope_theta": 500000.0})


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.33"},
        {"row_bytes": 2 * ROW},
        {"blocks_per_chunk": 2},
        {"seed": "0"},
        {"seed": None},
        {"tenant": "a"},
        {"chosen_weights": "v2"},
        {"kv_cache_layout": "HND"},
        {"replicated_layout": True},
        {"canonical_layout": True},
        {"parallel": SimpleNamespace(**PARALLEL | {"tp_size": 2})},
        {"cache": SimpleNamespace(tokens_per_hash=16)},
        {"groups": (SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"), group_id=0),)},
        {"groups": (SimpleNamespace(tokens_per_block=32, layer_names=("a", "c"), group_id=0),)},
        {"cache_config": SimpleNamespace(cache_dtype="fp8", prefix_caching_hash_algo="sha256")},
        {"cache_config": SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="xxhash")},
        {"model_config": SimpleNamespace(quantization="fp8", hf_text_config=None)},
        {"model_config": SimpleNamespace(hf_text_config=ROPE)},
        {"device_config": SimpleNamespace(device_type="cuda")},
        {"attention_config": SimpleNamespace(backend=SimpleNamespace(name="FLASHINFER"))},
        {"lora_config": SimpleNamespace(max_lora_rank=16, lora_dtype="auto")},
    ],
    ids=str,
)
def test_what_changes_a_block_changes_the_namespace(model: Path, changes: dict[str, Any]) -> None:
    assert namespace_id(record(model)) == namespace_id(record(model))
    assert namespace_id(record(model, **changes)) != namespace_id(record(model))


def test_sizes_do_not_matter_where_vllm_says_so(model: Path) -> None:
    def agnostic(size: int) -> SimpleNamespace:
        return SimpleNamespace(**PARALLEL | {"is_parallelism_agnostic": True, "tp_size": size})

    assert record(model, parallel=agnostic(1)) == record(model, parallel=agnostic(8))


def test_a_path_has_one_spelling(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    assert record("model") == record(model) == record(f"{model.parent}/./model/")


def test_weights_that_are_elsewhere_have_to_be_named() -> None:
    with pytest.raises(UsageError, match="weights"):
        record("nobody/has-this")
    assert record("nobody/has-this", chosen_weights="v1")["weights"] == "v1"


# -- the weights ----------------------------------------------------------------------------------


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    tensors = [bytes(5000), b"\1" * 100_000, b"\2" * 30]
    known = {weights.fingerprint(write_model(tmp_path / "m", *tensors))}
    assert weights.fingerprint(write_model(tmp_path / "again", *tensors)) in known
    variants = [
        [*tensors[:2], b"\3" * 30],
        [*tensors[:1], b"\4" * 100_000, *tensors[2:]],
        [*tensors, b"\5"],
        tensors[::-1],
    ]
    for variant in variants:
        known.add(weights.fingerprint(write_model(tmp_path / "m", *variant)))
    known.add(weights.fingerprint(write_model(tmp_path / "m", *tensors, config='{"rope": 1}')))
    assert len(known) == len(variants) + 2


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"{}xx" + bytes(99)])
def test_a_file_that_is_no_safetensors_is_sampled_all_the_same(
    tmp_path: Path, damage: bytes
) -> None:
    folder = write_model(tmp_path / "m", b"x")
    (folder / "model.safetensors").write_bytes(damage)
    one = weights.fingerprint(folder)
    (folder / "model.safetensors").write_bytes(damage + b"more")
    assert weights.fingerprint(folder) != one


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        weights.fingerprint(tmp_path)
