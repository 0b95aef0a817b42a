"""`submit` without a flag, between two daemons at 20 Mbit/s: it says that one alone is faster, and does so."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshtrain.cli.planning import job_choice
from meshtrain.cli.planning.codec_prices import ProcessorPrices
from meshwire.planning.price import CodecPrice
from meshwire.planning.quality import EVIDENCE
from tests.bench.overlap_lab import StationDaemon, paired
from tests.daemon.fakedaemon import run
from tests.lab.lab import Lab, lab_unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable())),
]

MBIT = 20.0
SCRIPT = """
import sys, time
import torch
import meshtrain as mt

values, step_s = int(sys.argv[1]), float(sys.argv[2])
model = torch.nn.Linear(values // 100, 100, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(128, values // 100))
model, optimizer, loader = mt.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for (x,) in loader:
    optimizer.zero_grad()
    time.sleep(step_s)
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def anna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StationDaemon]:
    """Linked with bert. What codecs cost is stated, for measuring it takes longer than all the rest."""
    monkeypatch.delenv("MESHTRAIN_NO_PLAN", raising=False)
    prices = ProcessorPrices({tried.codec: CodecPrice(1e-9, 1e-9) for tried in EVIDENCE})
    monkeypatch.setattr(job_choice, "processor_prices", lambda *_: prices)
    with Lab(stations=2, rate_mbit=MBIT) as lab, ExitStack() as stack:
        daemons = [StationDaemon(lab, at, name, tmp_path / name) for at, name in enumerate(("anna", "bert"))]
        for daemon in daemons:
            stack.callback(daemon.stop)
            stack.callback(daemon.ask_to_stop)
        for daemon in daemons:
            daemon.wait()
        paired(*daemons)
        folder = tmp_path / "script"
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        monkeypatch.chdir(folder)
        yield daemons[0]


def test_alone_where_the_link_is_too_slow(anna: StationDaemon) -> None:
    """2 million values every 50 ms are too many for it, in whatever is safe."""
    shown = run("submit", "--json", "--data-dir", str(anna.data_dir), "train.py", "2000000", "0.05")
    assert shown.exit_code == 0, shown.stderr
    assert "chosen: Train alone: one laptop is " in shown.stderr
    job = json.loads(shown.stdout)
    assert ([member["name"] for member in job["members"]], job["summary"]["state"]) == (["anna"], "succeeded")
