"""`report.html`: one run, or several, as a page that needs nothing else."""

from specens.analysis.html.colours import PALETTE
from specens.analysis.html.page import report

__all__ = ["PALETTE", "report"]
