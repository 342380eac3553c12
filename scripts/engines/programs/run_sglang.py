"""Decode prompts with SGLang on a CPU and record every round: ``PYTHON run_sglang.py JOB.json OUT.json``.

Run it with the interpreter of SGLang's own environment; of this repository it needs ``sglang_gated_delta.py`` only. The
environment needs SGLang's CPU kernels (``sgl_kernel``, built from its repository, ``pyproject_cpu.toml``; AVX512 and
AMX): their attention is the only one for CPUs that supports drafts. They compute in bf16. In fp16 their results were
wrong on a CPU whose AMX has no fp16.

One prompt at a time, greedy, past EOS. SGLang drafts and verifies in a separate process, whose entry point is below.
There the function that verifies a round (``run_eagle_verify``, for one module and several) records the drafts that it
gets and the tokens that it accepts. The tokens from ``generate`` must equal the tokens that the rounds committed.
SGLang verifies Gated DeltaNet layers on GPUs only; ``sglang_gated_delta.py`` documents the replacement for CPUs.

"""

import json
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

# Read at the import of sglang. Without it, SGLang looks for a GPU.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# Its threads busy-wait for each other; one is enough for small models.
os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")

import sglang_gated_delta
import torch
from sgl_kernel import __version__ as kernels
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.speculative import eagle_worker_v2, multi_layer_eagle_worker_v2

ROUNDS = "SGLANG_PARITY_ROUNDS"


def run_recorded(*arguments, **named):
    """Run SGLang's scheduler process with a recorder of every round."""
    # Some of its models call `torch.cuda.synchronize` when they share the trunk's lm_head with the head, even without a
    # GPU.
    torch.cuda.synchronize = lambda: None
    sglang_gated_delta.install()
    rounds = Path(os.environ[ROUNDS])
    for worker in (eagle_worker_v2, multi_layer_eagle_worker_v2):
        worker.run_eagle_verify = partial(verify_recorded, rounds, worker.run_eagle_verify)
    run_scheduler_process(*arguments, **named)


def verify_recorded(rounds, verify, batch, **named):
    """Verify a round by SGLang's function, and append its drafts and committed tokens to a file."""
    # The first token is the one before the drafts.
    drafts = batch.spec_info.draft_token.tolist()[1:]
    result = verify(batch, **named)
    (num_committed,) = result.accept_lens.tolist()
    one = {"drafts": drafts, "committed": result.next_token_ids.tolist()[:num_committed]}
    with rounds.open("a", encoding="utf-8") as handle:
        handle.write(f"{json.dumps(one)}\n")
    return result


class RecordedEngine(Engine):
    """SGLang's engine with a scheduler process that records every round."""

    run_scheduler_process_func = staticmethod(run_recorded)


def load(job):
    """Return an engine that drafts with the checkpoint's own head, or with the draft model of the job."""
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"] + 2 * (job["depth"] + 1)
    return RecordedEngine(
        model_path=job["checkpoint"],
        device="cpu",
        dtype=job["dtype"],
        trust_remote_code=job["trust_remote_code"],
        random_seed=0,
        max_running_requests=1,
        max_total_tokens=4 * longest,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        json_model_override_args=json.dumps(overrides_of(Path(job["checkpoint"]))),
        **speculation_of(job),
    )


def overrides_of(checkpoint):
    """Return config fields of a hybrid trunk that have other names in SGLang than in transformers.

    SGLang's config has the interval between full-attention layers, where transformers lists all layer types. It rotates
    a quarter of each head, like releases, and ignores ``rope_parameters``.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kinds = config.get("layer_types") or []
    if "linear_attention" not in kinds:
        return {}
    told = {"full_attention_interval": kinds.index("full_attention") + 1}
    rotated = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    if rotated is not None:
        told["partial_rotary_factor"] = rotated
    return {name: value for name, value in told.items() if name not in config}


def speculation_of(job):
    """Return the options of the drafter."""
    draft = job["draft"]
    named = {"speculative_algorithm": "NEXTN"}
    if draft is not None:
        named = {"speculative_algorithm": draft["kind"].upper(), "speculative_draft_model_path": draft["path"]}
    return {
        **named,
        "speculative_num_steps": job["depth"],
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": job["depth"] + 1,
    }


def rounds_of(output_ids, verified):
    """Return the rounds of one prompt, prefill first.

    Raises:
        RuntimeError: The rounds committed other tokens than SGLang returned.
    """
    rounds = [{"drafts": [], "committed": output_ids[:1]}, *verified]
    committed = [token for one in rounds for token in one["committed"]]
    if committed[: len(output_ids)] != output_ids:
        raise RuntimeError(f"the rounds committed {committed}; expected what SGLang returned: {output_ids}")
    return rounds


def main():
    """Run the job and write its document."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    written = out.with_suffix(".rounds")
    os.environ[ROUNDS] = str(written)
    engine = load(job)
    sampling = {"temperature": 0.0, "max_new_tokens": job["max_new_tokens"], "ignore_eos": True}
    texts = []
    for prompt_ids in job["prompts"]:
        written.write_text("", encoding="utf-8")
        answer = engine.generate(input_ids=prompt_ids, sampling_params=sampling)
        lines = written.read_text(encoding="utf-8").splitlines()
        texts.append(rounds_of(answer["output_ids"], [json.loads(line) for line in lines]))
    engine.shutdown()
    document = {
        "engine": "sglang",
        "versions": {**{name: version(name) for name in ("sglang", "torch", "transformers")}, "sgl-kernel": kernels},
        "texts": texts,
    }
    out.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
