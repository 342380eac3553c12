"""Decode prompts with MTP of transformers, or compute its head's logits: ``PYTHON run_transformers.py JOB OUT``.

Run it with the interpreter of an environment with transformers 5.20 or newer; it needs nothing of this repository.

``"kind": "decode"``: ``generate(use_mtp=True)``, one prompt at a time, greedy, past EOS. It drafts one token per head
module. The drafts are the output of its candidate generator, and the committed tokens of a round are those added to the
text until the next call of the generator. It has no counters.

``"kind": "logits"``: for models that ``use_mtp`` refuses, the logits of ``MtpModel`` at depth 1, for every text of the
job, written to ``OUT.safetensors``.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel


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


@torch.inference_mode()
def head_logits(model, texts):
    """Return the logits (T - 1, V) of depth 1 after each token but the last of every text."""
    config = model.config.get_text_config()
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    config.dtype = model.dtype
    head = MtpModel.from_pretrained(model).eval()
    found = {}
    for number, text in enumerate(texts):
        tokens = torch.tensor([text])
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        embeds = model.get_input_embeddings()(tokens[:, 1:])
        positions = torch.arange(1, len(text))[None]
        rotary = head.rotary_emb(embeds, position_ids=positions)
        mask = torch.ones(len(text) - 1, len(text) - 1, dtype=torch.bool).tril()[None, None]
        # By place: the last argument, the cache, has another name before 5.24.
        state = head.layers[0](embeds, hidden, rotary, mask, positions, None)
        found[f"{number}.1"] = model.get_output_embeddings()(state)[0].float().contiguous()
    return found


def main():
    """Run the job and write its document."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    model = load(job)
    document = {
        "engine": "transformers",
        "versions": {name: version(name) for name in ("transformers", "torch")},
        "eos_ids": [],
        "counters": {},
    }
    if job["kind"] == "decode":
        document["texts"] = [rounds_of(model, prompt_ids, job["max_new_tokens"]) for prompt_ids in job["prompts"]]
    else:
        save_file(head_logits(model, job["texts"]), out.with_suffix(".safetensors"))
    out.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
