"""What must be measured in a process of its own: peak memory, and the time that an import takes."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
IMPORT_RUNS = 3
IMPORT_TIME = """
import torch, time
start = time.perf_counter()
import rl_engine.mhc
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Memory:
    """Bytes of one forward and backward. ``extra``: the peak beyond what lay there before and what was returned."""

    tokens: int
    inputs: int
    outputs: int
    saved: int
    extra: int

    @property
    def share(self) -> float:
        """``extra`` over ``inputs``."""
        return self.extra / self.inputs


def _child(*command: str) -> str:
    done = subprocess.run((sys.executable, *command), cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"a child process failed with {done.returncode}: {last}")
    return done.stdout


def peak_memory(name: str, tokens: int, hidden: int, threads: int) -> Memory:
    """Of the implementation ``name``, in a fresh process."""
    found = json.loads(_child("-m", "benchmarks.processes", name, str(tokens), str(hidden), str(threads)))
    return Memory(**found)


def import_seconds() -> float:
    """``import rl_engine.mhc`` after ``import torch``: the median of a few fresh processes, the first not counted."""
    found = [float(_child("-c", IMPORT_TIME)) for _ in range(IMPORT_RUNS + 1)]
    return statistics.median(found[1:])


def resident(key: str) -> int:
    """Bytes of ``VmRSS`` or ``VmHWM``."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.M)
    if match is None:
        raise RuntimeError(f"{STATUS} has no {key}")
    return int(match[1]) * 1024


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages behind ``tensors``; whatever is no tensor does not count."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)}
    return sum(storages.values())


def flat(value: Any) -> Iterable[Any]:
    """The leaves of nested dicts, tuples and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from flat(part)
    else:
        yield value


def _measure(name: str, tokens: int, hidden: int, threads: int) -> Memory:
    from benchmarks.implementations import FORWARD_OUTPUTS, GRADIENTS, IMPLEMENTATIONS
    from benchmarks.inputs import draw

    torch.set_num_threads(threads)
    one, inputs = IMPLEMENTATIONS[name], draw(hidden, tokens)
    few = one.make(inputs.first(min(4, tokens)))
    few.both()  # starts threads and loads libraries
    runs = one.make(inputs)
    given = {t.untyped_storage().data_ptr() for t in inputs.tensors()}
    CLEAR.write_text("5", encoding="utf-8")  # VmHWM starts again from here
    before = resident("VmRSS")
    returned = runs.both()
    peak = resident("VmHWM")
    named = runs.both_tensors(returned)
    outputs = storage_bytes(named[key] for key in (*FORWARD_OUTPUTS, *GRADIENTS, "d_hidden", "d_c", "d_post"))
    beyond = [t for t in flat(returned) if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in given]
    saved = storage_bytes(beyond) - outputs
    return Memory(tokens, inputs.nbytes, outputs, saved, peak - before - outputs)


def main(argv: list[str]) -> int:
    name, tokens, hidden, threads = argv
    print(json.dumps(vars(_measure(name, int(tokens), int(hidden), int(threads)))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
