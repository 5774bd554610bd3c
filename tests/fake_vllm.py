"""As much of vLLM's modules as our tier needs, to test it where vLLM is not installed.

Names and fields are those of vLLM 0.32, ``vllm/v1/kv_offload``.
"""

from __future__ import annotations

import enum
import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


class LookupResult(enum.Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class RequestOffloadingContext:
    pass


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        assert primary_kv_view.strides is not None
        self.block_size_bytes = primary_kv_view.strides[0]
        self.locality: Locality | None = None
        self.tier_type = tier_type


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> None:
    """Put the modules in place for a test."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {"DEFAULT_NONE_HASH_SEED": "vllm-none-hash"},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.base": {
            one.__name__: one
            for one in (LookupResult, Medium, Locality, RequestOffloadingContext, OffloadingEvent)
        },
        "vllm.v1.kv_offload.tiering": {},
        "vllm.v1.kv_offload.tiering.base": {
            one.__name__: one for one in (JobResult, SecondaryTierManager)
        },
    }
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, "kvstore.integrations.vllm", raising=False)


def config(model: str, **changes: Any) -> SimpleNamespace:
    """Return an OffloadingConfig."""
    group = SimpleNamespace(tokens_per_block=32, layer_names=("a", "b"), group_id=0)
    sizes = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "world_size": 1}
    fields: dict[str, Any] = {
        "groups": (group,),
        "model": SimpleNamespace(name=model, dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        "parallel": SimpleNamespace(rank=0, is_parallelism_agnostic=False, **sizes),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "NHD",
    }
    return SimpleNamespace(**fields | changes)


def vllm_config(**changes: Any) -> SimpleNamespace:
    """Return a VllmConfig."""
    fields: dict[str, Any] = {
        "cache_config": SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        "model_config": SimpleNamespace(
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            hf_text_config=SimpleNamespace(rope_parameters={"rope_theta": 10000.0}),
        ),
        "lora_config": None,
        "device_config": SimpleNamespace(device_type="cpu"),
        "attention_config": SimpleNamespace(backend=None),
    }
    return SimpleNamespace(**fields | changes)


class FullAttentionSpec:
    page_size_bytes = 65536


def kv_cache_config() -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())])


def spec(model: str, *, events: bool = False) -> SimpleNamespace:
    """Return an OffloadingSpec."""
    return SimpleNamespace(
        config=config(model),
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
        vllm_config=vllm_config(),
        kv_cache_config=kv_cache_config(),
    )


def request(name: str) -> SimpleNamespace:
    """Return a ReqContext."""
    return SimpleNamespace(req_id=name)


def job(number: int, keys: list[bytes], rows: list[int]) -> SimpleNamespace:
    """Return a TransferJob."""
    return SimpleNamespace(job_id=number, keys=keys, chunk_ids=np.array(rows, np.int32))
