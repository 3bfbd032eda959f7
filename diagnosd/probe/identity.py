"""Which job, which attempt and which rank a process belongs to (section 2 of the telemetry contract).

Everything is read from an environment that the caller passes, so that `diagnosd run`, the probe and a test agree.
Standard library only, Python 3.8 and later: this file is loaded into the training process.
"""

import os
import socket
from typing import Mapping, NamedTuple, Optional

_NO_STEP = 0xFFFFFFF0  # Slurm's batch, extern and interactive steps carry numbers from here on: they are no steps
_DIGITS = 18  # whatever they are, they fit in 64 bits; of some thousand Python makes an error
OFF = ("off", "0", "no", "false")
_PODINFO = "/etc/podinfo/labels"  # where the Kubernetes documentation mounts a pod's labels (downward API)


class Rank(NamedTuple):
    """A process's place in its job, as its environment tells. `local_rank` and `attempt` are None where it does not."""

    rank: int
    world: int
    local_rank: Optional[int]
    attempt: Optional[int]


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """DIAGNOSD_HOST where set (`run --host`), else the machine's own name."""
    return environ.get("DIAGNOSD_HOST") or socket.gethostname()


def boot_id(proc: str = "/proc") -> str:
    """The kernel's random name of this boot, "" where there is none."""
    try:
        with open(proc + "/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def job_name(environ: Mapping[str, str], launcher: int, podinfo: str = _PODINFO) -> str:
    """The first that is there of DIAGNOSD_JOB, Slurm's job, Kubernetes' owner, torchrun's run id, host-boot-pid.

    `launcher` is the pid of the process that started the ranks: `run`'s own, or what `launcher_pid` says.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    return (
        _printable(environ.get("DIAGNOSD_JOB", ""))
        or _slurm(environ)
        or ("KUBERNETES_SERVICE_HOST" in environ and _kubernetes_owner(podinfo))
        or (run_id != "none" and _printable(run_id))
        or "{}-{}-{}".format(host_name(environ), boot_id().replace("-", "")[:8] or "noboot", launcher)
    )


def launcher_pid(environ: Mapping[str, str], child_of: Optional[int] = None) -> int:
    """Who started the ranks: the parent under torchrun, srun or multiprocessing (`child_of`), else ourselves."""
    if child_of is not None:
        return child_of
    launched = "RANK" in environ or "SLURM_PROCID" in environ
    return os.getppid() if launched else os.getpid()


def rank_of(environ: Mapping[str, str]) -> Rank:
    """RANK, WORLD_SIZE and LOCAL_RANK of torchrun, else Slurm's, else the only rank of a world of one."""
    rank = _int(environ, "RANK", "SLURM_PROCID") or 0
    world = _int(environ, "WORLD_SIZE", "SLURM_NTASKS") or 1
    return Rank(rank, max(world, rank + 1), _int(environ, "LOCAL_RANK", "SLURM_LOCALID"), attempt_of(environ))


def attempt_of(environ: Mapping[str, str]) -> Optional[int]:
    """DIAGNOSD_ATTEMPT, else the restarts that Slurm and torchrun count together; None where neither counts."""
    declared = _int(environ, "DIAGNOSD_ATTEMPT")
    if declared is not None:
        return declared
    counts = [_int(environ, key) for key in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether DIAGNOSD says that this process is not to be observed."""
    return environ.get("DIAGNOSD", "").lower() in OFF


def _slurm(environ: Mapping[str, str]) -> str:
    number = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    if not number:
        return ""
    task = environ.get("SLURM_ARRAY_TASK_ID")
    step = _int(environ, "SLURM_STEP_ID")
    name = "-".join(part for part in ("slurm", environ.get("SLURM_CLUSTER_NAME"), number) if part)
    name += "_" + task if task else ""
    return _printable(name + (".%d" % step if step is not None and step < _NO_STEP else ""))


def _kubernetes_owner(podinfo: str) -> str:
    """The uid of the Job that owns this pod, from its labels `controller-uid="..."`; "" where they are not mounted."""
    try:
        with open(podinfo) as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition("=")
        if key in ("batch.kubernetes.io/controller-uid", "controller-uid"):
            return _printable(value.strip('"'))
    return ""


def _int(environ: Mapping[str, str], *keys: str) -> Optional[int]:
    for key in keys:
        value = environ.get(key, "")
        if value.isdecimal() and len(value) <= _DIGITS:
            return int(value)
    return None


def _printable(name: str) -> str:
    """A job's name becomes a tag: no control characters, no backslash at its end, at most 256 characters."""
    return "".join(c if c.isprintable() else "?" for c in name).strip()[:256].rstrip("\\ ")
