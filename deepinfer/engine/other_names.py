"""Names that engines of this kind give to options: what a person who brings a script from there should write here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LEAVE_OUT = "leave it out"

# Keyword arguments of vLLM's offline class; docs/coming-from-vllm.md is the page about them.
ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "gpu_memory_utilization": "here it is memory_utilization, a share of the free device memory for caches",
        "num_gpu_blocks_override": "here it is num_blocks, with the reserved block 0 counted",
        "tensor_parallel_size": "no rank holds a part of a matrix; see data_parallel_size and context_parallel_size",
        "pipeline_parallel_size": "every rank runs all layers; see data_parallel_size and expert_parallel_size",
        "prefill_context_parallel_size": "here it is context_parallel_size",
        "enable_expert_parallel": "here it is expert_parallel_size, a number of ranks",
        "enable_eplb": "here it is expert_balancing, the name of a policy",
        "eplb_config": "here it is expert_balancing, expert_balancing_interval and redundant_experts",
        "num_redundant_experts": "here it is redundant_experts",
        "trust_remote_code": f"no code is ever loaded from a checkpoint; {_LEAVE_OUT}",
        "enforce_eager": "here it is decode_graphs=False",
        "compilation_config": f"this version compiles nothing; {_LEAVE_OUT}",
        "speculative_config": "here it is num_speculative_tokens",
        "quantization": f"the formats are those of the checkpoint; {_LEAVE_OUT}",
        "tokenizer": "the tokenizer is tokenizer.json in the model's directory",
        "tokenizer_mode": f"the tokenizer is tokenizer.json in the model's directory; {_LEAVE_OUT}",
        "skip_tokenizer_init": "without tokenizer.json in the model's directory there is no tokenizer; leave it out",
        "task": f"this version generates only; {_LEAVE_OUT}",
        "runner": f"this version generates only; {_LEAVE_OUT}",
        "load_format": f"weights are safetensors in the model's directory; {_LEAVE_OUT}",
        "hf_overrides": "what is true of the model stands in its config.json",
        "generation_config": f"a directory's generation_config.json is not read; give SamplingParams, and {_LEAVE_OUT}",
        "distributed_executor_backend": "ranks are processes of this machine, or what torchrun starts; leave it out",
        "limit_mm_per_prompt": f"images are given to engine.add_request as embeddings; {_LEAVE_OUT}",
        "enable_lora": f"adapters are not supported; {_LEAVE_OUT}",
        "guided_decoding_backend": f"forms are compiled by xgrammar; {_LEAVE_OUT}",
        "structured_outputs_config": f"forms are compiled by xgrammar; {_LEAVE_OUT}",
        "revision": "model is a directory; nothing is downloaded",
        "download_dir": "model is a directory; nothing is downloaded",
        "enable_prefix_caching": f"prompts do not share blocks, except by engine.fork_request; {_LEAVE_OUT}",
        "swap_space": f"preempted requests are computed again, not swapped; {_LEAVE_OUT}",
        "cpu_offload_gb": f"weights stay on the device; {_LEAVE_OUT}",
        "disable_log_stats": f"counts are read from engine.stats(), not logged; {_LEAVE_OUT}",
        "max_logprobs": f"the limit is fixed (deepinfer.sampling.limits); {_LEAVE_OUT}",
        "device": "here it is accelerator, the name of a driver",
    }
)
