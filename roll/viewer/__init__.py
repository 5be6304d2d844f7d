"""The run report: a page made from a run folder that explains a run down to its tokens."""

from roll.viewer.report import build_report
from roll.viewer.server import serve, view

__all__ = ["build_report", "serve", "view"]
