"""Process groups under the contract's names, `NAME:LOWEST`, and their members told to the agent."""

from typing import Any, Dict, List

from diagnosd.probe import live
from diagnosd.probe.message import Value

_NAMES = ("world", "tp", "cp", "ep", "etp", "dp", "edp", "pp", "shard", "replicate")
_known: Dict[Any, str] = {}


def name(functions: Any, group: Any = None) -> str:
    """Of a process group, None being the world, as torch.distributed.distributed_c10d (`functions`) knows it.

    What it is for is read from its description, `mesh_tp` for example. "" for a group that this rank is not in.
    """
    group = group if group is not None else functions.GroupMember.WORLD
    if group is None or group is functions.GroupMember.NON_GROUP_MEMBER:
        return ""
    key = (id(group), getattr(group, "group_name", ""))  # an id may come again after destroy_process_group
    found = _known.get(key)
    if found is None:
        found = _known[key] = _describe(functions, group)
    return found


def _describe(functions: Any, group: Any) -> str:
    members: List[int] = sorted(functions.get_process_group_ranks(group))
    purpose = str(getattr(group, "group_desc", "")).rpartition("_")[2]
    if len(members) == functions.get_world_size():
        purpose = "world"
    told = "%s:%d" % (purpose if purpose in _NAMES else "other", members[0])
    fields: Dict[str, Value] = {"members": ranges(members), "backend": str(functions.get_backend(group))}
    live().group(told, fields)
    return told


def ranges(ranks: List[int]) -> str:
    """Sorted ranks as `0-7,64-71`."""
    spans: List[List[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join("%d" % low if low == high else "%d-%d" % (low, high) for low, high in spans)
