"""Decode prompts with llama.cpp and record every round: ``PYTHON run_llama_cpp.py JOB.json OUT.json``.

The interpreter needs llama-cpp-python, which is used for tokenisation only. ``job["binary"]`` is llama.cpp's example
``llama-speculative-simple`` of the same version. ``job["model_file"]`` is the GGUF of its converter (in f32: bf16
weights are exact there, and sums are as precise as ours). ``job["draft_file"]`` is the GGUF of a draft model, or of a
head that is stored separately. If the binary's libraries are elsewhere, set ``LD_LIBRARY_PATH``.

The binary takes text, so every prompt is checked to give the same tokens there. Its log has the argmax of every drafted
position, the number of accepted drafts and the token after them: a complete trace.

It differs from other engines in three ways. It drafts before the first token of the answer is known, so there is no
prefill round. Its MTP head reads an extra first row (the first token with a hidden state of zeros). It stops at EOS, or
somewhat past the token limit.
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
    """Return the text that llama.cpp tokenises to these ids."""
    text = vocabulary.detokenize(prompt_ids, special=True)
    # Tokenise like the binary, including the vocabulary's BOS token.
    found = vocabulary.tokenize(text, add_bos=True, special=True)
    if found != prompt_ids:
        raise SystemExit(f"prompt {prompt_ids}: llama.cpp reads it as {found}; expected the same tokens")
    return text.decode("utf-8")


def rounds_of(job, text):
    """Decode one prompt and return its rounds; the first round has drafts too.

    The binary sometimes exits before it writes the last lines of its log. Such a log lacks the totals, and the prompt
    is decoded again.
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
    """Run the binary on one prompt and return its log."""
    cache = CACHE_TYPES[job["dtype"]]
    # Room for one more round than requested, so that no round is cut.
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
    """Return the options of the drafter: the model's own head, or the head or draft model of the job, as a GGUF."""
    kind = "mtp" if job["draft"] is None else job["draft"]["kind"]
    beside = ["-md", job["draft_file"]] if "draft_file" in job else []
    return ["--spec-type", f"draft-{kind}", *beside]


def read_rounds(log):
    """Return the rounds in a log."""
    rounds, drafts = [], []
    for line in log.splitlines():
        if drafted := DRAFTED.search(line):
            drafts.append(int(drafted[1]))
        elif committed := COMMITTED.search(line):
            num_accepted, num_drafts, last = map(int, committed.groups())
            # Near the token limit, it drafts and logs more tokens than it verifies.
            rounds.append({"drafts": drafts[:num_drafts], "committed": [*drafts[:num_accepted], last]})
            drafts = []
    return rounds


def end_tokens(vocabulary):
    """Return the tokens that end a text; a GGUF may have more of them than the checkpoint's config."""
    pointer = vocabulary._model.vocab
    return [token for token in range(vocabulary.n_vocab()) if llama_vocab_is_eog(pointer, token)]


def build_of(binary):
    """Return the version that the binary prints."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return next(line for line in (done.stderr + done.stdout).splitlines() if line.startswith("version:"))[9:]


def main():
    """Run the job and write its document."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    vocabulary = Llama(job["model_file"], vocab_only=True, verbose=False)
    texts = [rounds_of(job, prompt_text(vocabulary, prompt_ids)) for prompt_ids in job["prompts"]]
    document = {
        "engine": "llama.cpp",
        "versions": {"llama.cpp": build_of(job["binary"]), "llama-cpp-python": version("llama-cpp-python")},
        "texts": texts,
        "eos_ids": end_tokens(vocabulary),
    }
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
