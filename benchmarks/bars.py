"""Owns the bars: which figures are measured, what each is compared with, and the least that it must reach.

Rules kept here:
- A ratio is larger where Offbeat is better, also where the value itself should be small.
- No measured value is written here; a run puts its figures into `results.Results` by the key of their bar.
"""

from typing import Literal, NamedTuple

Kind = Literal["ratio", "at least", "at most"]
MB = 1_000_000
GB = 1_000 * MB


class Bar(NamedTuple):
    """One figure and what it must reach."""

    key: str
    what: str
    unit: str
    """The unit of the value and of the reference."""
    reference: str
    """What the value is compared with."""
    bar: float
    kind: Kind = "ratio"

    def ratio(self, value: float, reference: float) -> float:
        """How many times as good as the reference.

        >>> Bar("memory", "", "MB", "", 1000, "at most").ratio(400, 1000)
        2.5
        """
        return reference / value if self.kind == "at most" else value / reference

    def met(self, ratio: float) -> bool:
        """Is the ratio enough? A limit on the value itself is met from 1 on."""
        return ratio >= (self.bar if self.kind == "ratio" else 1.0)

    @property
    def steady(self) -> bool:
        """Is the figure comparable on a busy machine? Ratios within a run and memory are, seconds alone are not."""
        return self.kind == "ratio" or self.unit in ("MB", "KB")

    @property
    def asked(self) -> str:
        """The bar in words.

        >>> Bar("memory", "", "MB", "", 1000, "at most").asked
        'at most 1,000 MB'
        """
        return f"{self.bar:g} x" if self.kind == "ratio" else f"{self.kind} {self.bar:,g} {self.unit}"


TRIAD = "triad, same size and threads"
ONE_THREAD, TWO_THREADS = "plain loop, one thread", "plain loop, two threads"
PEERS = ("APPFL", "Flower")
KERNEL = (
    Bar("kernel_one_1e6", "mixing one update, 1e6, 2 threads", "GB/s", TRIAD, 0.9),
    Bar("kernel_one_1e7", "mixing one update, 1e7, 2 threads", "GB/s", TRIAD, 0.9),
    Bar("kernel_one_1e8", "mixing one update, 1e8, 2 threads", "GB/s", TRIAD, 0.9),
    Bar("kernel_queued_1e7", "8 queued updates in one pass, 1e7, 2 threads", "updates/s", "one by one", 1.8),
    Bar("kernel_queued_1e8", "8 queued updates in one pass, 1e8, 2 threads", "updates/s", "one by one", 1.8),
    Bar("kernel_rule_1e7", "the slowest rule over several vectors, 1e7, 2 threads", "GB/s", TRIAD, 0.8),
)
SIM = (
    Bar("sim_s_uniform", "sim S, uniform:0.5,1.5", "tasks/s", ONE_THREAD, 18),
    Bar("sim_s_lognormal", "sim S, lognormal:1.5", "tasks/s", ONE_THREAD, 17),
    Bar("sim_s_comparison", "sim S, comparison of 10 seeds", "tasks/s", ONE_THREAD, 20),
    Bar("sim_s_averaged", "sim S, participation and average", "tasks/CPU s", "without them", 0.91),
    Bar("sim_m_two_threads", "sim M (CNN, 1 M parameters), 2 cores", "tasks/s", TWO_THREADS, 1.3),
    Bar("sim_m_one_thread", "sim M, 2 cores", "tasks/s", ONE_THREAD, 0.97),
    Bar("sim_l_two_threads", "sim L (the paper's CNN), 2 cores", "tasks/s", TWO_THREADS, 1.3),
    Bar("sim_l_one_thread", "sim L, 2 cores", "tasks/s", ONE_THREAD, 0.97),
    Bar("sim_l_compiled_torch", "sim L, compiled-torch, 2 cores", "tasks/s", TWO_THREADS, 1.35),
    Bar("sim_m_channels_last", "sim M, channels-last, 2 cores", "tasks/s", TWO_THREADS, 1.3),
    Bar("sim_t_two_threads", "sim T (LSTM), 2 cores", "tasks/s", TWO_THREADS, 1.5),
    Bar("events_1e6", "coordinator and ledger, 1e6 devices", "events/s", "the bar", 40_000, "at least"),
    Bar("events_1e6_of_1e3", "coordinator and ledger, 1e6 devices", "events/s", "1e3 devices", 0.7),
)
NET = (
    Bar("net_10mb_raw", "served, 10 MB, durable, 8 workers", "updates/s", "raw sockets and fsync", 0.4),
    Bar("net_10mb_appfl", "served, 10 MB, durable, 8 workers", "updates/s", "APPFL", 25),
    Bar("net_10mb_flower", "served, 10 MB, durable, 8 workers", "updates/s", "Flower", 50),
    Bar("net_100mb_memory", "server's peak memory, 100 MB x 8 workers", "MB", "the bar", 1_000, "at most"),
    Bar("idle_held", "idle workers held", "workers", "the bar", 5_000, "at least"),
    Bar("idle_memory", "server's memory for an idle worker", "KB", "the bar", 60, "at most"),
)
STARTUP = (
    Bar("startup_help", "offbeat --help", "s", "the bar", 0.3, "at most"),
    Bar("startup_first_epoch", "offbeat simulate digits, to the first epoch", "s", "the bar", 3, "at most"),
)
PARTS = {"kernel": KERNEL, "sim": SIM, "net": NET, "startup": STARTUP}
BARS = {bar.key: bar for bars in PARTS.values() for bar in bars}
