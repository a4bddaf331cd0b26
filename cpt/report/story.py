"""The sections of a report, in the order in which one asks."""

from cpt.report.against_plan import against_plan
from cpt.report.curves import speed, stage_figures, training
from cpt.report.facts import facts, headline
from cpt.report.happened import events
from cpt.report.held_out import held_out
from cpt.report.missing import missing
from cpt.report.mixture import mixture
from cpt.report.record import Record
from cpt.report.scores import scores
from cpt.report.sources import sources
from cpt.report.texts import kept, not_run, samples, use
from cpt.runs.page import Section, html_page

ORDER = (
    held_out,
    scores,
    training,
    stage_figures,
    mixture,
    speed,
    against_plan,
    events,
    samples,
    sources,
    not_run,
    missing,
    use,
    kept,
)


def report_page(record: Record) -> str:
    """The whole page.

    Raises:
        ResourceError: plotly is not installed.
    """
    return html_page(
        record.folder.resolve().name,
        [Section("", [facts(record)]), *(section(record) for section in ORDER)],
        headline(record),
    )
