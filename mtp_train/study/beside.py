"""A served model beside the arms of a study: the same prompts, asked of a running server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.progress import Progress

from mtp_inference.sampling import Sampling, distribution_of
from mtp_train.data.answers import fit_of
from mtp_train.data.checked import spread
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import eos_token_ids, load_tokenizer, open_location
from mtp_train.report.cells import StudyReport
from mtp_train.study.endpoint import Served, measure_endpoint
from mtp_train.study.measure import Grid, grid_prompts

SERVED = "served"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that speaks OpenAI's API, and the checkpoint that it serves."""

    url: str
    checkpoint: str
    """For the tokenizer, the template and the tokens that end a text."""
    model: str | None
    """What the server calls it; None where it serves one model."""
    api_key_env: str | None
    concurrency: int

    def identity(self) -> dict[str, Any]:
        """Say what is asked, for the directory of a study; the key is written nowhere."""
        return asdict(self)


def ask(server: Server, grid: Grid, progress: Progress) -> Served:
    """Ask the server the grid's prompts, as they are, at each of its temperatures.

    Raises:
        MtpError: The server cannot be used, or the checkpoint's tokenizer cannot.
    """
    checkpoint = open_location(server.checkpoint)
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=False)
    return measure_endpoint(
        server.url,
        grid_prompts(grid, tokenizer, (None,))[None],
        tokenizer=tokenizer,
        eos_ids=eos_token_ids(checkpoint, tokenizer),
        vocab_size=text_config_of(checkpoint).vocab_size,
        temperatures=grid.temperatures,
        max_new_tokens=grid.max_new_tokens,
        concurrency=server.concurrency,
        model=server.model,
        api_key_env=server.api_key_env,
        seed=grid.seed,
        progress=progress,
    )


def judged(served: Served, trunk: Trunk, eos_ids: Collection[int]) -> Served:
    """Return what a server did together with whether its answers are the trunk's, by a sample at each temperature.

    Raises:
        CheckpointError: The trunk's logits are NaN or infinite.
    """
    found, warnings = [], list(served.document["warnings"])
    for temperature, answers in served.answers.items():
        fit = fit_of(
            trunk,
            spread([answer for answer in answers if answer[1]], f"{temperature}"),
            distribution_of(Sampling(temperature=temperature), trunk.lm_head_VD.device),
            is_greedy=temperature == 0.0,
            eos_ids=eos_ids,
        )
        verdict = fit.is_trunks if fit.can_tell or not fit.is_trunks else None
        found.append({"temperature": temperature, **fit._asdict(), "are_the_trunks": verdict})
        if verdict is None:
            warnings.append(
                f"{fit.tokens} tokens at temperature {temperature:g} are too few to tell whether they are the trunk's: "
                "ask more prompts, or for longer responses."
            )
        elif not verdict:
            warnings.append(
                f"Its answers at temperature {temperature:g} are not the trunk's: over {fit.answers} of them the trunk "
                f"gives the tokens a mean probability of {fit.found:.3f}, and its own {fit.expected:.3f} within "
                f"{fit.allowed:.3f}. The served model, its quantisation or its sampling differs."
            )
    return replace(served, document={**served.document, "answers": found, "warnings": warnings})


def with_served(report: StudyReport, served: Served) -> StudyReport:
    """Return the report with the served model as one more arm."""
    return replace(
        report,
        arms={**report.arms, SERVED: served.arm},
        cells=(*report.cells, *served.cells),
        endpoint=served.document,
    )
