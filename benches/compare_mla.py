#!/usr/bin/env python3
"""The MLA query of this project against the same chain under torch.compile, in turn on one GPU.

    cargo bench --bench mla_query --no-run          # prints the path of the bench
    python3 benches/compare_mla.py target/release/deps/mla_query-...

Needs torch. Both run in CUDA graphs of one call per layer, whose weights together exceed the L2; rounds alternate between the two
and the medians are compared. The chain: RMSNorm of q_a and of the KV row, Q_B, the absorption by W_UK, the concatenation with the
rope part, and the KV row into an fp8_ds_mla cache. torch.compile fuses what it can and calls cuBLAS for the products; its graph is
captured as it is, without the time that Python needs to launch it.
"""

import argparse
import json
import statistics

import torch

from serving import Ours

Q_LORA, KV_LORA, NOPE, ROPE = 1536, 512, 128, 64
WEIGHT_BYTES = 240 << 20
EPS = 1e-5
ENTRY = 656
CASES = "6:1,6:2,6:4,6:8,6:64,6:128,12:1,12:2,12:4,12:8,12:64,12:128"


def norm(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()).bfloat16()


def query(qkv, q_a, kv_a, q_b, uk, slots, cache):
    """BF16 [tokens, heads, 576]; writes the tokens' entries."""
    tokens, heads = qkv.shape[0], uk.shape[0]
    q_c = norm(qkv[:, :Q_LORA], q_a)
    rows = torch.nn.functional.linear(q_c, q_b).view(tokens, heads, NOPE + ROPE)
    latent = torch.bmm(rows[..., :NOPE].transpose(0, 1), uk).transpose(0, 1)
    kv = norm(qkv[:, Q_LORA : Q_LORA + KV_LORA], kv_a).float().view(tokens, 4, 128)
    amax = kv.abs().amax(-1)
    scale = torch.exp2(torch.ceil(torch.log2(torch.clamp(amax / 448, min=1e-4))))
    codes = (kv / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).view(tokens, KV_LORA)
    rope = qkv[:, Q_LORA + KV_LORA :].contiguous().view(torch.uint8)
    cache[slots] = torch.cat([codes, scale.view(torch.uint8).view(tokens, 16), rope], -1)
    return torch.cat([latent, rows[..., NOPE:]], -1), q_c


class Torch:
    """A CUDA graph of one compiled call per layer."""

    def __init__(self, heads, tokens, mode):
        torch.manual_seed(1)

        def values(*shape, scale):
            return ((torch.rand(*shape, device="cuda") * 2 - 1) * scale).bfloat16()

        per_layer = 2 * heads * ((NOPE + ROPE) * Q_LORA + NOPE * KV_LORA)
        self.layers = [
            (
                values(Q_LORA, scale=1),
                values(KV_LORA, scale=1),
                values(heads * (NOPE + ROPE), Q_LORA, scale=0.05),
                values(heads, NOPE, KV_LORA, scale=0.1),
            )
            for _ in range(WEIGHT_BYTES // per_layer)
        ]
        self.qkv = values(tokens, Q_LORA + KV_LORA + ROPE, scale=2)
        self.slots = torch.arange(tokens, device="cuda")
        self.cache = torch.zeros(max(tokens, 64), ENTRY, dtype=torch.uint8, device="cuda")
        compiled = torch.compile(query, mode=mode, dynamic=False)
        run = lambda layer: compiled(self.qkv, *layer, self.slots, self.cache)  # noqa: E731
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                out, _ = run(self.layers[0])
        side.synchronize()
        got_cache = self.cache.clone()
        want, _ = query(self.qkv, *self.layers[0], self.slots, self.cache)
        error = (out.float() - want.float()).abs().max() / want.float().abs().max()
        same = (got_cache == self.cache).float().mean()
        if error > 0.02 or same < 0.95:
            raise SystemExit(f"compiled and eager differ: {error:.4f} of the largest, {same:.4f} of the cache bytes equal")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for layer in self.layers:
                self.result = run(layer)
        for _ in range(3):
            self.graph.replay()
        torch.cuda.synchronize()

    def sample(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(5):
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(self.layers))
        return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", help="the built bench `mla_query`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=CASES, help="HEADS:TOKENS, separated by commas")
    parser.add_argument("--mode", help="torch.compile's mode")
    parser.add_argument("--json", help="file for the medians")
    args = parser.parse_args()
    ours = Ours(args.bench)
    results = {}
    for case in args.cases.split(","):
        heads, tokens = map(int, case.split(":"))
        other = Torch(heads, tokens, args.mode)
        ours.sample(f"{heads} {tokens} planned")
        samples = {"ours": [], "torch.compile": []}
        for _ in range(args.rounds):
            samples["ours"].append(ours.sample(f"{heads} {tokens} planned"))
            samples["torch.compile"].append(other.sample())
        medians = {name: statistics.median(times) for name, times in samples.items()}
        results[case] = medians
        ratio = medians["torch.compile"] / medians["ours"]
        line = " | ".join(f"{name} {us:.2f} us" for name, us in medians.items())
        print(f"{heads} heads, {tokens} tokens: {line} | {ratio:.2f}", flush=True)
        del other
        torch.cuda.empty_cache()
    ours.close()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
