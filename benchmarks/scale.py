"""Owns how much is measured: everything, or as much as takes a minute."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes, counts and seconds of one run of the benchmark."""

    turns: int
    """How often every contestant runs."""
    kernel_sizes: tuple[int, ...]
    kernel_queued: tuple[int, ...]
    """Numbers of updates that are queued when a pass begins."""
    kernel_s: float
    """A kernel runs again within its turn until this time is over."""
    sim_epochs: int
    """Of one small simulation, and of every seed of a comparison."""
    sim_plain_tasks: int
    sim_seeds: int
    large_tasks: tuple[int, int, int]
    """Tasks of M, L and T in a turn."""
    large_iterations: tuple[int, int, int]
    """Their local iterations."""
    large_turns: int
    large_programs: bool
    """Whether to measure the executors that have to be asked for, too; to compile takes a minute."""
    event_devices: tuple[int, ...]
    events: int
    net_mb: tuple[int, ...]
    net_s: float
    """Seconds for which updates are counted."""
    net_turns: int
    net_variants: bool
    """Whether to measure without durability and with TLS as well."""
    idle_workers: int
    startup_turns: int
    peer_turns: int = 2
    peer_net_s: float = 20.0
    """Seconds for which a peer's updates are counted; they are few."""
    peer_s: float = 300.0
    """A peer that has not finished by then is given up."""


FULL = Scale(
    turns=5,
    kernel_sizes=(10**5, 10**6, 10**7, 10**8),
    kernel_queued=(1, 2, 4, 8),
    kernel_s=0.1,
    sim_epochs=4000,
    sim_plain_tasks=400,
    sim_seeds=10,
    large_tasks=(60, 12, 12),
    large_iterations=(10, 5, 2),
    large_turns=3,
    large_programs=True,
    event_devices=(10**3, 10**5, 10**6),
    events=100_000,
    net_mb=(1, 10, 100),
    net_s=6.0,
    net_turns=3,
    net_variants=True,
    idle_workers=5_000,
    startup_turns=5,
)
QUICK = Scale(
    turns=2,
    kernel_sizes=(10**6, 10**7),
    kernel_queued=(1, 8),
    kernel_s=0.05,
    sim_epochs=600,
    sim_plain_tasks=100,
    sim_seeds=10,
    large_tasks=(10, 3, 3),
    large_iterations=(10, 1, 1),
    large_turns=1,
    large_programs=False,
    event_devices=(10**3, 10**6),
    events=20_000,
    net_mb=(10,),
    net_s=2.0,
    net_turns=1,
    net_variants=False,
    idle_workers=500,
    startup_turns=1,
    peer_turns=1,
)
