"""Decode prompts with SGLang on a CPU and write down every round: ``PYTHON run_sglang.py JOB.json OUT.json``.

Run by the interpreter of SGLang's own environment; needs nothing of this repository but the file named below. That
environment wants SGLang's CPU kernels (``sgl_kernel``, built from its repository, ``pyproject_cpu.toml``; AVX512 and
AMX), whose attention is the only one on a CPU that drafts. They compute in bf16; in fp16 they were wrong on a CPU whose
AMX has no fp16.

One prompt at a time, greedy, past EOS. SGLang drafts and verifies in a process of its own, whose start is ours: there
the one function that verifies a round (``run_eagle_verify``, of one head and of several modules alike) writes to a file
which drafts it is given and which tokens it accepts. What ``generate`` returns must then be what the rounds committed.
Over Gated DeltaNet layers SGLang verifies on GPUs alone: ``sglang_gated_delta.py`` says what stands in here.

``counters`` are SGLang's own, added up over the prompts. They include drafts accepted past the token limit.
"""

import json
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

# Read when sglang is imported: without it, SGLang looks for a GPU.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# Its threads wait for one another without sleeping; one is enough for small models.
os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")

import sglang_gated_delta
import torch
from sgl_kernel import __version__ as kernels
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.speculative import eagle_worker_v2, multi_layer_eagle_worker_v2

ROUNDS = "SGLANG_PARITY_ROUNDS"
COUNTERS = {"spec_verify_ct": "rounds", "spec_num_correct_drafts": "accepted_tokens"}


def run_recorded(*arguments, **named):
    """Be SGLang's process that decodes, and write down every round."""
    # Some of its models wait for a GPU, there or not, when they hand the trunk's lm_head to the head.
    torch.cuda.synchronize = lambda: None
    sglang_gated_delta.install()
    rounds = Path(os.environ[ROUNDS])
    for worker in (eagle_worker_v2, multi_layer_eagle_worker_v2):
        worker.run_eagle_verify = partial(verify_recorded, rounds, worker.run_eagle_verify)
    run_scheduler_process(*arguments, **named)


def verify_recorded(rounds, verify, batch, **named):
    """Verify a round as SGLang does; append its drafts and what it committed to a file."""
    # The first of them is the token before the drafts.
    drafts = batch.spec_info.draft_token.tolist()[1:]
    result = verify(batch, **named)
    (num_committed,) = result.accept_lens.tolist()
    one = {"drafts": drafts, "committed": result.next_token_ids.tolist()[:num_committed]}
    with rounds.open("a", encoding="utf-8") as handle:
        handle.write(f"{json.dumps(one)}\n")
    return result


class RecordedEngine(Engine):
    """SGLang's engine, whose decoding process writes down every round."""

    run_scheduler_process_func = staticmethod(run_recorded)


def load(job):
    """Return an engine that drafts with the checkpoint's own head, or with the draft model that the job names."""
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
    """Return what SGLang reads of a hybrid trunk's config under other names than transformers writes it.

    Its config of these trunks counts layers between two of full attention, where transformers lists all, and rotates a
    quarter of each head, as releases do, whatever ``rope_parameters`` say.
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
    """Return what to draft with."""
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
        RuntimeError: What the rounds committed is not what SGLang returned.
    """
    rounds = [{"drafts": [], "committed": output_ids[:1]}, *verified]
    committed = [token for one in rounds for token in one["committed"]]
    if committed[: len(output_ids)] != output_ids:
        raise RuntimeError(f"the rounds committed {committed}; expected what SGLang returned: {output_ids}")
    return rounds


def main():
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    written = out.with_suffix(".rounds")
    os.environ[ROUNDS] = str(written)
    engine = load(job)
    sampling = {"temperature": 0.0, "max_new_tokens": job["max_new_tokens"], "ignore_eos": True}
    texts, counters = [], dict.fromkeys(COUNTERS.values(), 0)
    for prompt_ids in job["prompts"]:
        written.write_text("", encoding="utf-8")
        answer = engine.generate(input_ids=prompt_ids, sampling_params=sampling)
        lines = written.read_text(encoding="utf-8").splitlines()
        texts.append(rounds_of(answer["output_ids"], [json.loads(line) for line in lines]))
        for theirs, name in COUNTERS.items():
            counters[name] += answer["meta_info"][theirs]
    engine.shutdown()
    document = {
        "engine": "sglang",
        "versions": {**{name: version(name) for name in ("sglang", "torch", "transformers")}, "sgl-kernel": kernels},
        "texts": texts,
        "eos_ids": [],
        "counters": counters,
    }
    out.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
