"""Disks, NFS and Lustre: captured files in, points out, and a file system that never answers, for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosd.collectors.disk import Disk
from diagnosd.collectors.lustre import Lustre, fields_of
from diagnosd.collectors.machine import Machine, captured
from diagnosd.collectors.mounts import Mount, mounts, once
from diagnosd.collectors.nfs import OPERATIONS, Nfs, exports
from diagnosd.point import Point, encode

ROOT = Path(__file__).parents[1]
NOW = 1_700_000_000_000_000_000

# A node with a root, a boot partition, a container's layers, an image, a bind mount, NFS and memory file systems.
MOUNTINFO = """\
22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
23 22 0:21 / /proc rw,nosuid shared:12 - proc proc rw
24 22 0:22 / /sys rw,nosuid shared:7 - sysfs sysfs rw
25 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw,size=100k
26 25 0:24 / /dev/shm rw,nosuid shared:3 - tmpfs tmpfs rw
27 22 0:25 / /run rw,nosuid shared:5 - tmpfs tmpfs rw
28 22 8:1 / /boot rw,relatime shared:30 - ext4 /dev/sda1 rw
29 22 7:0 / /snap/core/1 ro - squashfs /dev/loop0 ro
30 22 8:2 /var/lib/data /mnt/bind rw,relatime shared:1 - ext4 /dev/sda2 rw
31 22 0:50 / /var/lib/docker/overlay2/ab/merged rw - overlay overlay rw,lowerdir=/a:/b
32 22 0:60 / /data\\040sets/train rw shared:60 - nfs4 server:/export/a\\040b rw,vers=4.2
33 22 0:61 / /home rw - autofs /etc/auto.home rw
34 22 0:62 / /var/lib/lxcfs rw - fuse.lxcfs lxcfs rw
"""


def machine(root: Path, files: Mapping[str, str]) -> Machine:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Machine("n01", proc=root / "proc", sys=root / "sys")


def with_mounts(root: Path, *lines: str) -> Machine:
    return machine(root, {"proc/self/mountinfo": "".join(f"{line}\n" for line in lines)})


def rows(points: list[Point], tag: str = "path") -> dict[str | None, Point]:
    return {point.series.tag(tag): point for point in points if point.series.measurement != "diagnosd_event"}


# Mounts


def test_octal_escapes_in_names_are_undone() -> None:
    (found,) = mounts("32 22 0:60 / /data\\040sets/a\\134b\\043 rw - nfs4 server:/x\\011y rw\n")
    assert (found.path, found.device) == ("/data sets/a\\b#", "server:/x\ty")


def test_of_mounts_over_each_other_the_one_on_top_counts() -> None:
    found = mounts("1 0 8:1 / /mnt rw - ext4 /dev/sda1 rw\n2 1 0:9 / /mnt rw - nfs4 server:/x rw\n")
    assert [mount.device for mount in found] == ["server:/x"]


def test_optional_fields_may_be_none_or_many() -> None:
    found = mounts("1 0 8:1 / /a rw - ext4 /dev/sda1 rw\n2 1 8:2 / /b rw shared:1 master:2 - xfs /dev/sdb1 rw\n")
    assert [(mount.path, mount.fstype) for mount in found] == [("/a", "ext4"), ("/b", "xfs")]


def test_a_file_system_counts_once_where_its_root_is() -> None:
    bind, whole = Mount("/dev/sda2", "/m", "ext4", "8:2", False), Mount("/dev/sda2", "/long/er", "ext4", "8:2", True)
    deep, short = Mount("/dev/sdb", "/x/y", "ext4", "8:16", False), Mount("/dev/sdb", "/x", "ext4", "8:16", False)
    assert once([bind, whole, deep, short]) == [whole, short]


@given(st.text())
def test_no_list_of_mounts_breaks_the_parser(text: str) -> None:
    once(mounts(text))


@given(st.text(), st.sampled_from(["ext4", "nfs4", "fuse.x"]))
def test_no_path_breaks_the_question(tmp_path_factory: pytest.TempPathFactory, path: str, fstype: str) -> None:
    text = f"22 1 8:2 / {path} rw - {fstype} /dev/sda2 rw\n23 1 8:3 / / rw - ext4 /dev/sda3 rw\n"
    encode(Disk(machine(tmp_path_factory.mktemp("disk"), {"proc/self/mountinfo": text})).read(NOW))


@given(st.lists(st.sampled_from(["22", "8:2", "/", "-", " - ", "\\0", "\\777", "\\040", "nfs4", "", " "])))
def test_no_line_of_a_mount_breaks_the_parser(words: list[str]) -> None:
    once(mounts(" ".join(words)))


def test_what_ends_a_line_elsewhere_is_part_of_a_path_here() -> None:
    found = mounts("1 0 8:1 / /a\x0cb\u2028c rw - ext4 /dev/sda1 rw\n2 1 8:2 / /d rw - xfs /dev/sdb1 rw\n")
    assert [mount.path for mount in found] == ["/a\x0cb\u2028c", "/d"]


# Disks


STATVFS = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
int statvfs(const char *path, struct statvfs *has) {
    unsigned long blocks, unused, free;
    sscanf(getenv("SIZES"), "%lu %lu %lu", &blocks, &unused, &free);
    memset(has, 0, sizeof *has);
    *has = (struct statvfs){.f_frsize = 4096, .f_blocks = blocks, .f_bfree = unused, .f_bavail = free};
    return 0;
}
int statvfs64(const char *, struct statvfs *) __attribute__((alias("statvfs")));
"""
ASK = """
import json, sys
from pathlib import Path
from diagnosd.collectors.disk import Disk
from diagnosd.collectors.machine import Machine
disk = Disk(Machine("n01", Path(sys.argv[1])))
print(json.dumps([point.fields for point in disk.read(10**18)]), disk.errors)
"""


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ("100 40 30", '[{"total": 409600, "free": 122880, "used": 245760, "used_percent": 66.66666666666667}] 0'),
        ("100 140 30", "[] 1"),  # more is free than there is
        (f"100 40 {2**64 - 1}", "[] 1"),  # over its reserve: -1
        (f"{2**60} 40 30", "[] 0"),  # as much as you want, says a program that stores elsewhere
        ("100 100 0", "[] 0"),
    ],
)
def test_sizes_that_cannot_be_are_not_told(tmp_path: Path, sizes: str, told: str) -> None:
    (tmp_path / "odd.c").write_text(STATVFS)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "odd.so", tmp_path / "odd.c"], check=True)
    with_mounts(tmp_path, "22 1 8:2 / / rw - ext4 /dev/sda2 rw")
    environ = os.environ | {"LD_PRELOAD": str(tmp_path / "odd.so"), "SIZES": sizes}
    command = [sys.executable, "-c", ASK, str(tmp_path / "proc")]
    ran = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == told


def test_disk_has_telegrafs_names_tags_and_arithmetic(tmp_path: Path) -> None:
    (point,) = Disk(with_mounts(tmp_path, f"22 1 8:2 / {tmp_path} rw - ext4 /dev/sda2 rw")).read(NOW)
    has = os.statvfs(tmp_path)
    assert dict(point.series.tags) == {"host": "n01", "path": str(tmp_path), "device": "sda2", "fstype": "ext4"}
    assert set(point.fields) == {"total", "free", "used", "used_percent"}
    total, used, free = point.fields["total"], point.fields["used"], point.fields["free"]
    assert isinstance(total, int)
    assert isinstance(used, int)
    assert isinstance(free, int)
    assert total == has.f_blocks * has.f_frsize
    assert free <= total - used  # what is reserved for root is neither
    assert point.fields["used_percent"] == 100.0 * used / (used + free)
    assert encode([point])


def test_pseudo_file_systems_images_layers_of_containers_and_bind_mounts_have_no_row(tmp_path: Path) -> None:
    paths = {path: tmp_path / path.strip("/").replace("/", "_") for path in ("/boot", "/mnt/bind", "/data\\040sets")}
    for real in paths.values():
        real.mkdir()
    text = MOUNTINFO
    for path, real in paths.items():
        text = text.replace(f" {path} ", f" {real} ")
    found = rows(Disk(machine(tmp_path, {"proc/self/mountinfo": text})).read(NOW))
    assert set(found) == {"/", "/dev/shm", str(paths["/boot"])}  # the NFS path does not exist here


@pytest.mark.parametrize(
    ("fstype", "device", "has_a_row"),
    [
        ("xfs", "/dev/mapper/vg-root", True), ("zfs", "tank/data", True), ("btrfs", "/dev/nvme0n1p2", True),
        ("nfs", "server:/a", True), ("lustre", "10.0.0.1@o2ib:/scratch", True), ("ceph", "10.0.0.1:6789:/", True),
        ("cifs", "//server/share", True), ("wekafs", "weka/fs", True), ("gpfs", "fs1", True), ("beegfs", "x", True),
        ("fuse.sshfs", "host:/", True), ("fuse.juicefs", "JuiceFS:x", True), ("virtiofs", "share", True),
        ("tmpfs", "tmpfs", False), ("cgroup2", "cgroup2", False), ("autofs", "/etc/auto.home", False),
        ("squashfs", "/dev/loop3", False), ("nsfs", "nsfs", False), ("overlay", "overlay", False),
        ("fuse.lxcfs", "lxcfs", False), ("binfmt_misc", "x", False),
    ],
)  # fmt: skip
def test_which_file_systems_count(tmp_path: Path, fstype: str, device: str, *, has_a_row: bool) -> None:
    points = Disk(with_mounts(tmp_path, f"22 1 8:2 / {tmp_path} rw - {fstype} {device} rw")).read(NOW)
    assert bool(points) is has_a_row


def test_a_mount_that_cannot_be_read_takes_no_other_with_it(tmp_path: Path) -> None:
    gone = "23 1 8:3 / /no/such/place rw - ext4 /dev/sda3 rw"
    disk = Disk(with_mounts(tmp_path, gone, f"22 1 8:2 / {tmp_path} rw - ext4 /dev/sda2 rw"))
    assert set(rows(disk.read(NOW))) == {str(tmp_path)}


def test_a_mount_that_answered_once_and_is_refused_now_is_an_error_and_asked_again(tmp_path: Path) -> None:
    where = tmp_path / "a"
    where.mkdir()
    disk = Disk(with_mounts(tmp_path, f"22 1 8:2 / {where} rw - ext4 /dev/sda2 rw"))
    there = len(disk.read(NOW))
    where.rmdir()
    gone = len(disk.read(NOW + 1))
    where.mkdir()
    assert (there, gone, len(disk.read(NOW + 2)), disk.errors) == (1, 0, 1, 1)


def test_paths_that_cannot_be_said_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "odd\\").mkdir()
    line = f"22 1 8:2 / {tmp_path}/odd\\134 rw - ext4 /dev/sda2 rw"
    assert Disk(with_mounts(tmp_path, line)).read(NOW) == []


def test_thousands_of_volumes_are_bounded(tmp_path: Path) -> None:  # A109
    lines = []
    for number in range(300):
        (tmp_path / f"v{number}").mkdir()
        lines.append(f"{number} 1 8:{number} / {tmp_path}/v{number} rw - ext4 /dev/sd{number} rw")
    assert len(Disk(with_mounts(tmp_path, *lines)).read(NOW)) == 128


def test_a_captured_machine_has_no_disks_to_ask(tmp_path: Path) -> None:
    with_mounts(tmp_path, "22 1 8:2 / / rw - ext4 /dev/sda2 rw")
    assert Disk(captured("n01", tmp_path)).read(NOW) == []


def test_this_machines_root_has_a_row() -> None:
    assert "/" in rows(Disk(Machine("n01")).read(NOW))


# A FUSE file system is a program that answers the kernel through a descriptor. This one answers INIT and STATFS, as
# <linux/fuse.h> wants them, only once it is told to; there is nothing else in it.
HUNG = """\
import ctypes, json, os, struct, sys, threading
from pathlib import Path
from diagnosd.collectors.disk import Disk
from diagnosd.collectors.machine import Machine

NOW = 1_700_000_000_000_000_000
IN, OUT = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
INIT, STATFS, UNANSWERED = 26, 17, (2, 36, 42)

def answer(fuse):
    while True:
        request = os.read(fuse, 1 << 17)
        _, opcode, unique, *_ = IN.unpack_from(request)
        if opcode == INIT:
            major, minor, readahead = struct.unpack_from("=III", request, IN.size)
            body = struct.pack("=IIIIHHIIHHI28x", major, minor, readahead, 0, 1, 1, 1 << 16, 1, 0, 0, 0)
        elif opcode == STATFS:
            body = struct.pack("=QQQQQIIII24x", 1000, 600, 500, 10, 5, 4096, 255, 4096, 0)
        else:
            body = b""
        # What was read and is not answered waits for ever, and not even SIGKILL ends it.
        if opcode not in UNANSWERED:
            os.write(fuse, OUT.pack(OUT.size + len(body), 0 if body else -2, unique) + body)

where = sys.argv[1]
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"server:/hung", where.encode(), b"fuse.hung", 0, options.encode()):
    print(json.dumps({"skip": f"mount of FUSE: {os.strerror(ctypes.get_errno())}"}))
    sys.exit(0)
# and a disk inside of it
Path(sys.argv[2], "self").mkdir()
Path(sys.argv[2], "self/mountinfo").write_text(
    Path("/proc/self/mountinfo").read_text() + f"999 1 8:99 / {where}/disk rw - ext4 /dev/sdz rw\\n")
disk = Disk(Machine("n01", proc=Path(sys.argv[2])))
said = {}
def read(name, at_s):
    points = disk.read(NOW + at_s * 10**9)
    said[name] = {
        "rows": {p.series.tag("path"): p.fields for p in points if p.series.measurement == "disk"},
        "events": [(p.series.tag("kind"), p.series.tag("subject"), p.fields["text"])
                   for p in points if p.series.measurement == "diagnosd_event"],
        "errors": disk.errors,
        "threads": threading.active_count(),
    }
for at_s in (0, 10, 20, 30):
    read(f"hung at {at_s}", at_s)
threading.Thread(target=answer, args=(fuse,), daemon=True).start()
for thread in threading.enumerate():
    if thread.name.startswith("statvfs"):
        thread.join(10)
read("answers at 40", 40)
read("well at 50", 50)
print(json.dumps(said))
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What a Disk says, read by read, of a machine on which a network mount hangs for 30 s and then answers."""
    if os.geteuid():
        pytest.skip("only root may mount")
    if not Path("/dev/fuse").exists():
        pytest.skip("no /dev/fuse")
    where = tmp_path_factory.mktemp("hung")
    command = ["unshare", "--mount", sys.executable, "-c", HUNG, str(where), str(tmp_path_factory.mktemp("proc"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=30)
    said: dict[str, dict[str, object]] = json.loads(out.replace(str(where), "/hung"))
    if "skip" in said:
        pytest.skip(str(said["skip"]))
    return said


def test_a_hung_mount_and_a_disk_inside_of_it_are_absent_and_counted_and_the_others_are_read(
    hung: dict[str, dict[str, object]],
) -> None:
    for number, at in enumerate(("hung at 0", "hung at 10", "hung at 20", "hung at 30")):
        present = hung[at]["rows"]
        assert isinstance(present, dict)
        assert "/" in present
        assert not {"/hung", "/hung/disk"} & set(present)
        assert hung[at]["errors"] == 2 * (number + 1)


def test_a_hung_mount_holds_one_thread_however_often_it_is_read(hung: dict[str, dict[str, object]]) -> None:
    assert {said["threads"] for at, said in hung.items() if at.startswith("hung")} == {3}  # one for the disk inside


def test_a_hung_mount_is_told_once_after_10_s_and_once_when_it_answers(hung: dict[str, dict[str, object]]) -> None:
    assert {at: said["events"] for at, said in hung.items() if said["events"]} == {
        "hung at 10": [["telemetry_gap", "storage:/hung", "/hung (server:/hung) has not answered for 10 s"]],
        "answers at 40": [["telemetry_gap", "storage:/hung", "/hung (server:/hung) answers again"]],
    }


def test_a_mount_that_answers_again_has_its_row(hung: dict[str, dict[str, object]]) -> None:
    present = hung["well at 50"]["rows"]
    assert isinstance(present, dict)
    assert present["/hung"] == {
        "total": 4096 * 1000,
        "free": 4096 * 500,
        "used": 4096 * 400,
        "used_percent": pytest.approx(100 * 400 / 900),
    }


# NFS: lines as fs/nfs/super.c and net/sunrpc/stats.c print them, values invented

MOUNTSTATS = """\
device /dev/sda2 mounted on / with fstype ext4
no device mounted on /odd with fstype tmpfs
device server:/export/train mounted on /data\\040sets with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,nconnect=4,timeo=600,retrans=2,sec=sys
\tage:\t13968
\timpl_id:\tname='',domain='',date='0,0'
\tcaps:\tcaps=0xfff7,wtmult=512,dtsize=32768,bsize=0,namlen=255
\tnfsv4:\tbm0=0xfdffafff,bm1=0xf9be3e,bm2=0x0,acl=0x0,sessions,pnfs=not configured,lease_time=90
\tsec:\tflavor=1,pseudoflavor=1
\tevents:\t52 226 0 0 1 13 398 0 0 331 0 47 0 0 77 0 0 77 0 0 0 0 0 0 0 0 0
\tbytes:\t1207640230 0 0 0 1210214218 0 295483 0
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 832 0 1 0 11 6428 6428 0 12154 0 24 26 5726
\txprt:\ttcp 833 0 1 0 11 6428 6428 0 12154 0 24 26 5726
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 1298 1301 2 207680 1210292152 6 79386 79407 1
\t       WRITE: 0 0 0 0 0 0 0 0 0
\t        OPEN: 40 40 0 4000 6000 1 120 130 0
\t     GETATTR: 2927395007 2927394995 0 526931094212 362996810236 18446743919241604546 1667369447 1953587717 0
\t   SEQUENCE: 5 5 0 1 1 1 1 1 0
device old:/home mounted on /home with fstype nfs statvers=1.0
\topts:\trw,vers=3,rsize=32768
\tage:\t5
\tper-op statistics
\t        READ: 10 10 0 1500 330000 0 45 50
\t     READDIR: 3 4 1 100 2000 0 9 5009

"""


def nfs(root: Path, mountstats: str, mountinfo: str = "") -> Nfs:
    return Nfs(machine(root, {"proc/self/mountstats": mountstats, "proc/self/mountinfo": mountinfo}))


def of_operation(points: list[Point]) -> dict[tuple[str | None, str | None], Mapping[str, object]]:
    return {(point.series.tag("mountpoint"), point.series.tag("operation")): point.fields for point in points}


def test_each_operation_that_was_done_has_its_counters(tmp_path: Path) -> None:
    points = nfs(tmp_path, MOUNTSTATS).read(NOW)
    assert of_operation(points) == {
        ("/data sets", "READ"): {"ops": 1298, "retrans": 3, "bytes": 1210499832, "rtt": 79386, "exe": 79407},
        ("/data sets", "OPEN"): {"ops": 40, "retrans": 0, "bytes": 10000, "rtt": 120, "exe": 130},
        # more operations than transmissions: a kernel that counts wrongly, and nothing is said of retransmissions
        ("/data sets", "GETATTR"): {"ops": 2927395007, "bytes": 889927904448, "rtt": 1667369447, "exe": 1953587717},
        ("/home", "READ"): {"ops": 10, "retrans": 0, "bytes": 331500, "rtt": 45, "exe": 50},
        ("/home", "READDIR"): {"ops": 3, "retrans": 1, "bytes": 2100, "rtt": 9, "exe": 5009},
    }
    assert {point.series.tag("serverexport") for point in points} == {"server:/export/train", "old:/home"}
    assert encode(points)


def test_an_export_that_is_mounted_at_several_places_counts_once(tmp_path: Path) -> None:
    block = MOUNTSTATS[MOUNTSTATS.index("device old:") :]
    twice = block + block.replace(" /home ", " /var/lib/pods/x/home ") + block.replace(" /home ", " /other ")
    where = "".join(
        f"{number} 1 0:{number % 2} / {path} rw - nfs old:/home rw\n"
        for number, path in ((2, "/home"), (4, "/var/lib/pods/x/home"), (5, "/other"))
    )
    assert {point.series.tag("mountpoint") for point in nfs(tmp_path, twice, where).read(NOW)} == {"/home", "/other"}


def test_a_machine_without_nfs_is_silent(tmp_path: Path) -> None:
    collector = nfs(tmp_path, "device /dev/sda2 mounted on / with fstype ext4\n")
    assert (collector.read(NOW), collector.errors) == ([], 0)
    without = Nfs(machine(tmp_path / "none", {}))
    assert (without.read(NOW), without.errors) == ([], 0)


def test_hundreds_of_nfs_mounts_are_bounded(tmp_path: Path) -> None:  # A109
    block = MOUNTSTATS[MOUNTSTATS.index("device old:") :]
    many = "".join(block.replace(" /home ", f" /v{number} ") for number in range(200))
    assert len({point.series.tag("mountpoint") for point in nfs(tmp_path, many).read(NOW)}) == 64


def test_a_short_mount_before_one_of_several_pages_hides_it_not() -> None:
    """The kernel gives whole records: the first read of a real file ends before the one that is longer than a page."""
    with Path("/proc/self/mountstats").open() as file:
        whole = file.read()
    collector = Nfs(Machine("n01"))
    assert collector._mountstats.read() == whole


@given(st.text())
def test_no_text_breaks_the_parser_of_mountstats(text: str) -> None:
    list(exports(text))


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["device a:/b mounted on /c with fstype nfs4", "no device mounted on /", "device ", ""]),
            st.tuples(st.sampled_from([*sorted(OPERATIONS), "NULL"]), st.lists(st.integers(), max_size=10)).map(
                lambda row: f"\t{row[0]}: {' '.join(map(str, row[1]))}"
            ),
            st.text(alphabet="READ: 0123456789\u0661-\t", max_size=30),
        ),
        max_size=12,
    ),
)
def test_whatever_stands_in_mountstats_keeps_the_contract(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    encode(nfs(tmp_path_factory.mktemp("nfs"), "\n".join(lines)).read(NOW))


# Lustre: lines as lustre/obdclass/lprocfs_counters.c prints them, values invented

LLITE_OLD = """\
snapshot_time             1588873843.418498 secs.usecs
read_bytes                4 samples [bytes] 4096 1048576 3149824
write_bytes               2 samples [bytes] 1 5 6
open                      7 samples [regs]
getattr                   30 samples [regs]
odd
"""
LLITE_NEW = """\
snapshot_time             1588873843.418498123 secs.nsecs
start_time                1588870000.000000000 secs.nsecs
elapsed_time              3843.418498123 secs.nsecs
read_bytes                4 samples [bytes] 4096 1048576 3149824 2199040032768
read                      4 samples [usecs] 20 900 1500 900000
open                      7 samples [usecs] 100 300 1400 300000
"""


def test_a_lustre_client_has_telegrafs_names(tmp_path: Path) -> None:
    files = {"proc/fs/lustre/llite/scratch-ffff8b7a3c5e8000/stats": LLITE_OLD}
    (point,) = Lustre(machine(tmp_path, files)).read(NOW)
    assert dict(point.series.tags) == {"host": "n01", "name": "scratch"}
    assert point.series.measurement == "lustre2"
    assert point.fields == {
        "read_bytes": 3149824, "read_calls": 4, "write_bytes": 6, "write_calls": 2, "open": 7, "getattr": 30,
    }  # fmt: skip
    assert encode([point])


def test_newer_clients_tell_how_long_calls_took(tmp_path: Path) -> None:
    files = {"sys/kernel/debug/lustre/llite/scratch-ffff8b7a3c5e8000/stats": LLITE_NEW}
    (point,) = Lustre(machine(tmp_path, files)).read(NOW)
    assert point.fields == {
        "read_bytes": 3149824, "read_calls": 4, "read_usecs": 1500, "open": 7, "open_usecs": 1400,
    }  # fmt: skip


def test_two_mounts_of_one_lustre_are_told_apart_and_one_that_goes_takes_none_with_it(tmp_path: Path) -> None:
    folder = "sys/fs/lustre/llite"
    files = {f"{folder}/a-ff01/stats": LLITE_OLD, f"{folder}/a-ff02/stats": LLITE_OLD, f"{folder}/b-c-ff03/stats": ""}
    lustre = Lustre(machine(tmp_path, files | {f"{folder}/b-c-ff04/stats": LLITE_NEW}))
    assert set(rows(lustre.read(NOW), "name")) == {"a-ff01", "a-ff02", "b-c-ff04"}
    (tmp_path / folder / "a-ff01/stats").unlink()
    (tmp_path / folder / "a-ff01").rmdir()
    assert set(rows(lustre.read(NOW), "name")) == {"a", "b-c-ff04"}
    assert lustre.errors == 0


def test_a_machine_without_lustre_and_one_that_may_not_be_read_are_silent(tmp_path: Path) -> None:
    lustre = Lustre(Machine("n01", proc=tmp_path, sys=tmp_path))
    assert (lustre.read(NOW), lustre.errors) == ([], 0)


@given(st.text())
def test_no_text_breaks_the_parser_of_lustre(text: str) -> None:
    assert all(type(value) is int for value in fields_of(text).values())


@given(st.lists(st.sampled_from(["read_bytes", "open", "samples", "[bytes]", "[usecs]", "5", "-1", "9" * 30, "\n"])))
def test_no_words_of_lustre_break_its_parser(words: list[str]) -> None:
    assert all(type(value) is int and 0 <= value < 2**63 for value in fields_of(" ".join(words)).values())
