"""`python -m tests.guide.dashboard_picture`: three daemons on this machine train a small GPT, and Chromium takes a
picture of the first one's dashboard, as a person has it in a browser.
"""

import argparse
import asyncio
import base64
import subprocess
import sys
import tempfile
from pathlib import Path

from meshtrain.client import ask
from meshtrain.demo.localmesh import LocalDaemon, LocalMesh
from meshtrain.examples.init import write_example
from meshwire.messages.local import DashboardOpened, OpenDashboard
from tests.daemon.browser import Page, browser, chromium

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/guide/dashboard.webp"
NAMES = ("anna", "bert", "carl")
ROUNDS = 60  # so that there is a curve
WIDTH_PX, HEIGHT_PX = 1180, 1010
QUALITY = 80
SUBMIT_TIMEOUT_S = 120.0
ROUNDS_TIMEOUT_S = 240.0
SHOWN_ROUND = "Number((document.querySelector('#loss-caption').textContent.match(/at round ([0-9]+)/) ?? [0, 0])[1])"


def submit(daemon: LocalDaemon, folder: Path) -> None:
    """Submits the example, and does not follow it."""
    write_example("gpt", folder)
    command = (sys.executable, "-m", "meshtrain.cli", "submit", "--no-plan", "--detach")
    environment = ("--data-dir", str(daemon.data_dir), "train.py")
    subprocess.run([*command, *environment], cwd=folder, check=True, timeout=SUBMIT_TIMEOUT_S)


async def picture(daemon: LocalDaemon) -> bytes:
    """The page, when the job has had some rounds."""
    assert daemon.client is not None
    url = ask(daemon.client, OpenDashboard(), DashboardOpened, name="dashboard").url
    async with browser() as chrome:
        page: Page = await chrome.page(width=WIDTH_PX, height=HEIGHT_PX)
        await page.go(url)
        await page.until("document.querySelectorAll('#peers tr').length")
        await page.until(f"{SHOWN_ROUND} >= {ROUNDS}", timeout_s=ROUNDS_TIMEOUT_S)
        shot = await page.send("Page.captureScreenshot", format="webp", quality=QUALITY)
    return base64.b64decode(shot["data"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    output = parser.parse_args().output
    if chromium() is None:
        print("error: it needs Chromium (Debian: apt install chromium)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, LocalMesh(NAMES, print) as mesh:
        submit(mesh.daemons[0], Path(folder) / "gpt")
        output.write_bytes(asyncio.run(picture(mesh.daemons[0])))
    print(f"{output}: {output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
