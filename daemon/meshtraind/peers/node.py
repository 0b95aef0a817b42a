"""What every part of a daemon shares: who it is, its links, its stores."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshtraind.owner.live_settings import LiveSettings
from meshtraind.peers.links import Link
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.job_history import JobHistory
from meshtraind.trust.learner_tokens import LearnerTokens
from meshwire.messages.job import Member
from meshwire.messages.link import Software


class LearnerEntrance(Protocol):
    """The door for this daemon's learners: where they call, and what lets them in."""

    @property
    def address(self) -> str:
        """What a learner connects to; empty before the daemon listens."""

    @property
    def learners(self) -> LearnerTokens:
        """Gives learners the tokens that they show."""


@dataclass(frozen=True)
class Node:
    """What every part of one daemon needs to know of it: who it is, its links, and where it keeps what.

    Attributes:
        links: the linked peers by device id; live.
        entrance: where this daemon's learners find it.
        software: asked for when needed, because finding torch's version takes a moment.
        patience_s: silence after which a peer is lost; the user's one setting of time.
        settings: how much of this machine may be taken.
        hub: it runs no learner, as its owner has said (H1).
    """

    device: str
    incarnation: int
    name: str
    links: Mapping[str, Link]
    blobs: BlobStore
    history: JobHistory
    data_dir: Path
    entrance: LearnerEntrance
    software: Software
    patience_s: float
    settings: LiveSettings
    hub: bool = False

    @property
    def member(self) -> Member:
        """This daemon as a member of a job (G1)."""
        return Member(device=self.device, incarnation=self.incarnation, name=self.name, hub=self.hub)

    def job_folder(self, job: str) -> Path:
        """The folder of a job: DATA/jobs/ID."""
        return self.data_dir / "jobs" / job
