"""`meshtrain config`: shown, set, taken back, and the likeliest mistakes."""

import json
from typing import Any

import pytest

from meshwire.messages.config import ConfigEntry, ConfigShown, GetConfig, SetConfig
from meshwire.messages.envelope import Failure
from tests.daemon.fakedaemon import Endpoint, run

pytestmark = pytest.mark.usefixtures("plain_environment")


def shown(nice: int = 5, problem: str | None = None) -> ConfigShown:
    entries = (
        ConfigEntry(key="nice", value=nice, default=5, about="How far training yields: 0 to 19."),
        ConfigEntry(key="rests", value=False, default=False, about="Whether it rests."),
    )
    return ConfigShown(path="/data/config.toml", problem=problem, entries=entries)


def setting(endpoint: Endpoint) -> list[tuple[str, str | None]]:
    return [(body.key, body.value) for body in endpoint.of_type(SetConfig)]


def test_it_shows_every_key_with_value_default_and_meaning(endpoint: Endpoint) -> None:
    endpoint.answers[GetConfig] = shown(nice=12)
    done = run("config")
    assert done.exit_code == 0
    assert "nice   12     5        How far training yields: 0 to 19." in done.stdout
    assert "rests  false  false    Whether it rests." in done.stdout
    assert "/data/config.toml" in done.stderr


def test_one_key_alone(endpoint: Endpoint) -> None:
    endpoint.answers[GetConfig] = shown()
    assert "rests" not in run("config", "nice").stdout
    assert json.loads(run("config", "rests", "--json").stdout)["value"] is False
    wrong = run("config", "nise")
    assert wrong.exit_code == 1
    assert "there are: nice, rests" in wrong.stderr


def test_json_is_one_document(endpoint: Endpoint) -> None:
    endpoint.answers[GetConfig] = shown(problem="line 3")
    found: dict[str, Any] = json.loads(run("config", "--json").stdout)
    assert (found["path"], found["problem"]) == ("/data/config.toml", "line 3")
    assert found["entries"][0] == {
        "key": "nice",
        "value": 5,
        "default": 5,
        "about": "How far training yields: 0 to 19.",
    }


def test_it_sets_and_takes_back(endpoint: Endpoint) -> None:
    endpoint.answers[SetConfig] = lambda body, _: shown(nice=int(body.value or 5))
    assert run("config", "nice", "12").stdout == "nice = 12\n"
    assert run("config", "nice", "--unset").stdout == "nice = 5\n"
    assert setting(endpoint) == [("nice", "12"), ("nice", None)]


def test_what_the_daemon_refuses_is_shown(endpoint: Endpoint) -> None:
    endpoint.answers[SetConfig] = Failure(error="nice = 20: Input should be less than or equal to 19")
    done = run("config", "nice", "20")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "less than or equal to 19" in done.stderr


@pytest.mark.parametrize("words", [("--unset",), ("nice", "3", "--unset")])
def test_unset_needs_a_key_and_no_value(endpoint: Endpoint, words: tuple[str, ...]) -> None:
    done = run("config", *words)
    assert done.exit_code == 2
    assert not endpoint.asked


def test_a_file_that_could_not_be_read_is_told(endpoint: Endpoint) -> None:
    endpoint.answers[GetConfig] = shown(problem="config.toml: line 3")
    assert "as it was before the file was changed: config.toml: line 3" in run("config").stderr


def test_without_a_daemon_it_says_what_to_do() -> None:
    done = run("config")
    assert done.exit_code == 1
    assert "meshtrain up" in done.stderr
