"""GPUs in numbers: their memory, how fast they read and multiply, and what joins several of them."""

from __future__ import annotations

from dataclasses import dataclass

HOST_CARDS = 8  # that are joined by links in one host; more are on several hosts, over a network


@dataclass(frozen=True)
class Link:
    """What a card sends to others over, at once with what it receives. `bandwidth`: bytes a second in one direction, of
    a data sheet; `share`: of it, that sums of many rows use. `latency`: seconds until two ranks have a small sum from
    NCCL. `pair`: (latency, share) of the sums that two ranks make in memory that both reach, where they do."""

    name: str
    bandwidth: float
    share: float
    latency: float
    pair: tuple[float, float] | None = None

    def sum_seconds(self, num_bytes: float, ranks: int) -> float:
        """Until all of so many ranks have the sum of what each has so many bytes of: each sends its share to the
        others, then the sums of that. A small one takes as many times longer as it has more rounds."""
        if ranks == 1:
            return 0.0
        if ranks == 2 and self.pair is not None:
            latency, share = self.pair
            return latency + num_bytes / (share * self.bandwidth)
        return self._begin(ranks) + 2 * (ranks - 1) / ranks * num_bytes / (self.share * self.bandwidth)

    def gather_seconds(self, num_bytes: float, ranks: int) -> float:
        """Until all have the bytes of all, of which each has so many."""
        return 0.0 if ranks == 1 else self._begin(ranks) + (ranks - 1) * num_bytes / (self.share * self.bandwidth)

    def send_seconds(self, num_bytes: float) -> float:
        """From one card to another."""
        return self.latency + num_bytes / (self.share * self.bandwidth)

    def _begin(self, ranks: int) -> float:
        return self.latency * (1 + (ranks - 2) / 4)


# NCCL's published times: some 7, 10 and 17 µs for small sums over 2, 4 and 8 cards, 0.6 to 0.75 of the links for large
# ones. Without NVLink the bytes go through the host's memory. Of two ranks on NVLink 4, our own kernel was measured:
# with the norm behind it, which is counted elsewhere, it takes 1.7 µs more than that for a row, and 355 GB/s for many.
PAIR = (2e-6, 0.8)
NVLINK3 = Link("NVLink 3", 300e9, 0.65, 7e-6, PAIR)
NVLINK4 = Link("NVLink 4", 450e9, 0.65, 7e-6, PAIR)
NVLINK5 = Link("NVLink 5", 900e9, 0.65, 7e-6, PAIR)
PCIE4 = Link("PCIe 4 x16", 32e9, 0.65, 20e-6)
NETWORK = Link("400 Gb/s network", 50e9, 0.65, 25e-6)


@dataclass(frozen=True)
class Card:
    """Of one GPU. `measured`: bandwidth and products are, not shares of what a data sheet says."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes a second
    products: float  # floating-point operations a second, 16 bit, dense
    link: Link
    fp8: float  # how many times as fast products of FP8 are, by the data sheet; 0: there are none
    codes: bool = True  # quantised weights stay codes: from Hopper on
    measured: bool = False

    def joined(self, cards: int) -> Link:
        """What joins so many."""
        return self.link if cards <= HOST_CARDS else NETWORK


CARDS = {
    card.name: card
    for card in (
        Card("h200", 150_754_820_096, 4.24e12, 783e12, NVLINK4, 1.7, measured=True),
        Card("h100", 85_520_809_984, 3.35e12 * 0.9, 989e12 * 0.75, NVLINK4, 1.7),
        Card("h20", 102_000_000_000, 4.0e12 * 0.9, 148e12 * 0.9, NVLINK4, 1.7),
        Card("a100", 85_198_045_184, 2.04e12 * 0.9, 312e12 * 0.8, NVLINK3, 0, codes=False),
        Card("l40s", 48_318_382_080, 0.864e12 * 0.9, 362e12 * 0.7, PCIE4, 0, codes=False),
        Card("l4", 24_152_899_584, 0.3e12 * 0.9, 121e12 * 0.6, PCIE4, 0, codes=False),
        Card("b200", 191_000_000_000, 8.0e12 * 0.9, 2250e12 * 0.7, NVLINK5, 1.7),
    )
}  # fmt: skip
