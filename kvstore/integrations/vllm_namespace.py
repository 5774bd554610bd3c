"""The namespace of a vLLM: all that two of them must share before one may read the other's blocks.

A block of vLLM has no header. Whatever decides what its bytes mean is a field of this record, so
that another model, other weights under the same name, another type, layout or parallel size is
another namespace. ``kvstore inspect --namespaces`` shows in which fields two of them differ.

What belongs to a request is in vLLM's keys and not here: the tokens, the salt, the adapter's name
and path, images. An adapter whose weights change has to change its name too.

Standard library and numpy only: model servers import this module.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import UsageError
from kvstore.integrations import weights

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def folder_of(model: str, revision: str | None = None) -> Path | None:
    """Return where a model's files lie: the folder itself, or its place in the hub's cache."""
    if Path(model).is_dir():
        return Path(model).resolve()
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def fingerprint(model: str, revision: str | None, chosen: str) -> str:
    """Return what stands for the weights. ``chosen``: what the operator says, if anything.

    Raises UsageError when they are nowhere on this machine.
    """
    if chosen:
        return chosen
    folder = folder_of(model, revision)
    if folder is None:
        raise UsageError(
            f"the weights of {model} are not on this machine, so nothing tells when they change",
            'set "weights" of the tier to a text that changes when they do',
        )
    return weights.fingerprint(folder)


def record_of(
    config: Any,
    vllm: Any,
    kv_cache: Any,
    *,
    version: str,
    row_bytes: int,
    blocks_per_chunk: int,
    seed: str | None,
    chosen_weights: str = "",
    tenant: str = "",
) -> dict[str, object]:
    """Return the record of a vLLM's namespace.

    ``config``: its OffloadingConfig; ``vllm``: its VllmConfig; ``kv_cache``: its KVCacheConfig;
    ``version``: MAJOR.MINOR; ``row_bytes``: bytes of a chunk; ``seed``: the text that its first
    hash is made of, None if that is random.
    """
    model = vllm.model_config
    name = str(config.model.name)
    record: dict[str, object] = {
        "engine": "vllm",
        "version": version,
        "model": str(Path(name).resolve()) if Path(name).is_dir() else name,
        "weights": fingerprint(name, getattr(model, "revision", None), chosen_weights),
        "dtype": str(config.model.dtype),
        "cache_dtype": str(vllm.cache_config.cache_dtype),
        "model_dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
        "device": str(vllm.device_config.device_type),
        "hash": str(vllm.cache_config.prefix_caching_hash_algo),
        "tokens_per_hash": int(config.cache.tokens_per_hash),
        "blocks_per_chunk": blocks_per_chunk,
        "row_bytes": row_bytes,
        "groups": list(_groups(config, kv_cache)),
        "parallel": _parallel(config.parallel),
    }
    record |= {"random_seed": 1} if seed is None else {"seed": seed}
    optional = {
        "layout": config.kv_cache_layout,
        "attention": _attention(getattr(vllm, "attention_config", None)),
        "replicated": int(bool(getattr(config, "replicated_layout", False))),
        "canonical": int(bool(getattr(config, "canonical_layout", False))),
        "quantization": getattr(model, "quantization", None),
        "rope": _rope(model),
        "lora": _lora(getattr(vllm, "lora_config", None)),
        "tenant": tenant,
    }
    return record | {key: value for key, value in optional.items() if value}


def _groups(config: Any, kv_cache: Any) -> Iterator[dict[str, object]]:
    """Yield the groups of layers that share a page table: their kind decides what is kept."""
    for group in config.groups:
        spec = kv_cache.kv_cache_groups[group.group_id].kv_cache_spec
        names = "\n".join(group.layer_names).encode()
        yield {
            "id": int(group.group_id),
            "tokens": int(group.tokens_per_block),
            "kind": type(spec).__name__,
            "bytes": int(spec.page_size_bytes),
            "window": int(getattr(spec, "sliding_window", None) or 0),
            "layers": len(group.layer_names),
            "layer_names": hashlib.sha256(names).hexdigest()[:16],
        }


def _parallel(parallel: Any) -> dict[str, object]:
    # vLLM says so where the bytes of a block are the same for every size.
    same = bool(getattr(parallel, "is_parallelism_agnostic", False))
    return {name: 1 if same else int(getattr(parallel, name, 1)) for name in SIZES}


def _rope(model: Any) -> str:
    """Return the settings that turn positions into angles, as text: some are no whole numbers."""
    settings = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    found = {name: getattr(settings, name, None) for name in ROPE}
    known = {name: value for name, value in found.items() if value is not None}
    return json.dumps(known, sort_keys=True, default=str) if known else ""


def _attention(attention: Any) -> str:
    """Return the backend that was asked for, which may have a layout of its own."""
    backend = getattr(attention, "backend", None)
    return str(getattr(backend, "name", backend)) if backend is not None else ""


def _lora(lora: Any) -> str:
    if lora is None:
        return ""
    return f"rank {getattr(lora, 'max_lora_rank', '')}, {getattr(lora, 'lora_dtype', '')}"
