"""vLLM's tiers on a machine without a GPU: the way to try kvstore, and how we test it.

vLLM's own offloading starts on GPUs only, although nothing but the copy between the device and its
shared memory depends on them. Here this copy is one from memory to memory::

    "spec_name": "CpuTieringOffloadingSpec", "spec_module_path": "kvstore.integrations.vllm_cpu"

Runs inside vLLM: torch is there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload import base as vllm_base
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


class CpuTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiers behind KV blocks that are in ordinary memory."""

    _copies: HostCopies | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        if self.config.canonical_layout:
            raise UsageError("canonical_layout does not work on the CPU", "leave it out")
        if self._copies is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copies = HostCopies(kv_caches, region, self.blocks_per_chunk)
        return self._copies


class HostCopies(vllm_base.OffloadingWorker):  # type: ignore[misc]
    """Copies between vLLM's KV blocks and its shared region, at once."""

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int) -> None:
        self._refs = kv_caches.group_data_refs
        self._blocks = blocks_per_chunk
        self._pages = [one.page_size_bytes for one in kv_caches.tensors]
        self._device = [
            one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors
        ]
        self._region = region
        self._host = [
            region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages
        ]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def _copy(self, job_id: int, device: Any, host: Any, *, to_host: bool) -> bool:
        started, copied = time.monotonic(), 0
        for group, block, chunk, slot in self._places(device, host.block_ids.tolist()):
            for ref in self._refs[group]:
                size, at = ref.page_size_bytes, slot * self._pages[ref.tensor_idx]
                pair = (
                    self._device[ref.tensor_idx][block, :size],
                    self._host[ref.tensor_idx][chunk, at : at + size],
                )
                source, target = pair if to_host else pair[::-1]
                target.copy_(source)
                copied += size
        seconds = time.monotonic() - started
        self._finished.append(vllm_base.TransferResult(job_id, True, copied, seconds))
        return True

    def _places(self, device: Any, chunks: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield group, block, chunk and the block's number in its chunk.

        The blocks of a group follow each other; the first may begin in the middle of a chunk.
        """
        blocks = iter(device.block_ids.tolist())
        sizes = device.group_sizes or [len(device.block_ids)]
        firsts = device.block_indices or [0] * len(sizes)
        begin = 0
        for group, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
            skip = first % self._blocks
            for number in range(skip, skip + size):
                chunk, slot = divmod(number, self._blocks)
                yield group, next(blocks), chunks[begin + chunk], slot
            begin += -(-(size + skip) // self._blocks) if size else 0

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every copy has ended when it was submitted."""

    def shutdown(self) -> None:
        # Views first: the region cannot be unmapped under them.
        self._host.clear()
        self._region.cleanup()
