"""What the parts of a run share: the options, the result being filled in, progress, and the probes of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.results import Result
from benchmarks.roofline import Probes, best
from benchmarks.timing import Sample, Task, interleave

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to run. ``budget_s`` and ``compile_s`` are seconds for each cell and for compiling backwards in all."""

    tokens: tuple[int, ...] = (1, 16, 128, 512, 4096)
    hidden: int = 4096
    threads: int = 2
    implementations: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    budget_s: float = 0.5
    compile_s: float = 110.0
    least: int = 5
    extras: bool = True


@dataclass
class Session:
    """One run. ``probes`` are those of the native library, where there is one."""

    options: Options
    result: Result
    say: Progress
    probes: Probes | None = None

    def load_probes(self) -> None:
        """Find the probes, or note why there are none."""
        try:
            self.probes = Probes(self.options.threads)
        except Exception as error:  # a library that is missing, old or broken is a reason, not an end
            self.result.notes.append(f"roofline: not measured: {' '.join(str(error).split())}")

    def interleaved(self, tasks: list[Task], tokens: int, beside_limits: bool) -> dict[tuple[str, ...], Sample]:
        """The samples of the tasks. With ``beside_limits`` the probes take turns with them and add to the limits."""
        options, found = self.options, self.probes if beside_limits else None
        calls = found.calls.items() if found else ()
        limits = [Task(("roofline", name), call, options.threads) for name, call in calls]
        samples = interleave(
            [*tasks, *limits], options.budget_s, options.least, lambda text: self.say(f"T={tokens}: {text}")
        )
        if found is not None:
            measured = found.roofline({task.key[1]: samples.pop(task.key).best_s for task in limits})
            self.result.roofline = best(self.result.roofline, measured)
        return samples
