"""Packages of a script on real daemons: named where they are not there, installed where a list asks for them."""

from pathlib import Path

import pytest

from meshtrain.client import RequestError
from meshtrain.demo.localmesh import LocalMesh
from tests.daemon import realjobs as jobs
from tests.daemon.environments.test_environments import wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPT = jobs.TRAIN.replace("import meshtrain as mt", "import meshtrain as mt\nimport meshtinypackage")
SCRIPT = SCRIPT.replace("mt.finish()", "print('the answer is', meshtinypackage.ANSWER, flush=True)\nmt.finish()")


def test_a_job_runs_with_the_packages_that_its_list_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path / "wheels", "meshtinypackage", "1.0", "ANSWER = 42\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with LocalMesh(("anna", "bert"), print) as mesh:
        anna, bert = mesh.daemons
        with pytest.raises(RequestError, match="anna has no meshtinypackage; bert has no meshtinypackage"):
            jobs.submit(anna, tmp_path, SCRIPT, modules=("meshtinypackage",))
        with pytest.raises(RequestError, match="could not receive the job: the script's packages cannot be installed"):
            jobs.submit(anna, tmp_path, SCRIPT, requirements=("meshtinypackage==2.0",))
        summary = jobs.run(anna, tmp_path, SCRIPT, modules=("meshtinypackage",), requirements=("meshtinypackage",))
        assert summary.state == "succeeded", summary.error
        assert summary.replicas_equal is True
        for rank in range(2):
            assert "the answer is 42" in jobs.read(bert, summary.job, "log", rank)
