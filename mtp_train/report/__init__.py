"""Reports of runs and studies: ``report.json``, the HTML page, CSV tables, figures, and the summary for a terminal."""

from mtp_train.evaluation.results import ArmResult, GateResult, Lossless, RunReport, load_report
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
