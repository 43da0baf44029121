"""The report of a run in one HTML file: its contents, charts, pictures and page.

The page needs no network and no script. Everything in it that comes from data or from a model is escaped.
"""

from burnish.training.html_report.contents import Contents
from burnish.training.html_report.page import report_page, write_report

__all__ = ["Contents", "report_page", "write_report"]
