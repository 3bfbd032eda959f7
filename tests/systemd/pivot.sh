# Makes the root of a node in namespaces of its own, and becomes its PID 1: the real systemd.
# Arguments: a folder of its own, the host's name, trees of this machine that the node's unprivileged users may read.
set -eu
stage=$1 host=$2
shift 2
read -r pid _ </proc/self/stat # the old /proc still counts as the machine outside does
echo "$pid"
exec 3>&1 >"$stage/console" 2>&1
mount --make-rprivate /

mkdir "$stage/own"
mount -t tmpfs -o mode=0755 own "$stage/own"
cd "$stage/own"
mkdir up work root
mount -t overlay overlay -o "lowerdir=/,upperdir=$PWD/up,workdir=$PWD/work" root

# What lies below a closed folder (/root) is opened in the overlay alone; what lies on another file system is bound.
for tree in "$@"; do
    mkdir -p "root$tree"
    at=$tree
    while [ "$at" != / ]; do
        chmod a+rx "root$at"
        at=$(dirname "$at")
    done
done
for tree in "$@"; do
    [ "$(stat -c %d "$tree")" = "$(stat -c %d /)" ] || mount --bind "$tree" "root$tree"
done
cd root

# Nothing is started but what the node needs: no unit of this machine that another one wants, no generated one.
find usr/lib/systemd/system etc/systemd/system -type d -name '*.wants' -exec rm -rf {} +
rm -rf usr/lib/systemd/system-generators etc/systemd/system-generators
mkdir etc/systemd/system/sysinit.target.wants
for unit in systemd-journald.service systemd-tmpfiles-setup.service; do
    ln -s "/usr/lib/systemd/system/$unit" etc/systemd/system/sysinit.target.wants/
done
echo 0123456789abcdef0123456789abcdef >etc/machine-id
echo "$host" >etc/hostname

mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=0755 run run
mount -t tmpfs -o mode=1777 tmp tmp
for tree in "$@"; do # that lies there
    case $tree in /tmp/* | /run/*) mkdir -p ".$tree" && mount --bind "$tree" ".$tree" ;; esac
done
mount -t tmpfs -o mode=0755 dev dev
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
mknod -m 666 dev/tty c 5 0
mkfifo -m 644 dev/kmsg # the kernel's own belongs to the machine outside

mkdir .old
pivot_root . .old
umount -l /.old
echo ready >&3
exec 3>&-
exec env -i container=bed PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /usr/lib/systemd/systemd --log-target=journal --log-level=info </dev/null
