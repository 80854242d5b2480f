#!/usr/bin/env bash
# Boots a real systemd as the first process of namespaces of its own, on an overlay of this machine's root directory,
# and stays in the foreground until it is killed. Nothing it does is seen outside, and nothing is left behind.
#   boot.sh FOLDER    FOLDER is for its files, and gets `pid`: enter with nsenter -t "$(cat FOLDER/pid)" -a COMMAND
# Needs root, overlayfs and a cgroup2 mount.
set -euo pipefail
folder=$1
for cgroups in /sys/fs/cgroup/unified /sys/fs/cgroup; do
    [ -e "$cgroups/cgroup.subtree_control" ] && break
done
group=$cgroups/kvferry-test-$$
mkdir "$group"
export folder group

clean_up() {
    kill -9 "$outer" 2>/dev/null || true
    wait "$outer" 2>/dev/null || true
    for _ in $(seq 100); do
        find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
        [ -d "$group" ] || break
    done
}

(
    echo "$BASHPID" >"$group/cgroup.procs" # so that the cgroup namespace is rooted here
    exec unshare --mount --pid --cgroup --uts --ipc --fork --kill-child --propagation private bash -euc '
        mount -t tmpfs -o mode=755 tmpfs "$folder/overlay"
        mkdir "$folder"/overlay/{upper,work,root}
        root=$folder/overlay/root
        mount -t overlay overlay -o lowerdir=/,upperdir="$folder/overlay/upper",workdir="$folder/overlay/work" "$root"
        mount -t proc proc "$root/proc"
        mount --bind "$root/proc/sys" "$root/proc/sys"
        mount -o remount,bind,ro "$root/proc/sys" # systemd-sysctl must not touch this kernel
        mount -t sysfs -o ro sysfs "$root/sys"
        mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
        mount -t tmpfs -o mode=755 tmpfs "$root/run"
        mount -t tmpfs -o mode=755 tmpfs "$root/dev"
        for device in null zero full random urandom tty; do
            touch "$root/dev/$device"
            mount --bind "/dev/$device" "$root/dev/$device"
        done
        mkdir "$root/dev/shm"
        mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
        ln -s /proc/self/fd "$root/dev/fd"
        : >"$root/etc/machine-id"
        cp -a "$folder/etc/." "$root/etc/"
        mkdir -p "$root/run/systemd/system"
        for unit in systemd-sysctl systemd-tmpfiles-setup systemd-update-utmp systemd-modules-load systemd-udevd \
            systemd-timesyncd systemd-logind getty@tty1 console-getty; do
            ln -s /dev/null "$root/run/systemd/system/$unit.service"
        done
        for unit in timers.target tmp.mount dev-hugepages.mount sys-kernel-debug.mount; do
            ln -s /dev/null "$root/run/systemd/system/$unit"
        done
        cd "$root"
        mkdir -p mnt/old
        pivot_root . mnt/old
        exec chroot . /bin/bash -c "umount -l /mnt/old; exec env -i container=kvferry-test \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=basic.target"
    '
) &
outer=$!
trap clean_up EXIT
trap 'exit 0' TERM
while [ -d "/proc/$outer" ]; do
    inner=$(tr -d ' ' <"/proc/$outer/task/$outer/children" 2>/dev/null || true)
    [ -n "$inner" ] && break
done
echo "$inner" >"$folder/pid.new"
mv "$folder/pid.new" "$folder/pid"
echo booted
wait "$outer"
