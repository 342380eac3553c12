"""A served model beside the arms of a study: the same prompts, asked of a running server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.progress import Progress

from mtp_train.heads.diagnose import text_config_of
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


def with_served(report: StudyReport, served: Served) -> StudyReport:
    """Return the report with the served model as one more arm."""
    return replace(
        report,
        arms={**report.arms, SERVED: served.arm},
        cells=(*report.cells, *served.cells),
        endpoint=served.document,
    )
