"""A drive that fails on command: a FUSE file system with one file. Reads of the file can be slow, short or failing.

This script speaks the kernel's FUSE protocol itself, so it needs no library, only /dev/fuse and the right to mount.
`faults.py` starts it as a separate process:

    drive.py FILE FOLDER SEED

Each line on stdin is a JSON object that replaces the faults in effect ({} ends them). For each, the script prints a line with
the number of reads and faults so far. At the end of stdin, it unmounts the folder and ends.
"""

import ctypes
import errno
import json
import os
import random
import stat
import struct
import sys
import threading
import time

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
FLUSH, INIT, OPENDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 25, 26, 27, 29, 36, 42
UNANSWERED = (FORGET, INTERRUPT, BATCH_FORGET)

ASYNC_READ, MAX_PAGES = 1 << 0, 1 << 22  # Flags of INIT.
DIRECT_IO = 1 << 0  # Flag of OPEN: every read reaches this process, none is answered from the page cache.
MS_RDONLY_NOSUID_NODEV, MNT_DETACH = 1 | 2 | 4, 2

ROOT, FILE = 1, 2
# Concurrent reads: a slow read occupies a thread.
THREADS = 16
LARGEST_READ = 1 << 20


class Faults:
    """The faults in effect, and how often each has occurred."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.plan = {}
        self.counts = {"reads": 0, "bytes": 0, "slow": 0, "short": 0, "error": 0}

    def next(self, size):
        """Counts a read and chooses its fault: seconds of delay, bytes to give, and whether it fails."""
        with self.lock:
            plan, chance = self.plan, self.random.random
            delay = plan.get("delay", 0) * chance() if chance() < plan.get("slow", 0) else 0
            fails = chance() < plan.get("error", 0)
            # Direct reads that end inside a block are the hardest to continue.
            give = self.random.randrange(1, size) if size > 1 and chance() < plan.get("short", 0) else size
            self.counts["reads"] += 1
            self.counts["bytes"] += 0 if fails else give
            self.counts["slow"] += delay > 0
            self.counts["error"] += fails
            self.counts["short"] += give < size and not fails
            return delay, give, fails


class Drive:
    """The file system: a root folder and the one file in it."""

    def __init__(self, source, faults):
        self.source = os.open(source, os.O_RDONLY)
        self.size = os.fstat(self.source).st_size
        self.name = os.path.basename(source).encode()
        self.faults = faults
        self.device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)

    def mount(self, folder):
        options = f"fd={self.device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"chaos", folder.encode(), b"fuse", MS_RDONLY_NOSUID_NODEV, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), f"cannot mount: {os.strerror(ctypes.get_errno())}")

    @staticmethod
    def unmount(folder):
        ctypes.CDLL(None).umount2(folder.encode(), MNT_DETACH)

    def serve(self):
        """Answers requests until the file system is unmounted."""
        while True:
            try:
                request = os.read(self.device, LARGEST_READ + 4096)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EAGAIN):
                    continue  # The request was taken back before it could be read.
                return
            _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
            if opcode in UNANSWERED:
                continue
            try:
                error, body = 0, self.answer(opcode, node, request[40:])
            except OSError as failure:
                error, body = -failure.errno, b""
            try:
                os.write(self.device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
            except OSError:
                pass  # The reader has gone.

    def answer(self, opcode, node, body):
        if opcode == INIT:
            _, minor, readahead, flags = struct.unpack_from("<IIII", body)
            flags &= ASYNC_READ | MAX_PAGES
            limits = struct.pack("<HHIIHH", THREADS, THREADS, 4096, 1, LARGEST_READ >> 12, 0)
            return struct.pack("<IIII", 7, min(minor, 31), readahead, flags) + limits + bytes(32)
        if opcode == LOOKUP:
            if node != ROOT or body.rstrip(b"\0") != self.name:
                raise OSError(errno.ENOENT, "no such file")
            return struct.pack("<QQQQII", FILE, 0, 3600, 3600, 0, 0) + self.attributes(FILE)
        if opcode == GETATTR:
            return struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, DIRECT_IO if opcode == OPEN else 0, 0)
        if opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self.read(offset, size)
        if opcode == STATFS:
            return struct.pack("<QQQQQIIII", 0, 0, 0, 1, 0, 4096, 255, 4096, 0) + bytes(24)
        if opcode in (RELEASE, RELEASEDIR, FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not needed here")

    def attributes(self, node):
        mode = stat.S_IFDIR | 0o555 if node == ROOT else stat.S_IFREG | 0o444
        size = 0 if node == ROOT else self.size
        times = struct.pack("<QQQIII", 0, 0, 0, 0, 0, 0)
        return struct.pack("<QQQ", node, size, -(-size // 512)) + times + struct.pack("<IIIIIII", mode, 1, 0, 0, 0, 4096, 0)

    def read(self, offset, size):
        delay, give, fails = self.faults.next(size)
        if delay:
            time.sleep(delay)
        if fails:
            raise OSError(errno.EIO, "as the chaos suite wants it")
        return os.pread(self.source, give, offset)


def main():
    source, folder, seed = sys.argv[1:]
    faults = Faults(int(seed))
    drive = Drive(source, faults)
    drive.mount(folder)
    try:
        for _ in range(THREADS):
            threading.Thread(target=drive.serve, daemon=True).start()
        print(json.dumps(faults.counts), flush=True)
        for line in sys.stdin:
            with faults.lock:
                faults.plan = json.loads(line)
                counts = dict(faults.counts)
            print(json.dumps(counts), flush=True)
    finally:
        drive.unmount(folder)


if __name__ == "__main__":
    main()
