"""Decode prompts with llama.cpp and write down every round: ``PYTHON run_llama_cpp.py JOB.json OUT.json``.

Run by an interpreter that has llama-cpp-python, which is asked for tokens only. ``job["binary"]`` is llama.cpp's own
example ``llama-speculative-simple`` of the same version, ``job["model_file"]`` the GGUF that its converter made (in
f32: bf16 weights lose nothing, and sums are as exact as ours), ``job["draft_file"]`` that of the draft model, where the
job has one, or of a head beside its trunk. Where the binary's libraries are not beside it, set ``LD_LIBRARY_PATH``.

The binary takes text, so that every prompt is checked to give the same tokens there. It logs the first choice of every
drafted position, then how many drafts were accepted and which token came after them: a whole trace.

It differs from other engines in three ways. It drafts for the first time before any token of the answer is known, so
that there is no prefill round. Its MTP head reads one more row (the first token, beside a hidden state of zeros). It
ends at EOS, and somewhat past the token limit where not.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from llama_cpp import Llama, llama_vocab_is_eog

CACHE_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
DRAFTED = re.compile(r"draft candidate +0, pos +\d+: +(\d+) \(")
COMMITTED = re.compile(r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)")
TOTAL = re.compile(r"n_(drafted|accept) += (\d+)")
TRIED_AGAIN = "partial acceptance:"
MOST_ATTEMPTS = 10


def prompt_text(vocabulary, prompt_ids):
    """Return the text that llama.cpp reads as these tokens."""
    text = vocabulary.detokenize(prompt_ids, special=True)
    # As the binary reads it: with whatever the vocabulary puts before every text.
    found = vocabulary.tokenize(text, add_bos=True, special=True)
    if found != prompt_ids:
        raise SystemExit(f"prompt {prompt_ids}: llama.cpp reads it as {found}; expected the same tokens")
    return text.decode("utf-8")


def rounds_of(job, text):
    """Decode one prompt; return its rounds, the first of which has drafts too.

    The binary now and then exits before the last lines of its log are written. They hold its totals, so that such a log
    is seen, and the prompt decoded again.
    """
    for _ in range(MOST_ATTEMPTS):
        log = run(job, text)
        rounds = read_rounds(log)
        totals = {name: int(number) for name, number in TOTAL.findall(log)}
        found = {
            "drafted": sum(len(one["drafts"]) for one in rounds),
            "accept": sum(len(one["committed"]) - 1 for one in rounds),
        }
        if totals == found:
            return rounds
    raise SystemExit(f"{text!r}: {MOST_ATTEMPTS} logs without their end, or whose totals differ from their rounds")


def run(job, text):
    """Run the binary on one prompt; return its log."""
    cache = CACHE_TYPES[job["dtype"]]
    # Room for one round more than asked for, as none may be cut short.
    num_tokens = job["max_new_tokens"] + 2 * (job["depth"] + 1)
    command = [job["binary"], "-m", job["model_file"], *speculation_of(job)]
    command += ["--spec-draft-n-max", str(job["depth"]), "--spec-draft-p-min", "0"]
    command += ["-p", text, "--no-escape", "-n", str(num_tokens), "-c", "2048", "--temp", "0"]
    command += ["-ctk", cache, "-ctv", cache, "-ctkd", cache, "-ctvd", cache, "-fa", "off"]
    command += ["-t", "1", "-td", "1", "-fit", "off", "-lv", "5"]
    done = subprocess.run(command, capture_output=True, check=False)
    log = done.stderr.decode("utf-8", errors="replace")
    if done.returncode != 0 or TRIED_AGAIN in log:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}, or a round that was tried again\n{log}")
    return log


def speculation_of(job):
    """Return what to draft with: the model's own head, or a head or draft model that the job names, as a GGUF."""
    kind = "mtp" if job["draft"] is None else job["draft"]["kind"]
    beside = ["-md", job["draft_file"]] if "draft_file" in job else []
    return ["--spec-type", f"draft-{kind}", *beside]


def read_rounds(log):
    """Return the rounds that a log tells of."""
    rounds, drafts = [], []
    for line in log.splitlines():
        if drafted := DRAFTED.search(line):
            drafts.append(int(drafted[1]))
        elif committed := COMMITTED.search(line):
            num_accepted, num_drafts, last = map(int, committed.groups())
            # Near the token limit it drafts, and logs, more than it goes on to verify.
            rounds.append({"drafts": drafts[:num_drafts], "committed": [*drafts[:num_accepted], last]})
            drafts = []
    return rounds


def end_tokens(vocabulary):
    """Return the tokens that end a text; a GGUF may name more of them than the checkpoint's config does."""
    pointer = vocabulary._model.vocab
    return [token for token in range(vocabulary.n_vocab()) if llama_vocab_is_eog(pointer, token)]


def build_of(binary):
    """Return what the binary says of its version."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return next(line for line in (done.stderr + done.stdout).splitlines() if line.startswith("version:"))[9:]


def counters_of(texts):
    """Return what the log says in all; the limit does not show in it."""
    rounds = [one for text in texts for one in text]
    return {
        "drafts": len(rounds),
        "draft_tokens": sum(len(one["drafts"]) for one in rounds),
        "accepted_tokens": sum(len(one["committed"]) - 1 for one in rounds),
    }


def main():
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    vocabulary = Llama(job["model_file"], vocab_only=True, verbose=False)
    texts = [rounds_of(job, prompt_text(vocabulary, prompt_ids)) for prompt_ids in job["prompts"]]
    document = {
        "engine": "llama.cpp",
        "versions": {"llama.cpp": build_of(job["binary"]), "llama-cpp-python": version("llama-cpp-python")},
        "texts": texts,
        "eos_ids": end_tokens(vocabulary),
        "counters": counters_of(texts),
    }
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
