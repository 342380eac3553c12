"""Decode prompts with MTP of transformers and record every round: ``PYTHON run_transformers.py JOB.json OUT.json``.

Run it with the interpreter of an environment with transformers 5.20 or newer; it needs nothing of this repository.

``generate(use_mtp=True)``, one prompt at a time, greedy, past EOS. It drafts one token per head
module. The drafts are the output of its candidate generator, and the committed tokens of a round are those added to the
text until the next call of the generator.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.generation.candidate_generator import MTPCandidateGenerator


def load(job):
    """Return the trunk, configured to find the head's tensors and to decode past EOS."""
    # Some vision-language models are not registered as causal language models in transformers.
    causal = type(AutoConfig.from_pretrained(job["checkpoint"])) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    model = auto.from_pretrained(job["checkpoint"], dtype=job["dtype"]).eval()
    config = model.config.get_text_config()
    # The class lists the layer numbers of released sizes only, and none for families whose releases have no head.
    own = [rf"model\.layers\.{config.num_hidden_layers}\.", r"^mtp\."]
    model._keys_to_ignore_on_load_unexpected = [*(model._keys_to_ignore_on_load_unexpected or []), *own]
    model.generation_config.eos_token_id = None
    return model


def rounds_of(model, prompt_ids, max_new_tokens):
    """Decode one prompt and return its rounds, prefill first."""
    asked = []
    get_candidates = MTPCandidateGenerator.get_candidates

    def recorded(self, input_ids, *arguments, **named):
        candidates, logits = get_candidates(self, input_ids, *arguments, **named)
        asked.append((input_ids.shape[1], candidates[0, input_ids.shape[1] :].tolist()))
        return candidates, logits

    MTPCandidateGenerator.get_candidates = recorded
    try:
        prompt = torch.tensor([prompt_ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_mtp=True,
        )
    finally:
        MTPCandidateGenerator.get_candidates = get_candidates
    ends = [length for length, _ in asked[1:]] + [output.shape[1]]
    return [
        {"drafts": drafts, "committed": output[0, start:end].tolist()}
        for (start, drafts), end in zip(asked, ends, strict=True)
    ]


def main():
    """Run the job and write its document."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model = load(job)
    document = {
        "engine": "transformers",
        "versions": {name: version(name) for name in ("transformers", "torch")},
        "texts": [rounds_of(model, prompt_ids, job["max_new_tokens"]) for prompt_ids in job["prompts"]],
    }
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
