#!/bin/bash
# Runs `kvstore bench engines` on ext4, xfs, btrfs and tmpfs, one after the other. Needs root.
#
#   bench/filesystems.sh [--block-size 2MiB ...]     arguments go to kvstore bench engines
#
# FOLDER (default .demo) holds one image file at a time, which grows up to SIZE (default 10G) as it
# is written; tmpfs takes as much memory. KVSTORE is the command (default .venv/bin/kvstore). What
# cannot be made or mounted here is named and left out.

set -euo pipefail

FOLDER=${FOLDER:-.demo}
SIZE=${SIZE:-10G}
KVSTORE=${KVSTORE:-.venv/bin/kvstore}
KINDS=${KINDS:-ext4 xfs btrfs tmpfs}

[ "$(id -u)" = 0 ] || { echo "filesystems.sh: mounting needs root" >&2; exit 2; }
mkdir -p "$FOLDER"
work=$(mktemp -d "$FOLDER/filesystems.XXXXXX")
loop=

# Takes down what is up; never fails.
clear_up() {
	if mountpoint -q "$work/mnt"; then umount "$work/mnt" || umount -l "$work/mnt" || true; fi
	[ -z "$loop" ] || losetup -d "$loop" || true
	loop=
	rm -f "$work/image"
}
trap 'clear_up; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Mounts an empty filesystem of kind $1 at $work/mnt.
make_mount() {
	if [ "$1" = tmpfs ]; then
		mount -t tmpfs -o "size=$SIZE,mode=0700" tmpfs "$work/mnt"
		return
	fi
	command -v "mkfs.$1" >/dev/null || { echo "mkfs.$1 is not installed"; return 1; }
	truncate -s "$SIZE" "$work/image"
	"mkfs.$1" -q "$work/image" || return 1
	# Without direct I/O the image itself would be cached, and no read would be cold.
	loop=$(losetup --find --show --direct-io=on "$work/image") || return 1
	mount -t "$1" "$loop" "$work/mnt"
}

mkdir "$work/mnt"
for kind in $KINDS; do
	echo "== $kind"
	if make_mount "$kind"; then
		"$KVSTORE" bench engines --dir "$work/mnt/bench" "$@"
	else
		echo "left out: $kind"
	fi
	clear_up
	echo
done
