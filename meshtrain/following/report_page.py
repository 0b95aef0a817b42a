"""A job as one HTML file, which opens without a network: how it went, with what, and how it ended.

What other devices and scripts have written is escaped, and shown as a terminal would show it last. The page runs
nothing and loads nothing, and says so to the browser.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

from meshtrain.following.shown_text import clock_text, human_seconds, printable_lines
from meshtrain.following.status_line import trains_in_groups
from meshtrain.following.watching import has_ended, outcome_lines
from meshtrain.pictures.curves_picture import PANELS_MAX, curves_svg
from meshtrain.pictures.presence_picture import Spell, presence_svg
from meshwire.job_figures import prediction_text, speed_text
from meshwire.jobs.files import human_bytes
from meshwire.messages.course import JobCourse
from meshwire.messages.job import RankReport
from meshwire.peer_news import part_of
from meshwire.text import printable

OWN_PANELS = 3  # of the script's values; the rest of the panels are ours
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;
color:#24292f;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}.dim{color:#59636e}
.well{color:#116329}.ill{color:#a40e26}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top;
border-bottom:1px solid #d8dee4}th{font-weight:600}th[scope=row]{white-space:nowrap}
.scroll{overflow-x:auto}pre{overflow-x:auto;background:#f6f8fa;padding:.6rem .8rem;border-radius:6px;font-size:13px}
svg{width:100%;height:auto;max-width:100%}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}.dim{color:#9da7b1}pre{background:#161b22}
th,td{border-color:#2a313a}.well{color:#56d364}.ill{color:#ff7b72}}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def report_html(course: JobCourse, log_ends: Mapping[int, str], made_by: str, now_s: float) -> str:
    """The file.

    Args:
        log_ends: the last lines of ranks' logs, safe to show; or why they are not there.
        made_by: the version of meshtrain.
        now_s: Unix time.
    """
    job = course.summary
    head, *rest = outcome_lines(job)
    ended = has_ended(job)
    kind = "" if not ended else "well" if job.state == "succeeded" else "ill"
    title = f"{printable(job.name)}, job {job.job}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="{kind}"><strong>{_text(head if ended else f"job {job.job} is {job.state}")}</strong></p>',
        *([_lines(chr(10).join(rest))] if rest and ended else []),
        *_lead(course, now_s),
        *_section("Loss, speed, devices and bytes, by round", _curves(course)),
        *_section("Who was there when", _presence(course, now_s)),
        *_section("Devices", _devices(course)),
        *_section("Settings", _table("Settings", (), course.settings)),
        *_section("The end of each log", _logs(course, log_ends)),
        f'<p class="dim">Made by meshtrain {escape(made_by)} on {clock_text(now_s)}. All of the logs: '
        f"<code>meshtrain logs {job.job}</code>; what the scripts wrote: <code>meshtrain get {job.job}</code></p>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def _text(text: str) -> str:
    return escape(printable_lines(text))


def _lines(text: str) -> str:
    """Lines as they are. Who has no mouse scrolls long ones by its focus."""
    return f'<pre tabindex="0">{_text(text) or "(empty)"}</pre>'


def _section(title: str, content: Iterable[str]) -> Iterator[str]:
    yield f"<section><h2>{escape(title)}</h2>"
    yield from content
    yield "</section>"


def _table(name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0"><table>'
    if heads:
        yield "<tr>" + "".join(f'<th scope="col">{escape(head)}</th>' for head in heads) + "</tr>"
    for first, *rest in rows:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in rest)
        yield f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>'
    yield "</table></div>"


def _lead(course: JobCourse, now_s: float) -> Iterator[str]:
    job = course.summary
    began_s = job.started_at_s or job.created_at_s
    took = human_seconds((job.ended_at_s or now_s) - began_s)
    facts = [f"begun {clock_text(began_s)}, {'took' if has_ended(job) else 'runs for'} {took}"]
    facts += [line for line in (speed_text(job), prediction_text(job)) if line is not None]
    yield f'<p class="dim">{_text("; ".join(facts))}</p>'


def _curves(course: JobCourse) -> Iterator[str]:
    points = course.points
    curves: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        for name, value in point.values:
            if name in curves or len(curves) < OWN_PANELS:
                curves.setdefault(name, []).append((point.round, value))
    ours: dict[str, list[tuple[int, float]]] = {
        "samples/s, all together": [(one.round, one.samples_s) for one in points if one.samples_s is not None],
        "devices that compute": [(one.round, float(one.learning)) for one in points],
        "MB sent in a round, by all": [
            (after.round, (after.sent_bytes - before.sent_bytes) / (after.round - before.round) / 1e6)
            for before, after in pairwise(points)
            if after.round > before.round and after.sent_bytes >= before.sent_bytes
        ],
    }
    curves |= {name: curve for name, curve in ours.items() if curve and name not in curves}
    if trains_in_groups(course.summary):
        yield "<p>The scripts exchanged by torch.distributed: of their steps and losses nothing is known here.</p>"
        return
    if not points:
        yield "<p>No round was completed while this device looked.</p>"
        return
    if not any(point.values for point in points):
        yield "<p>The script has logged no loss; with <code>mt.log(loss=loss)</code> it stands here.</p>"
    assert len(curves) <= PANELS_MAX
    yield curves_svg(f"The rounds of job {course.summary.job}", curves)


def _presence(course: JobCourse, now_s: float) -> Iterator[str]:
    job, changes = course.summary, course.presence
    if not changes:
        yield "<p>The job has not begun, as far as this device saw.</p>"
        return
    end_s = max(changes[-1].at_s, job.ended_at_s or now_s)
    ends_s = [*(change.at_s for change in changes[1:]), end_s]
    spells = [
        Spell(change.at_s, until_s, frozenset(change.present), frozenset(change.learning))
        for change, until_s in zip(changes, ends_s, strict=True)
    ]
    names = [member.name for member in job.members]
    ends = clock_text(changes[0].at_s), clock_text(end_s)
    yield presence_svg(f"Who took part in job {job.job}", names, spells, ends)
    yield '<p class="dim">Full colour: it computes; light: it is there, and loads the model or passes on.</p>'
    yield from _table(
        "Changes of who was there",
        ("From", "Generation", "Compute", "Are there, too"),
        [
            (
                clock_text(change.at_s),
                str(change.generation),
                _names(names, change.learning),
                _names(names, (rank for rank in change.present if rank not in change.learning)),
            )
            for change in changes
        ],
    )


def _names(names: Sequence[str], ranks: Iterable[int]) -> str:
    return ", ".join(printable(names[rank]) for rank in ranks if rank < len(names)) or "-"


def _devices(course: JobCourse) -> Iterator[str]:
    job = course.summary
    software, reports = dict(course.software), {report.rank: report for report in job.ranks}
    rows = []
    for rank, member in enumerate(job.members):
        runs = software.get(rank)
        metrics = reports.get(rank, RankReport(job=job.job, rank=rank, state="")).metrics
        rows.append(
            (
                f"{rank} {printable(member.name)}",
                part_of(job, rank),
                *(("-", "-") if metrics.stage == "process group" else (f"{metrics.step:,}", f"{metrics.samples:,}")),
                human_bytes(metrics.sent_bytes),
                human_seconds(metrics.exposed_s),
                "not known"
                if runs is None
                else f"meshtrain {runs.meshtrain}, Python {runs.python}, torch {runs.torch or 'none'}, {runs.system}",
            )
        )
    heads = ("Device", "Its part", "Steps", "Samples", "Sent", "Waited for exchanges", "Software")
    yield from _table("Devices", heads, rows)


def _logs(course: JobCourse, log_ends: Mapping[int, str]) -> Iterator[str]:
    for rank, text in sorted(log_ends.items()):
        yield f"<h3>{rank} {escape(printable(course.summary.members[rank].name))}</h3>"
        yield _lines(text)
