"""The tables and pictures of the atlas, from what :mod:`atlas_maker.claims` found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from atlas_maker.cells import OWN
from atlas_maker.claims import GRAFT, LEVEL, SELECTED, Record, decoded, judged, score


def page(records: Mapping[str, Record], pictures: Path) -> None:
    """Print the tables and one line of JSON, and draw the pictures."""
    found = judged(records)
    for part in (of_finetunes, of_claims, of_scores, of_rl):
        print("\n".join(part(found)), end="\n\n")
    pictures.mkdir(parents=True, exist_ok=True)
    for name, draw in (("pays", draw_pays), ("claims", draw_claims)):
        save(draw(found), pictures / f"{name}.svg")
    save(draw_scores(records), pictures / "scores.svg")
    print(json.dumps(found))


def row_of(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def of_finetunes(found: Mapping[str, Any]) -> Iterator[str]:
    yield row_of("fine-tune", "KL", "overlap", "graft", "retrained", "gain [95 %]", "at a fifth")
    yield row_of(*["---"] * 7)
    for one in found["outcomes"]:
        both = [one.get(name) for name in ("retrained", "fifth")]
        taus = ["" if cell is None else f"{cell['tau'][0]:.2f}" for cell in both]
        interval = both[0] and both[0]["ci95"][0]
        gained = f"{both[0]['tau'][0] - one['graft'][0]:+.2f} {span(interval)}" if interval else ""
        figures = (f"{one['kl']:.2f}", f"{one['overlap']:.2f}", f"{one['graft'][0]:.2f}")
        yield row_of(f"`{one['finetune']}`", *figures, taus[0], gained, taus[1])


def of_claims(found: Mapping[str, Any]) -> Iterator[str]:
    yield row_of("difference in tau", "of", "greedy", "temperature 0.7")
    yield row_of(*["---"] * 4)
    rows = found["claims"]
    for greedy, sampled in zip(rows[::2], rows[1::2], strict=True):
        if "mean" in greedy:
            yield row_of(greedy["contrast"], len(greedy["gains"]), *map(claim, (greedy, sampled)))


def claim(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:+.2f} {span(row['ci95'])}{'*' * row['survives']}"


def span(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:+.2f}, {interval[1]:+.2f}]"


def of_scores(found: Mapping[str, Any]) -> Iterator[str]:
    yield row_of("score", "own answers", "corpus")
    yield row_of(*["---"] * 3)
    for name in dict.fromkeys(one["score"] for one in found["selection"]):
        right = (f"{one['right']}/{one['pairs']}" for one in found["selection"] if one["score"] == name)
        yield row_of(f"`{name.removeprefix('held_out_')}`", *right)


def of_rl(found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["before_rl"]:
        words = [f"{head} {tau:.2f}" for head, tau in row["tau"].items()]
        words += [f"{pair} {value:+.2f} {span(bounds)}" for pair, (value, *bounds) in row["differences"].items()]
        yield row_of(row["finetune"], row["temperature"], *words)


def draw_pays(found: Mapping[str, Any]) -> plt.Figure:
    """Draw greedy tau before and after training over how far the fine-tune moved."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for one in found["outcomes"]:
        axes.plot(one["kl"], one["graft"][0], "s", color="#D55E00", label="graft")
        for name, colour in (("retrained", "#0072B2"), ("fifth", "#56B4E9")):
            if name in one:
                axes.plot([one["kl"]] * 2, [one["graft"][0], one[name]["tau"][0]], color="#d9d9d9", zorder=0)
                axes.plot(one["kl"], one[name]["tau"][0], "o", color=colour, label=name)
        axes.annotate(
            one["finetune"], (one["kl"], one["graft"][0]), xytext=(4, -10), textcoords="offset points", size=7
        )
    axes.set(xlabel="KL of the fine-tune from its base, nats a token", ylabel="tau, greedy")
    axes.set_xscale("symlog", linthresh=0.1)
    axes.legend(*unique(axes))
    return figure


def draw_claims(found: Mapping[str, Any]) -> plt.Figure:
    """Draw every claim with its interval."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    known = [row for row in found["claims"] if "mean" in row]
    for place, row in enumerate(reversed(known)):
        low, high = row["ci95"]
        colour = "#0072B2" if row["survives"] else "#888888"
        axes.plot([low, high], [place] * 2, color=colour)
        axes.plot(row["mean"], place, "o", color=colour)
    names = [f"{row['contrast']}, T={row['temperature']}" for row in reversed(known)]
    axes.set_yticks(range(len(known)), names, fontsize=7)
    axes.axvline(0, color="#222222", linewidth=0.8)
    axes.set(xlabel=f"difference in tau, {1 - LEVEL:.0%} interval over fine-tunes")
    return figure


def draw_scores(records: Mapping[str, Record]) -> plt.Figure:
    """Draw decoded tau over the score that ``train.select`` uses, a line from every graft to its trained heads."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, record in records.items():
        heads = [record[GRAFT], *record.get("cells", {}).values()]
        axes.plot([score(one, OWN, SELECTED) for one in heads], [decoded(one) for one in heads], ".", label=name)
    axes.set(xlabel="teacher-forced tau on text kept from training", ylabel="decoded tau on new prompts")
    axes.legend(fontsize=7, ncols=2)
    return figure


def unique(axes: plt.Axes) -> tuple[list[Any], list[str]]:
    """Return the handles and labels of a legend, each label once."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return list(handles.values()), list(handles)


def save(figure: plt.Figure, path: Path) -> None:
    # Else every picture has new ids.
    plt.rcParams["svg.hashsalt"] = path.name
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
