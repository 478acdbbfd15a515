"""``Reports``: reports of epochs, as a table in terminals and notebooks."""

from __future__ import annotations

from hapi_client.reports.epoch_report import EpochReport
from hapi_client.reports.html import html_table
from hapi_client.reports.run_tables import essentials


class Reports(list[EpochReport]):
    """A list that is shown as a table."""

    def __repr__(self) -> str:
        if not self:
            return "no epoch has begun"
        return "\n".join(essentials(self).lines())

    def _repr_html_(self) -> str:
        return html_table(essentials(self)) if self else repr(self)
