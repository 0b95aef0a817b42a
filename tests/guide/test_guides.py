"""The guides: links lead somewhere, the map is complete, pictures are what they should be, figures are the results'."""

import ast
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

import meshtrain
from meshtrain.cli.app import app
from meshwire.planning.quality import EVIDENCE, Quality

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RECIPES = sorted((DEPLOY / "recipes").glob("*.py"))
PICTURE_BYTES_MAX = 150_000
GUIDE = DEPLOY / "guide"
MAP = (GUIDE / "README.md").read_text("utf-8")


@cache
def pages() -> tuple[Path, ...]:
    """Every page of a clone."""
    done = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git clone")
    return tuple(ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).exists())


def prose(page: Path) -> str:
    """A page without what is shown as it would be typed."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Those that lead nowhere below the root of the clone."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_relative_to(ROOT) or not target.exists():
            wrong.append(f"{link}: nothing is there")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: there is no such heading")
    return wrong


def test_every_link_leads_somewhere() -> None:
    found = {page.relative_to(ROOT).as_posix(): broken_links(page) for page in pages()}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# The page, so to say\n[a](gone.md) [b](#no) [c](#the-page-so-to-say) [d](../x)\n```\n[e](f)\n```\n"
    )
    assert [each.partition(":")[0] for each in broken_links(page)] == ["gone.md", "#no", "../x"]


def test_the_map_has_every_guide() -> None:
    """And is one click from the README; a reader of one guide finds the way back to it, or to the README."""
    here = {page.name for page in GUIDE.glob("*.md")} - {"README.md"}
    there = {f"../{page.name}" for page in DEPLOY.glob("*.md")} - {"../NOTICE.md"}
    there |= {f"../../protocol/{page.name}" for page in (ROOT / "protocol").glob("*.md")}
    there -= {"../../protocol/README.md", "../../protocol/RULES.md"}  # for who reads the code
    assert not (here | there) - set(re.findall(r"\]\(([^)#\s]+)", MAP))
    assert "](deploy/guide/README.md)" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["session.svg", "dashboard.webp"])
def test_pictures_are_small_and_name_no_machine(name: str) -> None:
    content = (GUIDE / name).read_bytes()
    assert len(content) <= PICTURE_BYTES_MAX
    if name.endswith(".svg"):
        text = "".join(ElementTree.fromstring(content).itertext())
        assert "meshtrain pair" in text
        assert not re.findall(r"/(?:tmp|work|root|home|usr|var)/\S*|https?://\S*|\b\S+@\S+\.\S+", text)
        assert b"prefers-color-scheme" in content


def test_the_transcript_is_within_its_limits() -> None:
    """What first_steps has written: the times, beside what they may be, and no name of that machine."""
    text = (GUIDE / "FIRST_STEPS.md").read_text("utf-8").partition("<!-- transcript: begin -->")[2]
    rows = re.findall(r"\| ([\d.]+) s \| (\d+) s \|$", text, re.MULTILINE)
    assert len(rows) == 2
    assert all(float(measured) <= float(limit) for measured, limit in rows)
    assert not re.findall(r"/(?:tmp|work|root|home|usr|var)/\S*|https?://\S*", text)


def test_settings_say_what_the_results_say() -> None:
    """Figures of codecs are those of the guide to codecs; what `safe` may choose is what the program takes for it."""
    settings = (GUIDE / "SETTINGS.md").read_text("utf-8")
    codecs = (ROOT / "protocol/CODECS.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| 1[/\d]* \| ([^|]+) \| ([^|]+) \|$", settings, re.MULTILINE)
    assert len(rows) >= 6
    assert not [
        row
        for row in rows
        if not re.search(rf"^\| `{row[0]}` \| {re.escape(row[1])} \| [\d.]+ \| {re.escape(row[2])} \|", codecs, re.M)
    ]
    (safe,) = re.findall(r"^\| `safe`.*\| (.+) \|$", settings, re.MULTILINE)
    in_step, _, in_periods = safe.partition("; ")
    named = [(name, "bsp") for name in re.findall(r"`([\w:]+)`", in_step)]
    assert len(named) >= 3
    named += [(codec, sync) for sync, codec in re.findall(r"`([\w:]+)` with `([\w:]+)`", in_periods)]
    assert {*named} == {tried for tried, found in EVIDENCE.items() if found.quality is Quality.SAFE}
    predicted = (ROOT / "tests/bench/results/predicted.md").read_text("utf-8")
    _, _, two = predicted.partition("2 on cables of 20 Mbit/s**")
    two, _, _ = two.partition("\n| **")
    gains = re.findall(r"^\| `--sync (\S+) --codec (\w+)` \| ([\d.]+)", settings, re.MULTILINE)
    assert len(gains) >= 4
    for sync, codec, gain in gains:
        assert re.search(rf"^\| `{sync} {codec}` \|(?: [^|]+ \|){{3}} {gain} \|", two, re.MULTILINE), sync


def test_errors_in_the_guide_are_errors_of_the_program() -> None:
    """Who searches the page for what is on the screen finds it; names and numbers in it are left out."""
    folders = ("meshtrain", "daemon/meshtraind", "protocol/meshwire")
    source = "\n".join(path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that go on in the next line
    quoted = re.findall(r"^\| `([^`]+)`", (GUIDE / "TROUBLE.md").read_text("utf-8"), re.MULTILINE)
    assert len(quoted) >= 10
    parts = [
        part.strip() for each in quoted for part in re.split(r"\.\.\.|29610|train\.py", each) if len(part.strip()) > 1
    ]
    assert not [part for part in parts if part not in source]


def typed_commands(page: Path) -> list[list[str]]:
    """Every command line of ours that a page shows: its words, without the first one and comments."""
    text = page.read_text("utf-8")
    blocks = [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()] + inline
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"\s*meshtrain \w", line)]


def test_commands_in_the_guides_are_taken() -> None:
    """Each command and each option that a guide lets people type exists."""
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    guides = [ROOT / "README.md", *DEPLOY.glob("*.md"), *GUIDE.glob("*.md"), *(ROOT / "protocol").glob("[A-Z]*.md")]
    wrong, seen = [], 0
    for page in guides:
        for name, *words in typed_commands(page):
            command = commands.get(name)
            script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
            options = {word.split("=")[0] for word in words[:script] if word.startswith("-")}
            taken = {option for each in command.params for option in each.opts} if command is not None else set()
            seen += len(options)
            if command is None or (not hasattr(command, "commands") and options - taken - {"--help"}):
                wrong.append(f"{page.name}: meshtrain {name} {shlex.join(words)}")
    assert seen > 50
    assert not wrong


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_uses_what_there_is(recipe: Path) -> None:
    """It can be parsed, each name of the API that it takes exists, and the page of recipes has it."""
    tree = ast.parse(recipe.read_text("utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mt"
    }
    assert used
    assert not [name for name in used if not callable(getattr(meshtrain, name, None))]
    assert f"]({recipe.name})" in (DEPLOY / "recipes/README.md").read_text("utf-8")
