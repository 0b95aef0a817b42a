"""The list of commands, in the order in which `meshtrain --help` shows them."""

import typer

from meshtrain.cli.commands.bench import bench
from meshtrain.cli.commands.checkpoints import checkpoints
from meshtrain.cli.commands.config import config
from meshtrain.cli.commands.daemon import dashboard, down, up
from meshtrain.cli.commands.demo import demo
from meshtrain.cli.commands.doctor import doctor
from meshtrain.cli.commands.exchange import codecs, topology
from meshtrain.cli.commands.get import get
from meshtrain.cli.commands.init import init
from meshtrain.cli.commands.jobs import cancel, change, jobs, leave, rm
from meshtrain.cli.commands.logs import logs, report
from meshtrain.cli.commands.mesh import pair, peers, status, unpair
from meshtrain.cli.commands.planning import plan, whatif
from meshtrain.cli.commands.submit import submit
from meshtrain.cli.commands.top import metrics, top
from meshtrain.cli.ui.options import Grouped, examples
from meshtrain.cli.ui.usage import MeshtrainGroup
from meshtrain.cli.version import root, version

SETTINGS = {"help_option_names": ["--help", "-h"]}

app = typer.Typer(
    cls=MeshtrainGroup,
    help="Train one PyTorch script on all the laptops you own.",
    epilog=examples("meshtrain up", "meshtrain pair", "meshtrain init --example gpt", "meshtrain submit train.py"),
    context_settings=SETTINGS,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: it starts faster, and pipes well
    pretty_exceptions_enable=False,
)

app.callback()(root)
app.command(
    epilog=examples("meshtrain up", "meshtrain up --name attic --peer 192.168.1.20", "meshtrain up --introductions ask")
)(up)
app.command(epilog=examples("meshtrain down"))(down)
app.command(
    epilog=examples(
        "meshtrain config", "meshtrain config nice 15", "meshtrain config nice --unset", "meshtrain config --json"
    )
)(config)
app.command(epilog=examples("meshtrain status", "meshtrain status -v", "meshtrain status --json"))(status)
app.command(epilog=examples("meshtrain peers", "meshtrain peers --measure", "meshtrain peers -v --json"))(peers)
app.command(
    epilog=examples(
        "meshtrain pair",
        "meshtrain pair 483-917",
        "meshtrain pair 483-917 --at 192.168.1.20",
        "meshtrain pair --accept carl",
    )
)(pair)
app.command(epilog=examples("meshtrain unpair attic", "meshtrain unpair --introduced attic"))(unpair)
app.command(
    epilog=examples(
        "meshtrain doctor",
        "meshtrain doctor --at 192.168.1.20",
        "sudo env PATH=$PATH meshtrain doctor --data-dir ~/.local/share/meshtrain",
        "meshtrain doctor --bundle report.json",
    )
)(doctor)
app.command(epilog=examples("meshtrain init", "meshtrain init --example mlp disc"))(init)
app.command(
    epilog=examples(
        "meshtrain submit train.py --epochs 3",
        "meshtrain submit -m package.train --epochs 3",
        "meshtrain submit --quality exact train.py",
        "meshtrain submit --data data --codec fp16 train.py",
        "meshtrain submit --codec topk:0.01+fp16 train.py",
        "meshtrain submit --sync ssp:2 train.py",
        "meshtrain submit --sync ssp:2 --visibility fixed train.py",
        "meshtrain submit --sync local:8 --codec int8 train.py",
        "meshtrain submit --on nas,anna,bert --topology star:0 train.py",
        "meshtrain submit --dry-run train.py",
        "meshtrain submit --peers 2 -d train.py",
        "meshtrain submit --checkpoint-every 500r train.py",
        "meshtrain submit --resume x7k",
        "meshtrain submit --resume x7k@500 train.py --lr 1e-4",
    ),
    cls=Grouped,
    # Everything after the script is the script's, `--help` too.
    context_settings=SETTINGS | {"allow_interspersed_args": False},
)(submit)
app.command(
    epilog=examples(
        "meshtrain plan train.py",
        "meshtrain plan -m package.train",
        "meshtrain plan --quality fast train.py --batch-size 32",
        "meshtrain plan --json --measure train.py",
    ),
    # As with submit: everything after the script is the script's.
    context_settings=SETTINGS | {"allow_interspersed_args": False},
)(plan)
app.command(
    epilog=examples(
        "meshtrain whatif train.py",
        "meshtrain whatif train.py --mbit 20,50,150 --peers 2,3",
        "meshtrain whatif train.py --wired --quality fast -- --batch-size 32",
    ),
)(whatif)
app.command(epilog=examples("meshtrain jobs", "meshtrain jobs --json"))(jobs)
app.command(epilog=examples("meshtrain top", "meshtrain top x7k", "meshtrain top --json"))(top)
app.command(epilog=examples("meshtrain metrics", "meshtrain metrics -o /var/lib/node_exporter/meshtrain.prom"))(metrics)
app.command(epilog=examples("meshtrain dashboard", "meshtrain dashboard --no-open"))(dashboard)
app.command(
    epilog=examples("meshtrain logs -f", "meshtrain logs -n 20 --rank bert x7k", "meshtrain logs -t --since 10m x7k")
)(logs)
app.command(epilog=examples("meshtrain report", "meshtrain report x7k -o report.html"))(report)
app.command(epilog=examples("meshtrain checkpoints", "meshtrain checkpoints x7k --json"))(checkpoints)
app.command(epilog=examples("meshtrain cancel x7k", "meshtrain cancel --now x7k p4w"))(cancel)
app.command(epilog=examples("meshtrain rm x7k", "meshtrain rm --yes x7k p4w"))(rm)
app.command(epilog=examples("meshtrain change x7k --codec int8", "meshtrain change x7k --codec topk:0.01"))(change)
app.command(epilog=examples("meshtrain leave x7k"))(leave)
app.command(
    epilog=examples("meshtrain get", "meshtrain get x7k rank0/model.pt -o results", "meshtrain get x7k --json")
)(get)
app.command(
    epilog=examples(
        "meshtrain demo",
        "meshtrain demo --sync ssp:2",
        "meshtrain demo --peers 4 --codec int8",
        "meshtrain demo --steps 300 --json",
    )
)(demo)
app.add_typer(bench, name="bench")
app.command(epilog=examples("meshtrain codecs", "meshtrain codecs --json"))(codecs)
app.command(
    epilog=examples(
        "meshtrain topology",
        "meshtrain topology butterfly --peers 8",
        "meshtrain topology ring --peers 4 --wired 0 --values 124e6 --codec fp16",
        "meshtrain topology star:2 --peers 4 --wired 2",
        "meshtrain topology star:4 --peers 5 --hub 4 --wired 4",
        "meshtrain topology hierarchical:3 --peers 5 --svg groups.svg",
    )
)(topology)
app.command(epilog=examples("meshtrain version", "meshtrain version --json"))(version)

# Where fingers know docker or a scheduler; `--help` lists each command once.
app.command("ps", hidden=True)(jobs)
app.command("ls", hidden=True)(jobs)
app.command("stop", hidden=True)(cancel)
