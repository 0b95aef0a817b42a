"""What a system's service manager is told of the daemon, as text: pure, so that all three can be tested anywhere.

The daemon runs as its user, with this very Python environment, at a lower priority than what the user does. It is
started again after an error, and not after `meshtrain down`, which ends it in order.
"""

import plistlib
import subprocess
from collections.abc import Sequence
from pathlib import PurePath
from xml.sax.saxutils import escape

NAME = "meshtraind"
LABEL = "org.meshtrain.meshtraind"  # launchd's names are domains, read backwards
MARK = "Written by `meshtraind install`"  # what has it may be replaced, and removed, by the same command
RESTART_S = 5
STOP_S = 30  # learners are children, and get their grace
NICE = 10


def systemd_unit(command: Sequence[str]) -> str:
    """A user unit (systemd.service(5))."""
    return f"""\
# {MARK}; `meshtraind uninstall` removes it.
[Unit]
Description=meshtrain daemon

[Service]
ExecStart={_systemd_command(command)}
Restart=on-failure
RestartSec={RESTART_S}
# Training gives way to whatever the owner is doing.
Nice={NICE}
# Learners are children and get this long to end by themselves.
TimeoutStopSec={STOP_S}
NoNewPrivileges=true
# No MemoryDenyWriteExecute: torch.compile makes code at run time.

[Install]
WantedBy=default.target
"""


def _systemd_command(command: Sequence[str]) -> str:
    """A command as systemd reads it: quoted, with nothing that it would replace.

    It looks for variables in the arguments and never in the program's path, where a doubled "$" stays one; so where
    that has any, the sign that it is to look for none stands before it (":", systemd 244).
    """
    words = [_systemd_quoted(word) for word in command]
    if "$" in command[0]:
        return ":" + " ".join(words)
    return " ".join(word.replace("$", "$$") for word in words)


def _systemd_quoted(word: str) -> str:
    for plain, quoted in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("\n", "\\n"), ("\r", "\\r")):
        word = word.replace(plain, quoted)
    return f'"{word}"'


def launchd_agent(command: Sequence[str], log: PurePath) -> str:
    """An agent of the user's session (launchd.plist(5)).

    Args:
        log: where its errors go, for an agent has no journal.
    """
    agent = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": STOP_S,
        "Nice": NICE,
        "StandardErrorPath": str(log),
    }
    text = plistlib.dumps(agent, sort_keys=False).decode()
    return text.replace("<plist", f"<!-- {MARK}; `meshtraind uninstall` removes it. -->\n<plist", 1)


def windows_task(command: Sequence[str], user: str) -> str:
    """A task that begins when the user logs on (Task Scheduler's schema 1.2).

    Args:
        user: DOMAIN\\NAME. A trigger for everybody would need an administrator, and start it for the wrong ones.
    """
    program, *arguments = command
    return f"""\
<?xml version="1.0"?>
<!-- {MARK}; `meshtraind uninstall` removes it. -->
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers>
    <LogonTrigger><Enabled>true</Enabled><UserId>{escape(user)}</UserId></LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="owner">
      <UserId>{escape(user)}</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>8</Priority>
    <RestartOnFailure><Interval>PT1M</Interval><Count>999</Count></RestartOnFailure>
  </Settings>
  <Actions Context="owner">
    <Exec>
      <Command>{escape(program)}</Command>
      <Arguments>{escape(subprocess.list2cmdline(arguments))}</Arguments>
    </Exec>
  </Actions>
</Task>
"""
