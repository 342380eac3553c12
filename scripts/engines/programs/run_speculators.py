"""Compute the logits of heads with the models of speculators: ``PYTHON run_speculators.py JOB.json OUT.json``.

Run it with the interpreter of speculators' own environment; it needs nothing of this repository. The logits are written
to ``OUT.safetensors``.

speculators unrolls an MTP head as in its training: teacher-forced, each depth attends to its own rows only, and
positions do not advance.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.models.mtp.core import MTPDraftModel
from transformers import AutoConfig, AutoModelForCausalLM


@torch.inference_mode()
def head_logits(job):
    """Return the logits (rows, V) of every text and depth."""
    dtype = getattr(torch, job["dtype"])
    trunk = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=dtype).eval()
    config = AutoConfig.from_pretrained(job["checkpoint"]).get_text_config()
    head = MTPDraftModel.from_training_args(
        config, num_speculative_steps=job["depth"], verifier_name_or_path=job["checkpoint"]
    )
    head = head.to(dtype).eval()
    found = {}
    for number, text in enumerate(job["texts"]):
        tokens = torch.tensor([text])
        logits, _, _ = head(tokens, trunk.model(input_ids=tokens).last_hidden_state)
        for depth, one in enumerate(logits, start=1):
            found[f"{number}.{depth}"] = one[0].float().contiguous()
    return found


def main():
    """Run the job and write its document."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    save_file(head_logits(job), out.with_suffix(".safetensors"))
    document = {
        "engine": "speculators",
        "versions": {name: version(name) for name in ("speculators", "torch", "transformers")},
        "counters": {},
    }
    out.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
