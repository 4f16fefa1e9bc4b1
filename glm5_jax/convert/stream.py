"""Many pieces of work in a few threads and bounded memory, with a line of progress; the speed of the disk to compare with."""

import concurrent.futures
import os
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable

PIECE_BYTES = 32 * 2**20  # of one piece of work, unless a single row is larger
_COPIES = 5  # of a piece that a thread may hold at once: as read, dequantised, transposed, encoded, written
_SAMPLE_BYTES = 2**30  # read to measure the disk


def threads(largest: int) -> int:
    """Threads whose pieces fit in the memory of three times the largest tensor (bytes) and 200 MB for them all."""
    return max(1, min((os.cpu_count() or 1) + 1, (3 * largest + 200 * 10**6) // (_COPIES * PIECE_BYTES)))


def run(jobs: Iterable[Callable[[], None]], workers: int) -> None:
    """Runs the jobs in threads, in order; the first exception, also Ctrl-C, ends them and is raised.

    The jobs are drawn one at a time: a list of all of them would take more memory than the work.
    """
    jobs, lock, stop = iter(jobs), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                job()
        except BaseException:
            stop.set()
            raise

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for result in [pool.submit(work) for _ in range(workers)]:
                result.result()
        finally:
            stop.set()


class Meter:
    """Bytes done of a total, shown on a terminal as they come, elsewhere once a minute."""

    def __init__(self, what: str, total: int):
        self._what, self._total, self._live = what, total, sys.stdout.isatty()
        self._every = 0.5 if self._live else 60.0
        self._before, self._lock = 0, threading.Lock()
        self.done, self._began = 0, time.monotonic()
        self._shown = self._began

    def add(self, nbytes: float, here: bool = True) -> None:
        """Counts bytes that are done, here or by an earlier process."""
        with self._lock:
            self.done += nbytes * here
            self._before += nbytes * (not here)
            if time.monotonic() - self._shown >= self._every:
                self._shown = time.monotonic()
                print(self._line(), end="\x1b[K\r" if self._live else "\n", flush=True)

    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def close(self) -> None:
        """Wipes the line."""
        if self._live:
            print("\x1b[K", end="", flush=True)

    def _line(self) -> str:
        done, rate = self._before + self.done, max(self.done, 1) / max(self.seconds(), 1e-9)
        left = int(max(self._total - done, 0) / rate)
        return (
            f"{self._what}: {done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, "
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        )


def raw_read_speed(files: list[pathlib.Path]) -> float:
    """Bytes/s at which the disk gives up to 1 GiB of the files, one after the other. Drops what memory holds of them all."""
    left, seconds, buffer = _SAMPLE_BYTES, 0.0, bytearray(16 * 2**20)
    for file in files:
        with open(file, "rb", buffering=0) as f:
            _drop_cached(f.fileno())
            began = time.perf_counter()
            while left > 0 and (n := f.readinto(buffer)):
                left -= n
            seconds += time.perf_counter() - began
            _drop_cached(f.fileno())
    return (_SAMPLE_BYTES - left) / max(seconds, 1e-9)


def _drop_cached(file: int) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def peak_memory() -> int:
    """Largest resident size of this process so far, bytes."""
    status = pathlib.Path("/proc/self/status")  # unlike ru_maxrss it does not count the process that started this one
    if status.is_file():
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
