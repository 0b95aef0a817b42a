"""What a daemon loads: on a hub nothing that needs torch, and nowhere what only a job takes, before there is one."""

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


def test_an_idle_daemon_has_not_loaded_what_jobs_take() -> None:
    """A laptop that trains nothing now has its daemon up sooner, and some MB back."""
    code = "import sys, meshtraind.app; print([n for n in ('numpy', 'meshtraind.session.session') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
