"""The report as one HTML file that needs nothing else: no network, no script, figures inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined

from mtp_train.report.figures import FigureFile
from mtp_train.report.schema import ArmResult, RunReport
from mtp_train.report.template import PAGE, STYLE
from mtp_train.report.wording import (
    COLUMNS,
    GLOSSARY,
    Arms,
    apart_sentence,
    arm_cells,
    capitalised,
    flatten,
    format_number,
    group_arms,
    headline,
    key_figures,
    lossless_sentence,
)


def render_page(report: RunReport, figures: Sequence[FigureFile], provenance: Mapping[str, Any]) -> str:
    """Return the page. Every name, path and reason in it is text: markup in one is shown, not obeyed."""
    groups = group_arms(report)
    depth = max((len(shares) for arm in report.arms.values() for _, shares in _per_depth(arm)), default=0)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(PAGE).render(
        style=STYLE,
        trunk=next((arm.trunk for arm in groups.alike.values()), ""),
        headline=headline(report),
        key_figures=key_figures(report),
        columns=COLUMNS,
        alike=_rows(groups.alike, ""),
        apart=_rows(groups.apart, "other trunk"),
        recorded=_rows(groups.recorded, "recorded"),
        apart_sentence=apart_sentence(groups),
        figures=[{"caption": f.caption, "base64": base64.b64encode(f.png).decode()} for f in figures],
        depth=depth,
        by_position=_by_position(report, depth),
        lossless_sentence=lossless_sentence(report.lossless),
        gate=report.gate,
        gate_reason=capitalised(report.gate.reason) if report.gate else "",
        settings=flatten(report.settings),
        provenance=flatten(provenance),
        glossary=GLOSSARY,
    )


def _rows(arms: Arms, note: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "note": note, "trunk": arm.trunk, "head": arm.head, "cells": arm_cells(arm)}
        for name, arm in arms.items()
    ]


def _per_depth(arm: ArmResult) -> list[tuple[str, Sequence[float | None]]]:
    figures: tuple[tuple[str, Sequence[float | None] | None], ...] = (
        ("marginal", arm.marginal),
        ("conditional", arm.conditional),
        ("dense", arm.dense),
        ("overlap", arm.overlap),
    )
    return [(kind, shares) for kind, shares in figures if shares]


def _by_position(report: RunReport, depth: int) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return (arm, lines), a line being a figure's name and its ``depth`` cells."""
    arms = []
    for name, arm in report.arms.items():
        lines = [
            (kind, [format_number(share, 3) for share in (*shares, *[None] * (depth - len(shares)))])
            for kind, shares in _per_depth(arm)
        ]
        if lines:
            arms.append((name, lines))
    return arms
