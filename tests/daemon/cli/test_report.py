"""`report`: one file that tells how a job went, loads nothing, runs nothing, and takes nobody's text for its own."""

import json
import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshtrain.following.report_page import report_html
from meshtrain.following.shown_text import clock_text
from meshtrain.pictures.presence_picture import Spell, presence_svg
from meshwire import limits
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.course import CoursePoint, CoursePresence, GetCourse, JobCourse
from meshwire.messages.envelope import Failure
from meshwire.messages.job import Fetch, Fetched, JobSummary, Metrics, RankReport
from meshwire.messages.local import GetJobs
from tests.daemon.fakedaemon import JOB, SOFTWARE, Endpoint, known_jobs, member, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

EVIL = "<script>alert(1)</script>\"'&\x1b[2J\u202e"
BEGAN_S = 1_790_000_000.0


def course_of(job: JobSummary, **changes: object) -> JobCourse:
    fields: dict[str, object] = {
        "summary": job,
        "settings": (("sync", "ssp:2"), ("codec", "fp16")),
        "software": ((0, SOFTWARE),),
        "points": tuple(
            CoursePoint(
                at_s=BEGAN_S + at,
                round=10 * at,
                values=(("loss", 3.0 / at),),
                samples_s=100.0 * at,
                sent_bytes=2_000_000 * at,
                learning=2 - at // 3,
            )
            for at in range(1, 5)
        ),
        "presence": (
            CoursePresence(at_s=BEGAN_S, generation=1, present=(0, 1), learning=(0,)),
            CoursePresence(at_s=BEGAN_S + 9, generation=2, present=(0, 1), learning=(0, 1)),
            CoursePresence(at_s=BEGAN_S + 20, generation=3, present=(0,), learning=(0,)),
        ),
    }
    return JobCourse(**(fields | changes))


class Page(HTMLParser):
    """What a browser would make of it: elements, and the text that is seen."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.asked: list[str] = []  # addresses of anything that would be loaded, and handlers
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.asked += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        self.asked += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.chdir(tmp_path)
    endpoint = Endpoint(tmp_path / "data")
    job = summary()
    endpoint.answers[GetJobs] = known_jobs(job)
    endpoint.answers[GetCourse] = course_of(job)
    data = b"".join(b"step %d\n" % at for at in range(100))
    endpoint.answers[Fetch] = lambda body, _: Fetched(
        data=data[body.offset_bytes : body.offset_bytes + body.max_bytes], total_bytes=len(data), end=True
    )
    yield endpoint
    endpoint.close()


def test_one_file_tells_it_all_and_asks_for_nothing(endpoint: Endpoint, tmp_path: Path) -> None:
    result = run("report", "train", "-o", "report.html", "--data-dir", str(endpoint.data_dir))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "report.html\n"
    html = (tmp_path / "report.html").read_text()
    page = Page(html)
    for said in (
        "succeeded",
        "ssp:2",
        "fp16",
        "torch 2.13.0",
        "loss",
        "samples/s",
        "MB sent in a round",
        "anna",
        "bert",
    ):
        assert said in page.text, said
    assert "step 99" in page.text
    assert "step 10\n" not in page.text  # the end of the log
    assert page.asked == []
    assert "script" not in page.elements
    assert "http" not in html.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in html
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        assert ElementTree.fromstring(picture).find("{http://www.w3.org/2000/svg}title") is not None


def test_the_file_is_named_by_the_job_and_nothing_is_overwritten(endpoint: Endpoint, tmp_path: Path) -> None:
    folder = str(endpoint.data_dir)
    assert run("report", "--data-dir", folder).stdout == f"report-{JOB}.html\n"
    again = run("report", "--data-dir", folder)
    assert again.exit_code == 1
    assert "exists" in again.stderr
    assert "--force" in again.stderr
    assert run("report", "--force", "--data-dir", folder).exit_code == 0
    nowhere = run("report", "-o", str(tmp_path / "no" / "such.html"), "--data-dir", folder)
    assert nowhere.exit_code == 1
    assert "cannot write" in nowhere.stderr


def test_json_is_the_course(endpoint: Endpoint) -> None:
    result = run("report", "--json", "--data-dir", str(endpoint.data_dir))
    document = json.loads(result.stdout)
    assert [point["round"] for point in document["points"]] == [10, 20, 30, 40]
    assert document["summary"]["job"] == JOB


def test_what_others_wrote_is_text_and_nothing_else() -> None:
    members = (member("ab" * 32, EVIL[:30]), member("cd" * 32, "bert"))
    report = RankReport(job=JOB, rank=0, state="failed", error=EVIL, failure=f"rank 0: {EVIL}", metrics=Metrics())
    job = summary(JobState.FAILED, members=members, name=EVIL[:40], error=EVIL, ranks=(report,), script="t.py")
    points = (
        CoursePoint(at_s=1.0, round=1, values=((EVIL, 1.0),)),
        CoursePoint(at_s=2.0, round=2, values=((EVIL, 2.0),)),
    )
    course = course_of(job, settings=((EVIL, EVIL),), points=points)
    html = report_html(course, {0: EVIL, 1: EVIL}, "1", BEGAN_S)
    page = Page(html)
    assert "script" not in page.elements
    assert "<script>alert(1)" in page.text  # shown as it was typed
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert page.asked == []
    for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(picture)


def test_a_failure_says_where_it_came_from() -> None:
    failure = "rank 1 (bert): train.py, line 7: ValueError: no such file"
    reports = (RankReport(job=JOB, rank=1, state="failed", error=failure, failure=failure),)
    job = summary(JobState.FAILED, error=failure, ranks=reports)
    text = Page(report_html(course_of(job), {}, "1", BEGAN_S)).text
    assert "train.py, line 7" in text
    assert "bert" in text
    assert "failed" in text


def test_a_job_that_has_not_begun_or_logged_says_so() -> None:
    job = summary(JobState.RUNNING, ended_at_s=None)
    text = Page(report_html(course_of(job, points=(), presence=(), software=()), {}, "1", BEGAN_S)).text
    assert "No round was completed" in text
    assert "has not begun" in text
    assert "is running" in text
    silent = course_of(job, points=(CoursePoint(at_s=1.0, round=1, learning=1),))
    assert "mt.log(loss=loss)" in Page(report_html(silent, {}, "1", BEGAN_S)).text


def rows(html: str, section: str) -> list[list[str]]:
    """Cells of the table below a title."""
    table = html.partition(f"<h2>{section}</h2>")[2].partition("</section>")[0].partition("<table>")[2]
    return [
        [unescape(re.sub("<[^>]+>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in re.findall(r"<tr>.*?</tr>", table.partition("</table>")[0])
    ]


def test_each_devices_figures_are_its_own() -> None:
    figures = (
        Metrics(step=40, samples=1280, sent_bytes=3 << 20, exposed_s=12.0),
        Metrics(step=30, samples=960, sent_bytes=5 << 20, exposed_s=150.0),
    )
    ranks = tuple(RankReport(job=JOB, rank=at, state="succeeded", metrics=one) for at, one in enumerate(figures))
    html = report_html(course_of(summary(ranks=ranks)), {}, "1", BEGAN_S)
    heads, anna, bert = rows(html, "Devices")
    assert heads[2:] == ["Steps", "Samples", "Sent", "Waited for exchanges", "Software"]
    assert [anna[0], *anna[2:6]] == ["0 anna", "40", "1,280", "3.0 MiB", "12 s"]
    assert [bert[0], *bert[2:]] == ["1 bert", "30", "960", "5.0 MiB", "2 min", "not known"]
    assert anna[6] == "meshtrain 0.1.0, Python 3.11.7, torch 2.13.0, Linux x86_64"


def test_a_job_of_process_groups_has_no_figures_of_steps() -> None:
    """P5."""
    metrics = Metrics(stage="process group", sent_bytes=3 << 20)
    ranks = (RankReport(job=JOB, rank=0, state="succeeded", metrics=metrics),)
    html = report_html(course_of(summary(ranks=ranks), points=()), {}, "1", BEGAN_S)
    assert "The scripts exchanged by torch.distributed" in html
    assert "No round" not in html
    assert rows(html, "Devices")[1][2:5] == ["-", "-", "3.0 MiB"]


def test_who_was_there_when_is_told_change_by_change() -> None:
    html = report_html(course_of(summary()), {}, "1", BEGAN_S + 1000)
    assert rows(html, "Who was there when")[1:] == [
        [clock_text(BEGAN_S), "1", "anna", "bert"],
        [clock_text(BEGAN_S + 9), "2", "anna, bert", "-"],
        [clock_text(BEGAN_S + 20), "3", "anna", "-"],
    ]
    picture = html.partition("<h2>Who was there when</h2>")[2]
    assert clock_text(BEGAN_S + 36) in picture.partition("</svg>")[0], "it ends with the job, not with the report"
    page, *bars = [float(x) for x in re.findall(r'<rect[^>]* width="([\d.]+)"', picture.partition("</svg>")[0])]
    assert page > bars[0]
    assert bars[0] == pytest.approx(bars[1] * 9 / 11, rel=0.01), "9 s of anna alone, 11 s of both"


def test_curves_end_with_what_was_told_last() -> None:
    text = Page(report_html(course_of(summary()), {}, "1", BEGAN_S)).text
    for curve in (
        "loss 0.75",
        "samples/s, all together 400",
        "devices that compute 1",
        "MB sent in a round, by all 0.2",
    ):
        assert curve in text, curve
    values = tuple((f"own {at}", 1.0) for at in range(5))
    points = tuple(CoursePoint(at_s=1.0 + at, round=at, values=values) for at in (1, 2))
    text = Page(report_html(course_of(summary(), points=points), {}, "1", BEGAN_S)).text
    assert [f"own {at}" in text for at in range(5)] == [True] * 3 + [False] * 2, "three of the script's own"
    sent = ((5, 9), (5, 12), (6, 3), (7, 2003))
    again = tuple(CoursePoint(at_s=1.0, round=at, sent_bytes=so_far) for at, so_far in sent)
    text = Page(report_html(course_of(summary(), points=again), {}, "1", BEGAN_S)).text
    assert "by all 0.002" in text
    assert "-9e-06" not in text, "what a daemon counts anew is no round of negative size"


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        (JobState.SUCCEEDED, "well", ", took 35 s"),
        (JobState.FAILED, "ill", ", took 35 s"),
        (JobState.RUNNING, "", ", runs for 17 min"),
    ],
)
def test_how_it_stands_and_how_long_it_took(state: JobState, kind: str, said: str) -> None:
    job = summary(state) if state is not JobState.RUNNING else summary(state, ended_at_s=None)
    html = report_html(course_of(job), {}, "7.8", BEGAN_S + 1000)
    assert f'<p class="{kind}"><strong>job {JOB} ' in html
    assert said in Page(html).text
    assert "begun " + clock_text(BEGAN_S + 1) in Page(html).text
    assert f"Made by meshtrain 7.8 on {clock_text(BEGAN_S + 1000)}" in Page(html).text


def test_a_log_that_cannot_be_had_is_no_reason_against_a_report(endpoint: Endpoint, tmp_path: Path) -> None:
    def fetch(body: Fetch, _: object) -> Fetched | Failure:
        if body.rank == 1:
            return Failure(error="bert is not linked now")
        data = b"\x1b[31mred\x1b[0m\r\nlast\n"
        return Fetched(data=data[body.offset_bytes :], total_bytes=len(data), end=True)

    endpoint.answers[Fetch] = fetch
    assert run("report", "-o", "r.html", "--data-dir", str(endpoint.data_dir)).exit_code == 0
    html = (tmp_path / "r.html").read_text()
    assert '<h3>0 anna</h3>\n<pre tabindex="0">red\nlast</pre>' in html
    assert '<h3>1 bert</h3>\n<pre tabindex="0">(not here: bert is not linked now)</pre>' in html


def test_a_page_of_the_longest_course_is_of_a_size_to_be_sent() -> None:
    values = tuple((f"value {at}", sys.float_info.max) for at in range(limits.COURSE_VALUES_MAX))
    points = tuple(CoursePoint(at_s=1.0, round=at, values=values) for at in range(1, limits.COURSE_POINTS_MAX + 1))
    presence = tuple(
        CoursePresence(at_s=float(at), generation=at, present=(0, 1), learning=(at % 2,))
        for at in range(1, limits.COURSE_PRESENCE_MAX + 1)
    )
    html = report_html(course_of(summary(), points=points, presence=presence), {}, "1", BEGAN_S)
    assert len(html) < 600_000


def test_each_bar_lies_in_its_time() -> None:
    spells = [
        Spell(0.0, 10.0, frozenset({0, 1}), frozenset({0})),
        Spell(10.0, 40.0, frozenset({1}), frozenset({1})),
    ]
    picture = ElementTree.fromstring(presence_svg("who", ["a", "b"], spells, ("begin", "end")))
    bars = [
        (float(bar.attrib["x"]), float(bar.attrib["width"]), bar.attrib.get("class"), float(bar.attrib["y"]))
        for bar in picture.iter("{http://www.w3.org/2000/svg}rect")
        if bar.attrib.get("class") != "page"
    ]
    (a, b_waits, b) = bars
    assert a[2] is None
    assert b_waits[2] == "waits"
    assert b[2] is None
    assert a[3] < b[3] == b_waits[3]
    assert a[0] == b_waits[0]
    assert b[0] == pytest.approx(b_waits[0] + b_waits[1], abs=0.02)
    assert b[1] == pytest.approx(3 * a[1], abs=0.05)
