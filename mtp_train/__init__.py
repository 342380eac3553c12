"""Put the MTP head back on a fine-tuned model, retrain it, prove the gain, and export it for stock engines.

Names are imported on first use, so that ``import mtp_train`` loads neither torch nor transformers. Results print as a
short text, and ``to_json()`` returns what the command line prints with ``--json``. ``recipes/python.md`` is a tour.

Example:
    >>> import mtp_train as mtp
    >>> mtp.inspect("my-27b", base="Qwen/Qwen3.6-27B").status
    'declared_but_missing'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtp_train.checkpoints.demo import DemoResult as DemoResult, demo as demo, demo_path as demo_path
    from mtp_train.errors import (
        ChangedInputError as ChangedInputError,
        CheckpointError as CheckpointError,
        DataError as DataError,
        FullDiskError as FullDiskError,
        GateRefusedError as GateRefusedError,
        LostProcessError as LostProcessError,
        MtpError as MtpError,
        OutOfMemoryError as OutOfMemoryError,
        OutputExistsError as OutputExistsError,
        RecipeError as RecipeError,
        StoppedError as StoppedError,
        TrainingError as TrainingError,
        UnsupportedModelError as UnsupportedModelError,
    )
    from mtp_train.evaluation.grid import EvaluationGrid as EvaluationGrid
    from mtp_train.evaluation.results import Report as Report
    from mtp_train.hooks.keep_head import KeepHead as KeepHead, keep_head as keep_head
    from mtp_train.hooks.train_beside import train_head_beside as train_head_beside
    from mtp_train.recipe.shipped import RecipesResult as RecipesResult, recipes as recipes
    from mtp_train.runs.check import CheckResult as CheckResult, check as check
    from mtp_train.runs.checkpoint_tools.inspect import Inspection as Inspection, inspect as inspect
    from mtp_train.runs.checkpoint_tools.write import (
        WriteResult as WriteResult,
        export as export,
        graft as graft,
        merge as merge,
    )
    from mtp_train.runs.decode import (
        EvaluationResult as EvaluationResult,
        GenerateResult as GenerateResult,
        compare as compare,
        converse as converse,
        evaluate as evaluate,
        generate as generate,
    )
    from mtp_train.runs.engine_counts import CountsResult as CountsResult, probe_endpoint as probe_endpoint
    from mtp_train.runs.engine_drafts import DraftsResult as DraftsResult, probe_drafts as probe_drafts
    from mtp_train.runs.pipeline import (
        RegenerateResult as RegenerateResult,
        RunResult as RunResult,
        open_report as open_report,
        regenerate as regenerate,
        run as run,
    )
    from mtp_train.runs.rescue import (
        ProbeResult as ProbeResult,
        RescueResult as RescueResult,
        probe as probe,
        rescue as rescue,
    )
    from mtp_train.runs.write_recipe import write_recipe as write_recipe

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "errors": (
        *("ChangedInputError", "CheckpointError", "DataError", "FullDiskError", "GateRefusedError", "LostProcessError"),
        *("MtpError", "OutOfMemoryError", "OutputExistsError", "RecipeError", "StoppedError", "TrainingError"),
        "UnsupportedModelError",
    ),
    "evaluation.grid": ("EvaluationGrid",),
    "evaluation.results": ("Report",),
    "hooks.keep_head": ("KeepHead", "keep_head"),
    "hooks.train_beside": ("train_head_beside",),
    "runs.check": ("CheckResult", "check"),
    "runs.checkpoint_tools.inspect": ("Inspection", "inspect"),
    "runs.checkpoint_tools.write": ("WriteResult", "export", "graft", "merge"),
    "runs.decode": ("EvaluationResult", "GenerateResult", "compare", "converse", "evaluate", "generate"),
    "runs.engine_counts": ("CountsResult", "probe_endpoint"),
    "runs.engine_drafts": ("DraftsResult", "probe_drafts"),
    "runs.rescue": ("ProbeResult", "RescueResult", "probe", "rescue"),
    "runs.pipeline": ("RegenerateResult", "RunResult", "open_report", "regenerate", "run"),
    "runs.write_recipe": ("write_recipe",),
    "recipe.shipped": ("RecipesResult", "recipes"),
    "checkpoints.demo": ("DemoResult", "demo", "demo_path"),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = ["__version__", *sorted(_MODULES)]

# Type checkers read the imports above. A __getattr__ would hide misspelt names from them.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
