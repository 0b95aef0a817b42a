"""`meshtrain dashboard`: the address, the browser, and what may be in the way."""

import json
import webbrowser

import pytest

from meshwire.messages.envelope import Failure
from meshwire.messages.local import DashboardOpened, OpenDashboard
from tests.daemon.fakedaemon import Endpoint, run

URL = "http://127.0.0.1:41234/#token=abc"
pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def browsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a browser was started with."""
    found: list[str] = []

    def start(url: str) -> bool:
        found.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", start)
    return found


def test_it_prints_and_opens_the_address(endpoint: Endpoint, browsed: list[str]) -> None:
    endpoint.answers[OpenDashboard] = DashboardOpened(url=URL, expires_s=60.0)
    shown = run("dashboard")
    assert (shown.exit_code, shown.stdout, browsed) == (0, URL + "\n", [URL])


@pytest.mark.parametrize("option", ["--no-open", "--json"])
def test_it_opens_nothing_where_that_is_said(endpoint: Endpoint, browsed: list[str], option: str) -> None:
    endpoint.answers[OpenDashboard] = DashboardOpened(url=URL, expires_s=60.0)
    shown = run("dashboard", option)
    assert (shown.exit_code, browsed) == (0, [])
    if option == "--json":
        assert json.loads(shown.stdout) == {"url": URL, "expires_s": 60.0}
    else:
        assert shown.stdout == URL + "\n"
        assert "on this machine" in shown.stderr


def test_without_a_browser_it_says_what_to_do(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _url: False)
    endpoint.answers[OpenDashboard] = DashboardOpened(url=URL, expires_s=60.0)
    assert "Open this address" in run("dashboard").stderr


def test_a_refusal_is_shown_and_opens_nothing(endpoint: Endpoint, browsed: list[str]) -> None:
    endpoint.answers[OpenDashboard] = Failure(error="this daemon was started with --dashboard off: meshtrain down")
    shown = run("dashboard")
    assert (shown.exit_code, browsed) == (1, [])
    assert "--dashboard off" in shown.stderr
