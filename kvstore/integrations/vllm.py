"""kvstore as a tier of vLLM: what its CPU memory no longer holds is found in the daemon.

vLLM loads this by its name; the configuration is told in docs/vllm.md::

    {"type": "KvstoreTier", "module_path": "kvstore.integrations.vllm", "socket": "..."}

All work is in tiering.py; here vLLM's words are turned into ours and back. No exception reaches
vLLM after the start: its scheduler would end with every request.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import vllm

from kvstore.client import Client
from kvstore.errors import UsageError
from kvstore.integrations import vllm_namespace as namespace
from kvstore.integrations import vllm_versions as versions
from kvstore.integrations.tiering import Limits, Tier, Verdict

# First of all: others do not have what is imported next.
VERSION = versions.check(str(vllm.__version__))

from vllm.logger import init_logger  # noqa: E402
from vllm.v1.kv_offload import base as vllm_base  # noqa: E402
from vllm.v1.kv_offload.tiering import base as vllm_tiering  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

SETTINGS = ("socket", "weights", "tenant", "ack", "enable_kv_events", "locality")
SECONDS = ("lookup_seconds", "load_seconds", "store_seconds")

# A child of vLLM's own logger, so that its handlers show what we say.
logger = init_logger("vllm.kvstore")

RESULTS = {
    Verdict.MISS: vllm_base.LookupResult.MISS,
    Verdict.HIT: vllm_base.LookupResult.HIT,
    Verdict.RETRY: vllm_base.LookupResult.RETRY,
}


def default_socket() -> str:
    """Return where a daemon of this user, or of root, listens."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [Path(own) / "kvstore/kvstore.sock"] if own and os.geteuid() else []
    there = [path for path in found if path.exists()]
    return os.environ.get("KVSTORE_SOCKET") or str([*there, Path("/run/kvstore/kvstore.sock")][0])


class KvstoreTier(vllm_tiering.SecondaryTierManager):  # type: ignore[misc]
    """The tier. ``settings`` are those of its entry in ``secondary_tiers``, told in docs/vllm.md.

    Raises UsageError, which ends the start of vLLM, for settings that we do not know.
    """

    medium: ClassVar[Any] = vllm_base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        more = versions.base_arguments(vllm_tiering.SecondaryTierManager, backpressure_detector)
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        unknown = settings.keys() - {*SETTINGS, *SECONDS}
        if unknown:
            raise UsageError(
                f"the kvstore tier has no setting {', '.join(sorted(unknown))}",
                f"its settings are {', '.join((*SETTINGS, *SECONDS))}",
            )
        if settings.get("locality") is not None:
            self.locality = vllm_base.Locality(settings["locality"])
        record = _record(offloading_spec, primary_kv_view, settings)
        address = str(settings.get("socket") or default_socket())
        logger.info("kvstore: namespace %s, daemon on %s", record, address)
        if "random_seed" in record:
            logger.warning(
                "kvstore: this vLLM's block keys are new in every process, so nothing will be "
                "found after a restart: set PYTHONHASHSEED, or use --prefix-caching-hash-algo "
                "sha256_cbor"
            )
        # The view itself is not kept: vLLM releases it at the end, which it could not do.
        pool = np.asarray(primary_kv_view).view(np.uint8)
        self._tier = Tier(
            Client(address), record, pool, logger, _limits(settings),
            ack=str(settings.get("ack", "accepted")),
        )  # fmt: skip
        wanted = bool(settings.get("enable_kv_events"))
        self._tells = wanted and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] = []

    # -- lookups ----------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        return vllm_base.RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return RESULTS[self._tier.lookup(bytes(key), req_context.req_id)]

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._tier.touch(list(keys))

    def on_schedule_end(self, context: Any) -> None:
        self._tier.end_step()

    def on_request_finished(self, req_context: Any) -> None:
        self._tier.forget(req_context.req_id)

    # -- jobs -------------------------------------------------------------------------------------

    def submit_load(self, job_metadata: Any) -> None:
        self._tier.load(
            job_metadata.job_id, list(job_metadata.keys), versions.rows_of(job_metadata)
        )

    def submit_store(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._tier.store(job_metadata.job_id, keys, versions.rows_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        results = []
        for outcome in self._tier.finished():
            job = outcome.job
            if self._tells and job.stores and outcome.done:
                self._events.append(self._event(list(outcome.done)))
            partly = not job.stores and not outcome.success and bool(outcome.done)
            results.append(
                versions.made(
                    vllm_tiering.JobResult,
                    job_id=job.number,
                    success=outcome.success,
                    successful_keys=tuple(outcome.done) if partly else None,
                    transfer_time=outcome.seconds,
                    transfer_bytes=len(outcome.done) * self.block_size_bytes,
                )
            )
        return results

    def drain_jobs(self) -> None:
        self._tier.drain()

    # -- the rest ---------------------------------------------------------------------------------

    def _event(self, keys: list[Any]) -> Any:
        return versions.made(
            vllm_base.OffloadingEvent,
            keys=keys,
            medium=self.medium,
            removed=False,
            locality=self.locality,
            ownership="kvstore",
        )

    def take_events(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events

    def shutdown(self) -> None:
        self._tier.close()


def _limits(settings: dict[str, Any]) -> Limits:
    chosen = {name.removesuffix("_seconds"): settings[name] for name in SECONDS if name in settings}
    for name, value in chosen.items():
        if not isinstance(value, (int, float)) or not 0 < value <= 3600:
            raise UsageError(f"{name}_seconds is {value!r}", "give seconds, up to 3600")
    return Limits(**chosen)


def _record(spec: Any, view: memoryview, settings: dict[str, Any]) -> dict[str, object]:
    config = versions.at_hand(spec, "vllm_config")
    kv_cache = versions.at_hand(spec, "kv_cache_config")
    if config is None or kv_cache is None:
        raise UsageError(
            "vLLM's configuration is not to be found, so nothing tells which blocks fit",
            "report this version of vLLM",
        )
    assert view.strides is not None
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    return namespace.record_of(
        spec.config,
        config,
        kv_cache,
        version=VERSION,
        row_bytes=view.strides[0],
        blocks_per_chunk=versions.blocks_per_chunk(spec),
        seed=versions.seed(algorithm),
        chosen_weights=str(settings.get("weights", "")),
        tenant=str(settings.get("tenant", "")),
    )
