"""The report as one HTML file that needs nothing else: no network, no script, figures inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined

from mtp_train.acceptance_gate import setting_name
from mtp_train.report.figures import FigureFile
from mtp_train.report.schema import ArmResult, RunReport
from mtp_train.report.template import PAGE, STYLE
from mtp_train.report.wording import (
    COLUMNS,
    GATE_COLUMNS,
    GLOSSARY,
    apart_sentence,
    arm_cells,
    capitalised,
    flatten,
    format_number,
    gate_rows,
    group_arms,
    headline,
    held_out_sentence,
    key_figures,
    lossless_sentence,
    power_sentence,
    recorded_sentence,
)


def render_page(report: RunReport, figures: Sequence[FigureFile], provenance: Mapping[str, Any]) -> str:
    """Return the page. Every name, path and reason in it is text: markup in one is shown, not obeyed."""
    groups = group_arms(report)
    trunk = next((arm.trunk for arm in groups.alike.values()), "")
    values = {
        "headline": headline(report),
        "key_figures": key_figures(report),
        "alike": arm_rows(groups.alike, "", focus="retrained"),
        "apart": arm_rows(groups.apart, "other trunk"),
        "recorded": arm_rows(groups.recorded, "recorded"),
        "apart_sentence": apart_sentence(groups, report.settings),
        "recorded_sentence": recorded_sentence(groups),
        "held_out_sentence": held_out_sentence(report.settings),
        "figures": embedded(figures),
        "served": served_groups(report),
        "gate": report.gate,
        "gate_columns": GATE_COLUMNS,
        "gate_rows": gate_rows(report.gate),
        "power": power_sentence(report.gate),
        "gate_reason": capitalised(report.gate.reason) if report.gate else "",
        "glossary": GLOSSARY,
    }
    return fill(PAGE, STYLE, shared_values(report, trunk, provenance) | values)


def served_groups(report: RunReport) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (setting, arms as the template takes them) of every setting but the first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in report.cells:
        name = setting_name(cell.temperature, cell.top_p, cell.top_k, cell.rule)
        found.setdefault(name, []).extend(arm_rows({cell.arm: cell}, "", focus="retrained"))
    return list(found.items())


def fill(template: str, style: str, values: Mapping[str, Any]) -> str:
    """Fill a template; only the style sheet is taken for markup."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(template).render({"style": style, **values})


def shared_values(report: RunReport, subject: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every report's page shows, whatever its kind."""
    depth = max((len(shares) for arm in report.arms.values() for _, shares in _per_depth(arm)), default=0)
    return {
        "subject": subject,
        "columns": COLUMNS,
        "depth": depth,
        "by_position": _by_position(report, depth),
        "lossless_sentence": lossless_sentence(report.lossless),
        "settings": flatten(report.settings),
        "provenance": flatten(provenance),
    }


def embedded(figures: Iterable[FigureFile]) -> list[dict[str, str]]:
    """Return figures as the template takes them."""
    return [{"caption": figure.caption, "base64": base64.b64encode(figure.png).decode()} for figure in figures]


def arm_rows(arms: Mapping[str, ArmResult], note: str, focus: str | None = None) -> list[dict[str, Any]]:
    """Return arms as the template takes them; the one in focus is set off."""
    return [
        {
            "name": name,
            "note": note,
            "trunk": arm.trunk,
            "head": arm.head,
            "cells": arm_cells(arm),
            "focus": name == focus,
        }
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
