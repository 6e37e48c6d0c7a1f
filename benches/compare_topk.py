#!/usr/bin/env python3
"""Top-k of this project against torch.topk and FlashInfer's kernels, in turn on one GPU.

    cargo bench --bench indexer --no-run            # prints the path of the bench
    python3 benches/compare_topk.py target/release/deps/indexer-...

Needs torch; FlashInfer is measured where it can be imported. Every implementation runs in CUDA graphs, its logits in the L2 as
they are right after a score kernel; rounds alternate between implementations and the medians are compared. Ours is exact with
ties to the lower index, in ascending order and mapped to KV rows. torch.topk gives indices only. FlashInfer's
top_k_page_table_transform maps to KV rows: `default` leaves ties and order open, `exact` asks for what ours gives but the order.
"""

import argparse
import json
import statistics

import torch

from serving import Ours

K = 2048
PAGE = 64
LAUNCHES = 16
CASES = {
    "b1_8k": [8192],
    "b1_128k": [131072],
    "b8_32k": [32768] * 8,
    "b64_8k": [8192] * 64,
    "b64_64k": [65536] * 64,
    "b32_mixed": [int(1024 * 128 ** (i / 31)) for i in range(32)],
}


class Graph:
    """A CUDA graph of LAUNCHES calls of `body`."""

    def __init__(self, body):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.result = body()
        side.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(LAUNCHES):
                self.result = body()

    def sample(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(5):
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
        return statistics.median(times)


class Inputs:
    def __init__(self, lengths):
        rows, width = len(lengths), max(lengths)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.logits = torch.randn(rows, width, device="cuda").bfloat16()
        past = torch.arange(width, device="cuda")[None] >= self.lengths[:, None]
        self.logits[past] = -torch.inf
        pages = (width + PAGE - 1) // PAGE
        self.table = torch.randperm(rows * pages, dtype=torch.int32, device="cuda").view(rows, pages)
        # One entry a key, for kernels that know no pages.
        flat = self.table[:, :, None] * PAGE + torch.arange(PAGE, dtype=torch.int32, device="cuda")
        self.flat_table = flat.reshape(rows, -1)[:, :width].contiguous()
        self.half = self.logits.half()


def competitors(x):
    """Name and what it runs."""
    yield "torch.topk", lambda: torch.topk(x.logits, min(K, x.logits.shape[1]), dim=1, sorted=False)
    try:
        from flashinfer import topk
    except ImportError as error:
        print(f"no FlashInfer ({error})")
        return
    out = torch.empty(len(x.lengths), K, dtype=torch.int32, device="cuda")

    def pages(**options):
        return lambda: topk.top_k_page_table_transform(
            x.logits, x.table, x.lengths, K, page_size=PAGE, out=out, **options
        )

    yield "flashinfer default", pages()
    yield "flashinfer exact", pages(deterministic=True, tie_break=topk.TopKTieBreak.SMALL)
    yield "flashinfer clusters fp16", lambda: topk.topk_clusters_page_table_transform(
        x.half, x.lengths, x.flat_table, K, pdl=True
    )


def check(name, x, result):
    """That what was timed is a top-k: the multiset of the first row's selected logits."""
    length = int(x.lengths[0])
    values = x.half if "fp16" in name else x.logits
    want = torch.topk(values[0, :length].float(), min(K, length)).values.sort().values
    if name == "torch.topk":
        got = result.values[0, : min(K, length)]
    else:
        rows = result[0][result[0] >= 0].long()
        back = torch.full((x.table.numel() * PAGE,), -1, dtype=torch.long, device="cuda")
        back[x.flat_table[0, :length].long()] = torch.arange(length, device="cuda")
        got = values[0, back[rows]]
    if not torch.equal(got.float().sort().values, want):
        raise SystemExit(f"{name} does not select the top-k")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", help="the built bench `indexer`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", help="file for the medians")
    args = parser.parse_args()
    ours = Ours(args.bench)
    results = {}
    for case in args.cases.split(","):
        inputs = Inputs(CASES[case])
        graphs = {}
        for name, body in competitors(inputs):
            try:
                graphs[name] = Graph(body)
            except Exception as error:  # a kernel that refuses the shape or the capture is reported, not fatal
                print(f"{case}: {name} cannot run: {str(error).splitlines()[0]}")
                torch.cuda.synchronize()
                continue
            graphs[name].sample()
            check(name, inputs, graphs[name].result)
        samples = {"ours": [], "ours after score": [], **{name: [] for name in graphs}}
        for _ in range(args.rounds):
            samples["ours"].append(ours.sample(f"{case} 1 select"))
            samples["ours after score"].append(ours.sample(f"{case} 1 score+select") - ours.sample(f"{case} 1 score"))
            for name, graph in graphs.items():
                samples[name].append(graph.sample())
        medians = {name: statistics.median(times) for name, times in samples.items()}
        results[case] = medians
        line = " | ".join(f"{name} {us:.2f}" for name, us in medians.items())
        best = min((us, name) for name, us in medians.items() if not name.startswith("ours"))
        print(f"{case:9} us: {line} | best other / ours {best[0] / medians['ours']:.2f} ({best[1]})", flush=True)
    ours.close()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
