"""What is known of a rank once it trains: its place in the process group, versions, its GPU."""

import sys
from typing import Any, Callable, Dict, Optional

from diagnosd.probe.reporter import Reporter


def watch(torch: Any, reporter: Reporter) -> None:
    def tell() -> None:
        _known(_place, torch, reporter)
        versions = {"python": "%d.%d.%d" % sys.version_info[:3]}
        versions.update((name, found) for name, found in _versions(torch).items() if found)
        reporter.facts["versions"] = ",".join("%s=%s" % version for version in versions.items())
        gpu = _known(_gpu, torch)
        if gpu:
            reporter.facts["gpu"] = gpu

    reporter.at_register.append(tell)


def _known(fact: Callable[..., Optional[str]], *arguments: Any) -> Optional[str]:
    """None also where this build of PyTorch lacks what it takes to find out: one without NCCL, say."""
    try:
        return fact(*arguments)
    except Exception:
        return None


def _place(torch: Any, reporter: Reporter) -> None:
    """Launchers that spawn their own ranks set no RANK."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        reporter.rank = reporter.rank._replace(rank=distributed.get_rank(), world=distributed.get_world_size())


def _versions(torch: Any) -> Dict[str, Optional[str]]:
    versions = {"torch": _known(lambda: str(torch.__version__))}
    if _known(_uses_cuda, torch):
        versions["cuda"] = _known(lambda: str(torch.version.cuda))
        versions["nccl"] = _known(lambda: ".".join(map(str, torch.cuda.nccl.version())))
    return versions


def _uses_cuda(torch: Any) -> Optional[str]:
    return "yes" if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _gpu(torch: Any) -> Optional[str]:
    if not _uses_cuda(torch):
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else "GPU-%s" % uuid
