"""The report of a run: its fields, its files, and the same figures for a terminal, a browser and a spreadsheet."""

from mtp_train.report.schema import ArmResult, GateResult, Lossless, RunReport, load_report
from mtp_train.report.table import arm_table, summary
from mtp_train.report.write import write_report

__all__ = [
    "ArmResult",
    "GateResult",
    "Lossless",
    "RunReport",
    "arm_table",
    "load_report",
    "summary",
    "write_report",
]
