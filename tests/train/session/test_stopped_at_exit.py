"""A script that is over, and is asked to end then, ends without a word."""

import signal

import pytest

from meshtrain.train import api


class Session:
    """A learner's session, as far as a script's end asks for it: it says whether it was let finish."""

    finished = False

    def finish(self) -> None:
        assert signal.getsignal(signal.SIGTERM) is api._stopped, "what waits here can still be stopped"
        self.finished = True


def test_behind_its_last_words_a_script_is_asked_to_end_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python prints where in its own way out it was."""
    monkeypatch.delattr("sys.last_value", raising=False)
    before = signal.signal(signal.SIGTERM, api._stopped)
    session = Session()
    try:
        api._at_exit(session)  # type: ignore[arg-type]
        assert session.finished
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
