"""`owner/`: settings are read with suspicion, changed a line at a time, and count at once."""

import os
from pathlib import Path

import pytest

from meshtraind.owner.live_settings import LiveSettings
from meshtraind.owner.settings import KEYS, OwnerSettings, SettingsError
from meshtraind.owner.settings_file import SettingsFile, template
from meshwire import limits

GUIDE = Path(__file__).parents[3] / "deploy/CONFIG.md"


@pytest.fixture
def live(tmp_path: Path) -> LiveSettings:
    made = LiveSettings(tmp_path)
    made.load()
    return made


def text(live: LiveSettings) -> str:
    return Path(live.shown().path).read_text("utf-8")


def edit(live: LiveSettings, written: str | bytes) -> None:
    """As an editor does, and the next look at the file."""
    path = Path(live.shown().path)
    path.write_bytes(written.encode() if isinstance(written, str) else written)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # a coarse clock may not have gone on
    live.look()


def test_a_new_folder_has_a_file_that_shows_every_key_and_sets_none(live: LiveSettings, tmp_path: Path) -> None:
    assert live.now == OwnerSettings()
    assert live.problem is None
    for key in KEYS:
        assert f"\n#{key} = " in text(live)
    assert (tmp_path / "config.toml").stat().st_mode & 0o077 == 0


def test_the_defaults_that_are_shown_are_legal(tmp_path: Path) -> None:
    """Whoever takes the # away from each line sets what counts already."""
    lines = [
        line.removeprefix("#") if line.startswith(tuple(f"#{key} " for key in KEYS)) else line
        for line in template().splitlines()
    ]
    path = tmp_path / "config.toml"
    path.write_text("\n".join(lines))
    assert SettingsFile(path).read() == OwnerSettings()


def test_a_change_by_command_counts_at_once_and_leaves_the_rest_of_the_file(live: LiveSettings, tmp_path: Path) -> None:
    seen: list[int] = []
    live.subscribe(lambda: seen.append(live.now.nice))
    edit(live, "# mine\nmax_cpu_percent = 50\n\n# also mine")
    live.change("nice", "12")
    assert text(live) == "# mine\nmax_cpu_percent = 50\n\n# also mine\nnice = 12\n"
    live.change("nice", "13")
    live.change("nice", "13")
    assert seen == [5, 12, 13]
    live.change("nice", None)
    assert text(live) == "# mine\nmax_cpu_percent = 50\n\n# also mine\n#nice = 5\n"
    assert (live.now.nice, live.now.max_cpu_percent) == (5, 50)
    later = LiveSettings(tmp_path)
    later.load()
    assert later.now == live.now


def test_an_edited_file_is_noticed(live: LiveSettings) -> None:
    edit(live, "nice = 7\n")
    assert live.now.nice == 7
    edit(live, "")
    assert live.now.nice == 5


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("nice = \nmax_cpu_percent = 5\n", "line 1"),
        ("nice = 20\n", "0 (not at all) to 19"),
        ('nice = "7"\n', "valid integer"),
        ("nise = 7\n", ", ".join(KEYS)),
        ("[nice]\na = 1\n", "nice"),
        (b"nice = \xff\n", "UTF-8"),
        ("a = " + "[" * 5000, "config.toml"),
        ("#" * (limits.CONFIG_BYTES_MAX + 1), "bytes"),
    ],
)
def test_a_file_with_an_error_changes_nothing_and_is_told(live: LiveSettings, written: str | bytes, names: str) -> None:
    """A daemon goes on with what it had; a command that would have to write into such a file says so, too."""
    edit(live, "nice = 9\n")
    edit(live, written)
    assert live.now.nice == 9
    assert live.problem is not None
    assert names in live.problem
    assert "config.toml" in live.problem
    assert live.shown().problem is not None
    before = Path(live.shown().path).read_bytes()
    with pytest.raises(SettingsError, match=r"config\.toml"):
        live.change("max_cpu_percent", "50")
    assert Path(live.shown().path).read_bytes() == before
    edit(live, "nice = 10\n")
    assert live.now.nice == 10
    assert live.shown().problem is None


def test_a_pipe_in_its_place_keeps_nobody_waiting(live: LiveSettings) -> None:
    path = Path(live.shown().path)
    path.unlink()
    os.mkfifo(path)
    live.look()
    assert live.problem is not None
    assert "is no file" in live.problem


def test_a_line_that_cannot_be_told_from_the_rest_is_left_alone(live: LiveSettings) -> None:
    """TOML has other ways to write a key; who uses one changes it there."""
    edit(live, '"nice" = 4\n')
    for value in ("3", None):
        with pytest.raises(SettingsError):
            live.change("nice", value)
    assert (text(live), live.now.nice) == ('"nice" = 4\n', 4)


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("nise", "3", ", ".join(KEYS)),
        ("name", "attic", "meshtrain up --name"),
        ("nice", "much", "nice = much: Input should be a valid integer"),
        ("nice", "20", "0 (not at all) to 19"),
        ("max_cpu_percent", "0", "1 to 100"),
        ("nice\x1b[2J", "0", "there are"),
    ],
)
def test_what_is_not_legal_is_refused_with_what_is(live: LiveSettings, key: str, value: str, names: str) -> None:
    before = text(live)
    with pytest.raises(SettingsError) as refused:
        live.change(key, value)
    assert names in str(refused.value)
    assert str(refused.value).isprintable()
    assert text(live) == before


def test_a_folder_that_cannot_be_written_is_told_and_changes_nothing(tmp_path: Path) -> None:
    live = LiveSettings(tmp_path / "none")
    live.load()  # only the log says so
    with pytest.raises(SettingsError, match="cannot be written"):
        live.change("nice", "3")
    assert live.now == OwnerSettings()


def test_the_guide_names_every_key_with_its_default() -> None:
    guide = GUIDE.read_text("utf-8")
    for key in KEYS:
        default = OwnerSettings.default(key)
        shown = (
            str(default).lower()
            if isinstance(default, bool)
            else f"{default:g}"
            if isinstance(default, float)
            else default
        )
        assert f"| `{key}` | `{shown}` |" in guide
    assert guide.count("\n| `") == len(KEYS), "keys that are gone"
