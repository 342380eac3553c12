"""Add a served model to a study as one more arm: send the same prompts to a running server."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.progress import Progress

from mtp_inference.sampling.distributions import Sampling, distribution_of
from mtp_train.data.answers import fit_of, spread
from mtp_train.evaluation.cells import StudyReport
from mtp_train.evaluation.grid import Grid, grid_prompts
from mtp_train.evaluation.served.measure import Served, measure_endpoint
from mtp_train.heads.diagnose import text_config_of
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.weights.locations import open_location

SERVED = "served"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server with the OpenAI API, and the checkpoint that it serves."""

    url: str
    checkpoint: str
    """Source of the tokenizer, the chat template and the EOS ids."""
    model: str | None
    """Name of the model in the server's list; None where it serves a single model."""
    api_key_env: str | None
    concurrency: int
    request_timeout_seconds: float
    """Longest wait for the server to send a part of a response."""

    def identity(self) -> dict[str, Any]:
        """Return the server's settings for the identity of a study: the name of the key's variable, never the key."""
        settings = asdict(self)
        # It changes no figure: an evaluation may be resumed with another one.
        del settings["request_timeout_seconds"]
        return settings


def ask(server: Server, grid: Grid, progress: Progress) -> Served:
    """Send the grid's unchanged prompts to the server at each of the grid's temperatures, and return the measurements.

    Raises:
        MtpError: The server or the checkpoint's tokenizer cannot be used.
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
        request_timeout_seconds=server.request_timeout_seconds,
        model=server.model,
        api_key_env=server.api_key_env,
        seed=grid.seed,
        progress=progress,
    )


def judged(served: Served, trunk: Trunk, eos_ids: Collection[int]) -> Served:
    """Return the measurements with a verdict on whether the trunk wrote the responses, from a sample per temperature.

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
                f"{fit.tokens} tokens at temperature {temperature:g} are too few to tell whether the trunk wrote them. "
                "Use more prompts or longer responses."
            )
        elif not verdict:
            warnings.append(
                f"The responses at temperature {temperature:g} are not the trunk's: over {fit.answers} responses, the "
                f"trunk gives the tokens a mean probability of {fit.found:.3f}, and its own tokens {fit.expected:.3f} "
                f"within {fit.allowed:.3f}. The served model, its quantisation or its sampling differs."
            )
    return replace(served, document={**served.document, "answers": found, "warnings": warnings})


def with_served(report: StudyReport, served: Served) -> StudyReport:
    """Return the report with the served model as an additional arm."""
    return replace(
        report,
        arms={**report.arms, SERVED: served.arm},
        cells=(*report.cells, *served.cells),
        endpoint=served.document,
    )
