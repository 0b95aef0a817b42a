"""Packages that a script imports: looked for on all members before anything is shipped, and installed for a job."""

from types import SimpleNamespace
from typing import Any

import pytest

import meshtraind.jobs.submission as module
from meshtraind.jobs.submission import Submission
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.job import AskPackages, LackingPackages
from meshwire.messages.local import Submit
from tests.daemon.jobs.test_offers import ANNA, BERT

CARL = ANNA.model_copy(update={"device": "c" * 64, "name": "carl"})
MEMBERS = (ANNA, BERT, CARL)


def submission(monkeypatch: pytest.MonkeyPatch, here: tuple[str, ...], there: dict[str, Any]) -> tuple[Submission, Any]:
    """One that finds these modules lacking: here, and by device there, or the error that is raised."""
    asked: list[Wire] = []

    async def lacking_here(_modules: tuple[str, ...]) -> tuple[str, ...]:
        return here

    def link(found: Any) -> Any:
        async def request(body: Wire, **_how: Any) -> Wire:
            asked.append(body)
            if isinstance(found, Exception):
                raise found
            return LackingPackages(modules=found)

        return SimpleNamespace(connection=SimpleNamespace(request=request))

    monkeypatch.setattr(module, "lacking_modules", lacking_here)
    node: Any = SimpleNamespace(device=ANNA.device, links={device: link(found) for device, found in there.items()})
    body: Any = SimpleNamespace(modules=("cv2", "einops"), script="train.py")
    nobody: Any = None
    return Submission(node, nobody, body, lambda _event: None), asked


@pytest.mark.asyncio
async def test_each_laptop_is_named_with_what_it_lacks_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "packages_distributions", lambda: {"cv2": ["opencv-python"]})
    found, asked = submission(monkeypatch, (), {BERT.device: ("cv2", "einops"), CARL.device: ("einops",)})
    body: Submit = found._body  # type: ignore[assignment]
    with pytest.raises(RequestFailed) as caught:
        await found._check_packages(body, MEMBERS, [])
    assert str(caught.value).startswith(
        "bert has no opencv-python, einops; carl has no einops, which train.py imports. Next: pip install "
        "opencv-python einops there; or "
    )
    assert asked == [AskPackages(modules=("cv2", "einops"))] * 2


@pytest.mark.asyncio
async def test_nothing_is_said_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = submission(monkeypatch, (), {BERT.device: (), CARL.device: ()})
    notes: list[str] = []
    await found._check_packages(found._body, MEMBERS, notes)  # type: ignore[arg-type]
    assert not notes


@pytest.mark.asyncio
async def test_who_cannot_say_is_noted_and_nobody_is_kept_from_training(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {BERT.device: TimeoutError("packages of bert: no answer"), CARL.device: ConnectionEnded("carl was lost")}
    found, _ = submission(monkeypatch, (), silent)
    notes: list[str] = []
    await found._check_packages(found._body, MEMBERS, notes)  # type: ignore[arg-type]
    assert notes == [
        "which packages bert has is not known: packages of bert: no answer",
        "which packages carl has is not known: carl was lost",
    ]
