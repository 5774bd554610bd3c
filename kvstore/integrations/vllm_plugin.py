"""What vLLM calls when it starts, in each of its processes: the names of our tier and spec.

With it, ``"type": "kvstore"`` and ``"spec_name": "CpuTieringOffloadingSpec"`` do without a module's
name. It imports nothing heavy: vLLM is not fully there yet.
"""

from __future__ import annotations

TIER = "kvstore"
CPU_SPEC = "CpuTieringOffloadingSpec"


def register() -> None:
    """Register the names: the entry point of the group ``vllm.general_plugins``.

    May be called twice in a process.
    """
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "kvstore.integrations.vllm", "KvstoreTier")
    if CPU_SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(CPU_SPEC, "kvstore.integrations.vllm_cpu", CPU_SPEC)
