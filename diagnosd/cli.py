"""`diagnosd VERB`: parses arguments, and loads only what the verb needs."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from diagnosd import __version__
from diagnosd.wording import own_mistake, said

app = typer.Typer(
    help="Say why a distributed training job is slow: which part of the step grew, where, and for which cause.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ERROR, COULD_NOT_START = 1, 125
SLOWEST = 1e-3  # times as fast: a second in a quarter of an hour
# The analysis works on small arrays: threads of the linear algebra library would only take the job's processors, and
# make its sums depend on their number.
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Verb(TyperCommand):
    """Usage as manuals have it: typer puts braces around what is required."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class JobFirst(TyperGroup):
    """A group of verbs that also takes a file in their place: `model JOB.toml` is `model job JOB.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["job", *args]
        return super().parse_args(ctx, args)


class Output(StrEnum):
    text = "text"
    json = "json"


def _host(name: str) -> str:
    from diagnosd.probe.identity import host_name  # noqa: PLC0415

    name = name or host_name()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", name):
        allowed = "letters, digits, '.', '-' and '_' are allowed"
        raise typer.BadParameter(f"{name!r:.80} is no host name: {allowed}; --host NAME gives another")
    return name


def _socket(path: Path | None) -> Path:
    from diagnosd.probe.message import DEFAULT_SOCKET  # noqa: PLC0415

    return path or Path(os.environ.get("DIAGNOSD_SOCKET") or DEFAULT_SOCKET)


def _given(name: str) -> str:
    """A variable that is not set makes an empty name, and pathlib a name for the folder that we are in of it."""
    if not name:
        raise typer.BadParameter("the path is empty")
    return name


def _path(name: str) -> Path:
    return Path(_given(name))


Host = Annotated[
    str, typer.Option(metavar="NAME", callback=_host, help="The name of this host in what is recorded and said.")
]
Record = Annotated[
    str,
    typer.Option(
        metavar="PATH", help="Record into a file (.lp, .lp.gz, .lp.zst), or into a folder with one file a host."
    ),
]


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise typer.BadParameter(f"{path} is no folder")
    return path


def _plain_file(path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        raise typer.BadParameter(f"{path} is no plain file")
    return path


Cluster = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        callback=_plain_file,
        help="What the operators declare: a cluster.toml.",
    ),
]
Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", parser=_path, help="Where the probes find the agent, if not at DIAGNOSD_SOCKET."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Open nothing of the devices that match (interface, RDMA device, PCI address, GPU's uuid); repeatable.",
    ),
]
SysRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", parser=_path, callback=_folder, help="Read the tree captured there instead of this machine."
    ),
]
OutputAs = Annotated[Output, typer.Option(help="Text for people, or a JSON document a line for programs.")]


@app.command(
    cls=Verb, short_help="Run a command and say why it is slow.", context_settings={"allow_interspersed_args": False}
)
def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", hidden=True, help="The command, with its arguments.")],
    job: Annotated[str, typer.Option(metavar="NAME", help="The job's name, the same on every node.")] = "",
    record: Record = "",
    cluster: Cluster = None,
    host: Host = "",
    exclude: Exclude = None,
    output: OutputAs = Output.text,
) -> None:
    """Run a command and say, while it runs and when it ends, why it is slow.

    Example: diagnosd run --record slow.lp.zst -- torchrun --nproc-per-node 2 train.py

    CMD, the command with its arguments, keeps its stdin, stdout, stderr, signals and exit code; the verdict goes to
    stderr, or with --output json to stdout after it has ended. Our own exit codes: 125 it could not be observed and
    was not started, 126 it is not executable, 127 there is no such command.
    """
    from diagnosd.probe.identity import job_name  # noqa: PLC0415

    environ = dict(os.environ)
    named = job_name({**environ, "DIAGNOSD_JOB": job} if job else environ, os.getpid())
    with _analysis(COULD_NOT_START):
        from diagnosd import run as observed  # noqa: PLC0415
    raise typer.Exit(
        observed.run(command, environ, observed.Options(host, record, cluster, exclude or ()), named, output)
    )


@app.command(cls=Verb, short_help="Say what a recording tells.")
def replay(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", parser=_path, help="A recording: a file, or a folder of files.")
    ],
    output: OutputAs = Output.text,
    speed: Annotated[float | None, typer.Option(metavar="X", help="Replay X times as fast as it was.")] = None,
    cluster: Cluster = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more while it is being written.")] = False,
) -> None:
    """Say what a recording tells: the verdict that the running job had, or would have had.

    Example: diagnosd replay slow.lp.zst
    """
    if speed is not None and not SLOWEST <= speed < float("inf"):
        raise typer.BadParameter(f"{speed} is no speed: a number from {SLOWEST:g} is allowed", param_hint="--speed")
    with _analysis(ERROR):
        from diagnosd import analyzer  # noqa: PLC0415
    raise typer.Exit(analyzer.replay(path, output, speed, cluster, follow))


@app.command(cls=Verb, short_help="Record what this node and its ranks tell.")
def record(
    path: Annotated[
        str, typer.Argument(metavar="PATH", callback=_given, help="A file (.lp, .lp.gz, .lp.zst), or a folder.")
    ],
    socket: Socket = None,
    host: Host = "",
    cluster: Cluster = None,
    exclude: Exclude = None,
) -> None:
    """Record what this node and its ranks tell, until Ctrl-C.

    Example: diagnosd record --socket /tmp/probe.sock node.lp.zst
    """
    _collect(socket, host, path, cluster, exclude)


@app.command(cls=Verb, short_help="Collect, record and analyze on a node, all the time.")
def agent(
    socket: Socket = None,
    host: Host = "",
    record: Record = "",
    analyze: Annotated[bool, typer.Option("--analyze", help="Say what is found, as it is found.")] = False,
    cluster: Cluster = None,
    exclude: Exclude = None,
) -> None:
    """Collect what this node and its ranks tell, until SIGTERM or Ctrl-C.

    Example: diagnosd agent --record /shared/telemetry/ --analyze

    A job is seen that has these in its environment (the first only where --socket is given):

    \b
      DIAGNOSD_SOCKET=PATH
      PYTHONPATH="$(diagnosd --probe-path)${PYTHONPATH:+:$PYTHONPATH}"
    """  # noqa: D301 - after a backspace, click leaves lines as they are
    if analyze:
        with _analysis(ERROR):
            from diagnosd import run as observed  # noqa: PLC0415
        raise typer.Exit(observed.watch(_socket(socket), observed.Options(host, record, cluster, exclude or ())))
    if not record:
        raise typer.BadParameter("nothing would become of it: --record PATH, --analyze or both", param_hint="agent")
    _collect(socket, host, record, cluster, exclude)


@app.command(cls=Verb, short_help="Print what the devices of this node tell.")
def read(
    once: Annotated[bool, typer.Option("--once", help="Say what this node says now, and end.")] = False,
    on_request: Annotated[
        bool, typer.Option("--on-request", help="Read once for every line on stdin, until it is closed.")
    ] = False,
    host: Host = "",
    exclude: Exclude = None,
    sys_root: SysRoot = None,
    socket: Socket = None,
) -> None:
    """Print what the devices of this node tell, as line protocol: once a second, until Ctrl-C.

    Example: diagnosd read --once --exclude 'mlx5_bond_*'

    It is an input for Telegraf, too: inputs.execd with signal = "none", or with --on-request and signal = "STDIN".
    """
    if once and on_request:
        raise typer.BadParameter(
            "one of them: it reads once, or as often as it is asked", param_hint="--once/--on-request"
        )
    from diagnosd import reader  # noqa: PLC0415

    if once:
        reader.once(host, _socket(socket), sys_root, exclude or ())
    reader.read(host, _socket(socket), sys_root, exclude or (), on_request=on_request)


@app.command(cls=Verb, short_help="Say what this node is, and what is not known of it.")
def inventory(
    host: Host = "",
    exclude: Exclude = None,
    sys_root: SysRoot = None,
    socket: Socket = None,
    output: OutputAs = Output.text,
) -> None:
    """Say what this node is: GPUs, ports, how near they are to each other, drivers, and what is not known of it.

    Example: diagnosd inventory --sys-root /tmp/captured
    """
    from diagnosd import inventory as node  # noqa: PLC0415

    raise typer.Exit(node.inventory(host, sys_root, exclude or (), _socket(socket), output))


@app.command(cls=Verb, short_help="Say what is not as it should be of these machines.")
def check(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            parser=_path,
            help="A recording (all its nodes and jobs), or what ibstat printed; else this node.",
        ),
    ] = None,
    host: Host = "",
    exclude: Exclude = None,
    sys_root: SysRoot = None,
    socket: Socket = None,
    cluster: Cluster = None,
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            callback=_plain_file,
            help="A job that is to run here, for costs: a JOB.toml of `diagnosd model`.",
        ),
    ] = None,
    output: OutputAs = Output.text,
) -> None:
    """Say what should be true of these machines and is not, why, what it costs, and what to do.

    Example: diagnosd check --cluster cluster.toml

    Exit code: 0 nothing was found, 3 something was, 1 nothing could be read.
    """
    if path is not None and sys_root is not None:
        raise typer.BadParameter("a recording or a tree, not both", param_hint="--sys-root")
    with _analysis(ERROR):
        from diagnosd import check as lint  # noqa: PLC0415
    if path is not None:
        raise typer.Exit(lint.told(host, path, cluster, job, output))
    raise typer.Exit(lint.machine(host, sys_root, exclude or (), _socket(socket), cluster, job, output))


@app.command("yield", cls=Verb, short_help="Have every device let go of for a while.")
def yield_(
    length: Annotated[
        str, typer.Option("--for", metavar="TIME", help="For how long: 90s, 15m, 2h; at most 24h.")
    ] = "15m",
    end: Annotated[bool, typer.Option("--end", help="Devices may be read again now.")] = False,
    socket: Socket = None,
) -> None:
    """Have every device let go of, so that it can be reset, its driver be replaced or its MIG mode be changed.

    Example: diagnosd yield --for 15m && nvidia-smi --gpu-reset -i 3

    It writes a file beside the agent's socket, where every reader looks each second, and returns after two. When the
    time is over, and 24 hours after the file was written at the latest, whatever stands in it, devices are read again.
    """
    from diagnosd import yields  # noqa: PLC0415

    try:
        seconds = yields.duration(length)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from error
    at = _socket(socket)
    print(f"diagnosd: {yields.end(at) if end else yields.begin(at, seconds)}")


plan = typer.Typer(cls=JobFirst, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    plan,
    name="model",
    short_help="Say what a job should take, by a model of it.",
    help="""Say what a job should take on machines that it may get, and how well the model tells published figures.

    Example: diagnosd model JOB.toml

    `diagnosd model job -h` has the options of what if.
    """,
)


class Refit(StrEnum):
    leave_one_source_out = "leave-one-source-out"


class Switch(StrEnum):
    on = "on"
    off = "off"


Table = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", exists=True, dir_okay=False, help="Published step times, or nccl-tests curves, as .csv."
    ),
]


def _finite(value: float | None) -> float | None:
    """NaN and infinity pass every test of a range."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no rate")
    return value


@plan.command(cls=Verb, name="job", short_help="Say what a step of this job should take.")
def model_job(
    path: Annotated[
        Path, typer.Argument(metavar="JOB.toml", exists=True, dir_okay=False, help="[job], [cluster] and nodes = N.")
    ],
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, max=10**6, help="On so many nodes.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="With these GPUs: H100-SXM, ...")] = None,
    nics: Annotated[int | None, typer.Option(metavar="N", min=1, max=10**6, help="With so many NICs a node.")] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="GBITS", min=1e-3, max=1e6, callback=_finite, help="Of so many Gbit/s.")
    ] = None,
    fabric: Annotated[str | None, typer.Option(metavar="KIND", help="On infiniband, roce, efa, ethernet, ...")] = None,
    gdr: Annotated[Switch | None, typer.Option(help="Whether NICs reach the GPUs' memory.")] = None,
    tp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Tensor parallel.")] = None,
    pp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Pipeline parallel.")] = None,
    cp: Annotated[int | None, typer.Option(metavar="N", min=1, help="Context parallel.")] = None,
    micro: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of a micro-batch.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of a step.")] = None,
    write_rate: Annotated[
        float | None,
        typer.Option(
            metavar="GBYTES",
            min=1e-3,
            max=1e6,
            callback=_finite,
            help="Checkpoints stop training, written at so many GB/s.",
        ),
    ] = None,
    output: OutputAs = Output.text,
) -> None:
    """Say what a step of this job should take, and of what it is made up; options say what if.

    Example: diagnosd model --nics 4 --rate 200 JOB.toml
    """
    with _analysis(ERROR):
        from diagnosd import plan as planned  # noqa: PLC0415
    direct = None if gdr is None else gdr == Switch.on
    asked = planned.WhatIf(nodes, gpu, nics, rate, fabric, direct, tp, pp, cp, micro, batch, write_rate)
    raise typer.Exit(planned.model(path, asked, output))


@plan.command(cls=Verb, short_help="Say how well published figures are told.")
def validate(
    path: Table,
    refit: Annotated[Refit | None, typer.Option(help="Fit the constants anew, without each source in turn.")] = None,
    output: OutputAs = Output.text,
) -> None:
    """Say how well published step times, or nccl-tests curves, are told.

    Example: diagnosd model validate --refit leave-one-source-out steps.csv
    """
    with _analysis(ERROR):
        from diagnosd import plan as planned  # noqa: PLC0415
    raise typer.Exit(planned.validate(path, output, refit=refit is not None))


@plan.command(cls=Verb, short_help="Fit the model's constants on published step times.")
def fit(path: Table) -> None:
    """Fit the model's constants on published step times, and print them as analysis/model/constants.py has them.

    Example: diagnosd model fit steps.csv > analysis/model/constants.py
    """
    with _analysis(ERROR):
        from diagnosd import fit as fitted  # noqa: PLC0415
    print(fitted.written(path), end="")


def _collect(socket: Path | None, host: str, record: str, cluster: Path | None, exclude: list[str] | None) -> None:
    from diagnosd import agent  # noqa: PLC0415

    agent.collect(_socket(socket), host, record, cluster, exclude or ())


@contextmanager
def _analysis(code: int) -> Iterator[None]:
    """Around the imports of what needs the analysis; `code` is the exit code where it is not installed."""
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("diagnosd"):
            raise
        print(f"diagnosd: {error.name} is not installed: pip install 'diagnosd[analysis]'", file=sys.stderr)
        raise typer.Exit(code) from None


def _version(asked: bool) -> None:
    if asked:
        print(f"diagnosd {__version__}")
        raise typer.Exit


def _probe_path(asked: bool) -> None:
    if asked:
        from diagnosd.agent import PROBE  # noqa: PLC0415

        print(PROBE)
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    __: Annotated[
        bool,
        typer.Option(
            "--probe-path",
            callback=_probe_path,
            is_eager=True,
            help="Show the folder that a job needs on its PYTHONPATH, and exit.",
        ),
    ] = False,
) -> None:
    """The options of diagnosd itself."""


def main() -> None:
    sys.excepthook = own_mistake
    threading.excepthook = lambda args: own_mistake(args.exc_type, args.exc_value, args.exc_traceback)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115 - started with it closed (2>&-)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still gets the verdict
    try:
        app(prog_name="diagnosd")
    except (OSError, ValueError) as error:  # a recording, a socket, a cluster.toml: the message names it
        print(f"diagnosd: {said(error)}", file=sys.stderr)
        sys.exit(ERROR)
    except Exception as error:  # noqa: BLE001 - the last one before a user: typer would print its traceback
        own_mistake(type(error), error, error.__traceback__)
        sys.exit(ERROR)
