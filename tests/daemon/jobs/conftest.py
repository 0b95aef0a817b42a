"""Three daemons that lost a job, for `test_revival.py` and `test_returns.py`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from meshtraind.storage.blobs import BlobStore
from tests.daemon.job_start.test_checkpointing import MEMBERS
from tests.daemon.job_start.test_checkpointing import spec as plain_spec
from tests.daemon.jobs.test_file_intake import make_spec
from tests.daemon.jobs.test_resume import written
from tests.daemon.lostmesh import Daemon


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[list[Daemon]]:
    """Three that lost the job; the checkpoint and the files lie on the second alone."""
    files = make_spec(BlobStore(tmp_path / MEMBERS[1].name / "blobs"), {"train.py": b"print()"}).files
    spec = plain_spec(files=files)
    daemons = [Daemon(tmp_path, rank, spec) for rank in range(3)]
    written(daemons[1].folder, 40, spec)
    yield daemons
    for daemon in daemons:
        if hasattr(daemon, "jobs"):
            await daemon.close()
