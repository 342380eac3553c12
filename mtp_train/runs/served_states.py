"""The hidden states of a run from a server of its trunk, of which only the ends are loaded here.

Before the first step the server proves itself (:func:`mtp_train.answers.states.prove`): its own most probable tokens
have to be those of lm_head(norm(state)).

Shapes: T tokens, L layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.answers.endpoint import Endpoint, read_api_key
from mtp_train.answers.states import StatesServer, prove
from mtp_train.checkpoints.files import Checkpoint, read_json
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.tokenize import Document
from mtp_train.errors import ChangedInputError
from mtp_train.families.served_states import states_command
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.sections import StatesSpec
from mtp_train.runs.run import Run
from mtp_train.train.fetched_states import FetchedStates
from mtp_train.trunk.ends import Ends
from mtp_train.trunk.precision import COMPUTE_DTYPES

SERVER_FILE = "states_server.json"
PROVED_TEXTS = 4


def served_layers(text_config: PretrainedConfig, layers: Sequence[int]) -> list[int]:
    """Return the states that a server of the trunk has to return, by the number of layers before them, ascending."""
    return sorted({*layers, text_config.num_hidden_layers})


def serving_command(recipe: Recipe, trunk: Checkpoint, layers: Sequence[int]) -> str:
    """Return the command that starts a server of the trunk's states."""
    directory = Path(recipe.run_dir).absolute() / "served"
    return states_command(str(trunk.path), trunk.config, layers, str(directory), recipe.data.seq_len_tokens)


@dataclass(frozen=True)
class StatesSource:
    """A server that gives a run's states, known to be the trunk's."""

    server: StatesServer
    ends: Ends
    layers: tuple[int, ...]
    """The layers whose inputs the head reads, see ``Ends.show_layers``."""
    identity: list[str]
    norm: nn.Module
    """Applied to the last state."""

    def fetch(self, texts: Iterable[Sequence[int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the states of each text, (T, D) as ``Ends.head_input`` takes them, as they arrive."""
        return ((number, self.hidden(states_TLD)) for number, states_TLD in self.server.states(texts))

    @torch.no_grad()
    def hidden(self, states_TLD: Tensor) -> Tensor:
        """Return the hidden states of a server's states."""
        place = {layer: number for number, layer in enumerate(self.server.layers)}
        last_TD = self.norm(states_TLD[:, -1].to(self.ends.lm_head_VD.device).float()).to(states_TLD)
        return torch.cat([last_TD, *(states_TLD[:, place[layer]] for layer in self.layers)], dim=-1)

    def states(self, documents: Sequence[Document], dtype: torch.dtype, kept: Collection[int] = ()) -> FetchedStates:
        """Return the states of documents in a dtype; some are read more than once."""
        endpoint = self.server.endpoint
        width = self.server.width * (1 + len(self.layers))
        stop = endpoint.stop_trying
        end = endpoint.close
        return FetchedStates(self.ends, documents, self.fetch, stop, end, width=width, dtype=dtype, kept=kept)


def open_source(
    run: Run, spec: StatesSpec, ends: Ends, texts: Sequence[Sequence[int]], layers: tuple[int, ...]
) -> StatesSource:
    """Connect to the recipe's server and let it prove itself; every process must call it.

    Args:
        texts: Of which some are sent for the proof.
        layers: The layers whose inputs the head reads, see ``Ends.show_layers``.

    Raises:
        DataError: The server cannot be used, or its states are not the trunk's.
        ChangedInputError: The run began with another server: another engine, release, model or settings.
    """
    inputs, accelerator, console = run.inputs, run.accelerator, run.progress.console
    endpoint = Endpoint(
        spec.endpoint,
        inputs.tokenizer,
        inputs.eos_ids,
        len(ends.lm_head_VD),
        api_key=read_api_key(spec.api_key_env),
        concurrency=max(1, spec.concurrency // accelerator.num_processes),
    )
    # The same reason is told once.
    endpoint.on_wait = cache(lambda reason: console.print(f"{reason}; waiting for it."))
    served = served_layers(ends.config, layers)
    command = serving_command(run.recipe, inputs.finetune, served)
    server = StatesServer(endpoint, served, int(ends.config.hidden_size), command=command)
    with ExitStack() as failed:
        failed.callback(endpoint.close)
        endpoint.choose_model(spec.model)
        if endpoint.adapted is not None:
            found = f"serves {endpoint.model}, an adapter on {endpoint.adapted}"
            raise endpoint.unusable(found, "the trunk itself", "Name that (train.states.model)")
        proved = texts[:: max(1, len(texts) // PROVED_TEXTS)][:PROVED_TEXTS]
        for _ in server.states(proved[:1]):
            # The first reply tells who answers.
            pass
        identity = server.identity()
        with accelerator.failing_together():
            if run.is_main:
                recorded = recorded_identity(run)
                if recorded not in (None, identity):
                    raise ChangedInputError(
                        f"{endpoint.url}: is {identity}; expected {recorded}, with which the run began "
                        f"({run.directory.path / SERVER_FILE}). Serve that again, or begin a new run."
                    )
                prove_trunk(server, proved, ends, COMPUTE_DTYPES[run.recipe.train.precision], console)
                # Not before the proof: a server of another model must not be the one that the run began with.
                write_json(run.directory.path / SERVER_FILE, {"identity": identity})
        failed.pop_all()
    return StatesSource(server, ends, layers, identity, ends.last_norm())


def prove_trunk(
    server: StatesServer, texts: Sequence[Sequence[int]], ends: Ends, dtype: torch.dtype, console: Console
) -> None:
    """Check that the server's states are the trunk's, and print at how many positions they agree."""

    def logits_of(states_TD: Tensor) -> Tensor:
        return ends.logits(ends.of_last_layer(states_TD.to(ends.lm_head_VD.device, dtype)))

    with ends.computing_in(dtype):
        positions, agreeing = prove(server, texts, logits_of)
    endpoint = server.endpoint
    console.print(
        f"{endpoint.url}: prefers the trunk's token at {agreeing} of {positions} positions. It serves "
        f"{endpoint.checkpoint}, whose layers are taken for the trunk's.",
    )


def recorded_identity(run: Run) -> list[str] | None:
    """Return the identity of the server that the run began with, which ends with the dtype of its states."""
    path = run.directory.path / SERVER_FILE
    return read_json(path)["identity"] if path.is_file() else None
