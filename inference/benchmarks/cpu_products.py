#!/usr/bin/env python
"""Measure how fast a CPU thread reads the matrix of a product of few rows, by the way of the product.

    python inference/benchmarks/cpu_products.py --out inference/benchmarks/cpu

Figures are GB of the matrix per second of the thread's CPU time, medians over repeats in which the ways take turns. The
matrices exceed the caches, as the weights of a model do. ``linear`` is torch's own product; the others are those of
``mtp_inference/cpu_layers.py``, which has the choice between them. ``sum`` adds up the numbers of the matrix: a reading
without a product. Rows in bf16 are left out where the CPU does not multiply bf16 natively.

Prints a table, and last one line of JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from mtp_inference.bench.clock import Piece, take_turns
from mtp_inference.bench.machine import cpu_facts
from mtp_inference.bench.output import finish, markdown
from mtp_inference.cpu_layers import COLUMNS, PADDED_ROWS, FastLinear
from mtp_train.trunk.precision import bf16_support

CPU = torch.device("cpu")
SHAPES = ((65536, 1024), (3584, 1024), (4096, 2048), (1024, 3584), (512, 512))
"""Outputs and inputs."""
ROWS = (1, 2, 4, 8)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = ("sum", "linear", "packed", "padded", "columns")
BYTES = 400 * 10**6
"""Bytes of the matrices of one shape."""


def matrices(shape: tuple[int, int], dtype: torch.dtype, num_bytes: int) -> list[nn.Linear]:
    """Return as many layers of a shape as these bytes hold, at least one."""
    outputs, inputs = shape
    count = max(1, num_bytes // (outputs * inputs * dtype.itemsize))
    return [nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False) for _ in range(count)]


def ways(layers: Sequence[nn.Linear], num_rows: int) -> dict[str, Piece]:
    """Return the ways to multiply rows by each of the matrices in turn."""
    first = layers[0].weight
    rows_RI = torch.randn(num_rows, first.shape[1]).to(first.dtype)
    found: dict[str, Piece] = {"linear": partial(_multiply, [*layers], rows_RI)}
    settings = {"packed": (True, False, False)}
    if num_rows < PADDED_ROWS - 1:
        settings["padded"] = (True, False, True)
    if num_rows <= COLUMNS and first.dtype is torch.float32:
        settings["columns"] = (False, True, False)
    for name, (packs, by_columns, pads) in settings.items():
        products = [FastLinear(layer, packs=packs, by_columns=by_columns, pads=pads) for layer in layers]
        found[name] = partial(_multiply, products, rows_RI)
    if num_rows == 1 and first.dtype is torch.float32:
        found["sum"] = lambda: [layer.weight.sum() for layer in layers]
    return found


def _multiply(products: Sequence[nn.Linear | FastLinear], rows_RI: Tensor) -> None:
    for product in products:
        product(rows_RI)


@torch.no_grad()
def measure(shape: tuple[int, int], precision: str, num_bytes: int, repeats: int) -> list[dict[str, object]]:
    """Return one record for each number of rows: GB/s of each way."""
    layers = matrices(shape, DTYPES[precision], num_bytes)
    size = sum(layer.weight.nbytes for layer in layers)
    found = []
    for num_rows in ROWS:
        taken = take_turns(ways(layers, num_rows), repeats, CPU)
        speeds = {name: round(size / median(seconds) / 1e9, 1) for name, seconds in taken.items()}
        found.append({"matrix": f"{shape[0]} x {shape[1]}", "precision": precision, "rows": num_rows, **speeds})
    return found


def table(records: Sequence[dict[str, object]]) -> str:
    """Return the records in Markdown."""
    names = ("matrix", "precision", "rows", *WAYS)
    return markdown(names, ([record.get(name, "") for name in names] for record in records))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=BYTES, help="bytes of the matrices of one shape")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder for the JSON document, products.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    precisions = [name for name in DTYPES if name == "fp32" or bf16_support(CPU)[0]]
    results = [
        record
        for precision in precisions
        for shape in SHAPES
        for record in measure(shape, precision, options.bytes, options.repeats)
    ]
    document = {
        "benchmark": "cpu products",
        "hardware": cpu_facts(),
        "versions": {"torch": torch.__version__},
        "date": date.today().isoformat(),
        "unit": "GB/s",
        "results": results,
    }
    print(table(results))
    finish(document, options.out, "products.json")


if __name__ == "__main__":
    main()
