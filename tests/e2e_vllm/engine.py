"""One vLLM, told what to do line by line. Run inside vLLM's environment.

    python engine.py '{"model": "...", "extra": {...} or null}'

Each line of stdin is a JSON list of prompts, generated together; the answer is a line of stdout
that begins with ``ANSWER``: for each prompt the number of cached tokens, and tokens with their
log-probabilities; then counters of the tiers. It ends in order when stdin does.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

COUNTED = ("kv_offload_tiering", "external_prefix_cache")


def started(options: dict[str, Any]) -> Any:
    more: dict[str, Any] = {}
    if options.get("extra") is not None:
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=options["extra"],
        )
    return LLM(
        model=options["model"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=True,
        block_size=32,
        # One after the other: in a batch sums are rounded otherwise, and nothing could be compared.
        max_num_seqs=options.get("at_once", 1),
        disable_log_stats=False,
        seed=0,
        **more,
    )


def generated(llm: Any, prompts: list[str]) -> list[dict[str, Any]]:
    how = SamplingParams(max_tokens=6, temperature=0, logprobs=0, ignore_eos=True)
    answers = []
    for output in llm.generate(prompts, how, use_tqdm=False):
        said = [
            [token, round(step[token].logprob, 4)]
            for token, step in zip(
                output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
            )
        ]
        answers.append({"cached": output.num_cached_tokens, "said": said})
    return answers


def counters(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if any(word in metric.name for word in COUNTED) and hasattr(metric, "value"):
            name = metric.name.removeprefix("vllm:")
            tier = metric.labels.get("tier", "")
            found[f"{name} {tier}".strip()] = metric.value
    return found


def main() -> None:
    llm = started(json.loads(sys.argv[1]))
    print("ANSWER", json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answers = generated(llm, json.loads(line))
        told = {"answers": answers, "counters": counters(llm)}
        print("ANSWER", json.dumps(told), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
