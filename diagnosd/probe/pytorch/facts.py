"""What is known of a rank once it trains: its place in the process group, versions, its GPU."""

import sys
from typing import Any

from diagnosd.probe.reporter import Reporter


def watch(torch: Any, reporter: Reporter) -> None:
    def tell() -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            # Launchers that spawn their own ranks set no RANK.
            reporter.rank = reporter.rank._replace(rank=distributed.get_rank(), world=distributed.get_world_size())
        versions = "python=%d.%d.%d,torch=%s" % (*sys.version_info[:3], torch.__version__)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            versions += ",cuda=%s,nccl=%s" % (torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version())))
            uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
            if uuid is not None:
                reporter.facts["gpu"] = "GPU-%s" % uuid
        reporter.facts["versions"] = versions

    reporter.at_register.append(tell)
