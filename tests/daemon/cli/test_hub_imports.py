"""A hub installs without torch: all that its daemon and its commands load is there without."""

import subprocess
import sys

MODULES = (
    "meshtraind.app",
    "meshtraind.cli",
    "meshtraind.session.session",
    "meshtraind.rounds.driver",
    "meshtraind.executor.factory",
    "meshtraind.recovery.hub_states",
    "meshtrain.cli.app",
    "meshtrain.doctor.examination",
)


def test_a_hub_needs_no_torch() -> None:
    """H1: with torch and safetensors out of reach its rounds, its endpoint and its commands load."""
    blocked = "sys.modules.update(torch=None, safetensors=None)"
    code = f"import sys; {blocked}; [__import__(name) for name in {MODULES!r}]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
