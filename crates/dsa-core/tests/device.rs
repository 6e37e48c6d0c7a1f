//! The device forms against the host forms: exhaustively where the inputs can be listed, else on seeded inputs. On the
//! simulator always, on a GPU when there is one.

use dsa_core::device::keys::{
    Keys8, both_halves, compare_codes, foreign_keys, half, lowest_bit, max_half, order16_x2, sort_halves,
};
use dsa_core::device::radix::{WARP_BINS, count, find_topdown_in_warp};
use dsa_core::device::scan::{Thread, block_exclusive, block_sum, fill, warp_inclusive, warp_prefix, warps_before};
use dsa_core::generate::SplitMix64;
use dsa_core::numerics::{bf16, e4m3, order16};
use gpu::LaunchConfig;
use ptx::*;
use test_devices::every_device;

kernel_args! {
    /// `out[i] = f(in[i])`
    pub struct MapArgs / MapParams {
        /// [n] output
        pub out: DevicePtr<u32>,
        /// [n, `WORDS`] input
        pub input: DevicePtr<u32>,
        /// elements
        pub n: u32,
    }
}

const THREADS: u32 = 256;

/// Checks `device_form` on groups of `WORDS` inputs against `host_form`.
#[track_caller]
fn check_map<const WORDS: usize>(
    name: &str,
    input: &[[u32; WORDS]],
    device_form: impl Fn([Reg<u32>; WORDS]) -> Reg<u32>,
    host_form: impl Fn([u32; WORDS]) -> u32,
) {
    let kernel = build::<MapArgs>(name, Target::Sm90a, LaunchBounds::threads(THREADS), |p| {
        let i = cta_index().mad(THREADS, thread_index());
        when(i.lt(p.n), || {
            let words = std::array::from_fn(|w| p.input.at(i * WORDS as u32 + w as u32).load());
            p.out.at(i).store(device_form(words));
        });
    })
    .unwrap();
    let flat: Vec<u32> = input.iter().flatten().copied().collect();
    for device in every_device() {
        let stream = device.stream().unwrap();
        let (out, source) = (device.alloc::<u32>(input.len()).unwrap(), device.upload(&flat).unwrap());
        let args = MapArgs { out: out.ptr(), input: source.ptr(), n: input.len() as u32 };
        let grid = (input.len() as u32).div_ceil(THREADS);
        device.load(&kernel).unwrap().launch(&stream, LaunchConfig::new(grid), &args).unwrap();
        for (words, got) in input.iter().zip(out.copy_to_vec(&stream).unwrap()) {
            let want = host_form(*words);
            assert_eq!(got, want, "{name}({words:#x?}) = {got:#x}, want {want:#x} on {}", device.info().name);
        }
    }
}

/// Every pair of one pattern with another: all 65,536 in each half.
fn every_half() -> Vec<[u32; 1]> {
    (0..=u16::MAX).map(|x| [u32::from(x) | u32::from(x.wrapping_mul(40503).wrapping_add(12345)) << 16]).collect()
}

fn each_half(pair: u32, f: impl Fn(u16) -> u16) -> u32 {
    u32::from(f(pair as u16)) | u32::from(f((pair >> 16) as u16)) << 16
}

#[test]
fn order16_equals_the_host_form_for_every_pattern() {
    check_map("order16", &every_half(), |[x]| order16_x2(x), |[x]| each_half(x, order16::order16));
}

#[test]
fn foreign_keys_equal_the_host_form_for_every_pattern() {
    check_map("foreign_keys", &every_half(), |[x]| foreign_keys(x), |[x]| each_half(x, order16::key_of));
}

#[test]
fn halves_and_their_maximum() {
    let max = |[x]: [u32; 1]| (x & 0xFFFF).max(x >> 16);
    check_map("max_half", &every_half(), |[x]| max_half(x), max);
    check_map("half", &every_half(), |[x]| half(x, 0) | (half(x, 1) << 16), |[x]| x);
    check_map("both_halves", &every_half(), |[x]| both_halves(x & 0xFFFF), |[x]| (x & 0xFFFF) * 0x0001_0001);
}

#[test]
fn lowest_bit_is_trailing_zeros() {
    let input: Vec<[u32; 1]> =
        (0..32).flat_map(|i| [[1 << i], [u32::MAX << i], [0x8000_0001u32 << i | 1 << i]]).collect();
    check_map("lowest_bit", &input, |[x]| lowest_bit(x), |[x]| x.trailing_zeros());
}

/// Eight keys and a threshold, some keys equal to it or one off.
fn octets(seed: u64, n: usize) -> Vec<[u32; 5]> {
    let mut rng = SplitMix64::new(seed);
    (0..n)
        .map(|i| {
            let threshold = match i % 4 {
                0 => 1,
                1 => 0xFFFF,
                _ => (rng.next_u64() as u16).max(1),
            };
            let mut key = || match rng.next_u64() % 4 {
                0 => threshold,
                1 => threshold.wrapping_add(1),
                2 => threshold - 1,
                _ => rng.next_u64() as u16,
            };
            let mut words = [0u32; 5];
            words[..4].iter_mut().for_each(|w| *w = u32::from(key()) | u32::from(key()) << 16);
            words[4] = u32::from(threshold);
            words
        })
        .collect()
}

fn keys_of(words: [u32; 5]) -> [u16; 8] {
    std::array::from_fn(|i| (words[i / 2] >> (16 * (i % 2))) as u16)
}

fn keys8([a, b, c, d, _]: [Reg<u32>; 5]) -> Keys8 {
    [a, b, c, d]
}

#[test]
fn eight_keys_are_compared_with_a_threshold_in_element_order() {
    check_map(
        "compare_codes",
        &octets(7, 4096),
        |x| compare_codes(keys8(x), both_halves(x[4] - 1)) & 0xFFFF,
        |x| {
            let code = |key: u16| match key.cmp(&(x[4] as u16)) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Equal => 1,
                std::cmp::Ordering::Greater => 2,
            };
            keys_of(x).into_iter().enumerate().map(|(i, key)| code(key) << (2 * i)).sum()
        },
    );
}

#[test]
fn halves_are_sorted_apart() {
    let word = |i: usize| move |x: [Reg<u32>; 5]| sort_halves(keys8(x))[i];
    for i in 0..4 {
        check_map("sort_halves", &octets(8, 1024), word(i), |x| {
            let half = |h: usize| {
                let mut keys = [0, 1, 2, 3].map(|w| keys_of(x)[2 * w + h]);
                keys.sort_unstable_by(|a, b| b.cmp(a));
                u32::from(keys[i])
            };
            half(0) | half(1) << 16
        });
    }
}

#[test]
fn bf16_conversions_and_arithmetic_equal_the_host_forms() {
    // Every BF16 pattern as a value, moved off by every kind of rounding remainder.
    let remainders = [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
    let floats: Vec<[u32; 2]> = (0..=u16::MAX)
        .flat_map(|x| {
            let other = u32::from(x.wrapping_mul(40503)) << 16;
            [0, 1, 2].map(|i| [u32::from(x) << 16 | remainders[(x as usize + i) % 6], other])
        })
        .collect();
    let pair = |f: fn(f32) -> u16, [lo, hi]: [u32; 2]| {
        u32::from(f(f32::from_bits(lo))) | u32::from(f(f32::from_bits(hi))) << 16
    };
    check_map(
        "bf16x2_from_f32",
        &floats,
        |[lo, hi]| Reg::<Bf16x2>::from_f32(lo.bitcast(), hi.bitcast()).to_bits(),
        |x| pair(bf16::from_f32, x),
    );
    check_map(
        "bf16x2_from_f32_relu",
        &floats,
        |[lo, hi]| Reg::<Bf16x2>::from_f32_relu(lo.bitcast(), hi.bitcast()).to_bits(),
        |x| pair(bf16::from_f32_relu, x),
    );
    let mut rng = SplitMix64::new(11);
    let triples: Vec<[u32; 3]> =
        every_half().into_iter().map(|[x]| [x, rng.next_u64() as u32, rng.next_u64() as u32 & 0xFFFF_7FFF]).collect();
    let halves = |f: fn(u16, u16, u16) -> u16, [a, b, c]: [u32; 3]| {
        let h = |x: u32, i: u32| (x >> (16 * i)) as u16;
        u32::from(f(h(a, 0), h(b, 0), h(c, 0))) | u32::from(f(h(a, 1), h(b, 1), h(c, 1))) << 16
    };
    let bits = Reg::<Bf16x2>::from_bits;
    check_map("fma_bf16x2", &triples, |[a, b, c]| bits(a).fma(bits(b), bits(c)).to_bits(), |x| halves(bf16::fma, x));
    check_map(
        "add_bf16x2",
        &triples,
        |[a, b, _]| (bits(a) + bits(b)).to_bits(),
        |x| halves(|a, b, _| bf16::add(a, b), x),
    );
    check_map(
        "mul_bf16x2",
        &triples,
        |[a, b, _]| (bits(a) * bits(b)).to_bits(),
        |x| halves(|a, b, _| bf16::mul(a, b), x),
    );
}

#[test]
fn e4m3_conversions_equal_the_host_forms() {
    let floats: Vec<[u32; 2]> = (0..=u16::MAX)
        .flat_map(|x| [[u32::from(x) << 16, u32::from(!x) << 16], [u32::from(x) << 16 | 0x8000, u32::from(x) << 15]])
        .collect();
    check_map(
        "e4m3x2_from_f32",
        &floats,
        |[lo, hi]| e4m3x2_from_f32(lo.bitcast(), hi.bitcast()).to_u32(),
        |[lo, hi]| u32::from(e4m3::from_f32(f32::from_bits(lo))) | u32::from(e4m3::from_f32(f32::from_bits(hi))) << 8,
    );
    // Through FP16, which holds every E4M3 value; the test compares values, NaN as such.
    let codes: Vec<[u32; 1]> = (0..=255u32).map(|code| [code | (255 - code) << 8]).collect();
    let value = |half: u16| half::f16::from_bits(half).to_f32();
    let same = |code: u8, half: u16| {
        let (want, got) = (e4m3::to_f32(code), value(half));
        want == got && want.is_sign_negative() == got.is_sign_negative() || want.is_nan() && got.is_nan()
    };
    let kernel_form = |[x]: [Reg<u32>; 1]| Reg::<F16x2>::from_e4m3x2(x.to_u16()).to_bits();
    // The host form gives the FP16 bits; a NaN may have any payload, so it is checked on its own.
    let finite: Vec<[u32; 1]> =
        codes.iter().copied().filter(|[x]| (x & 0x7F) != 0x7F && (x >> 8 & 0x7F) != 0x7F).collect();
    check_map("f16x2_from_e4m3x2", &finite, kernel_form, |[x]| {
        let f16 = |code: u8| half::f16::from_f32(e4m3::to_f32(code)).to_bits();
        let (lo, hi) = (f16(x as u8), f16((x >> 8) as u8));
        assert!(same(x as u8, lo) && same((x >> 8) as u8, hi));
        u32::from(lo) | u32::from(hi) << 16
    });
    assert_eq!(finite.len(), 252);
}

kernel_args! {
    /// One CTA over `in[threads]`.
    pub struct BlockArgs / BlockParams {
        /// [8, threads] output
        pub out: DevicePtr<u32>,
        /// [threads] input
        pub input: DevicePtr<u32>,
        /// the crossing's target
        pub need: u32,
    }
}

/// Runs `body` in one CTA of `threads`; it returns up to four words a thread.
fn run_block(
    name: &str,
    threads: u32,
    input: &[u32],
    need: u32,
    body: impl Fn(BlockParams, Thread) -> Vec<Reg<u32>>,
) -> Vec<Vec<Vec<u32>>> {
    let words = std::cell::Cell::new(0);
    let kernel = build::<BlockArgs>(name, Target::Sm90a, LaunchBounds::threads(threads), |p| {
        let t = Thread::current();
        let results = body(p, t);
        words.set(results.len());
        for (i, result) in results.into_iter().enumerate() {
            p.out.at(t.index + i as u32 * threads).store(result);
        }
    })
    .unwrap();
    every_device()
        .into_iter()
        .map(|device| {
            let stream = device.stream().unwrap();
            let out = device.alloc::<u32>(words.get() * threads as usize).unwrap();
            let source = device.upload(input).unwrap();
            let args = BlockArgs { out: out.ptr(), input: source.ptr(), need };
            device.load(&kernel).unwrap().launch(&stream, LaunchConfig::new(1), &args).unwrap();
            out.copy_to_vec(&stream).unwrap().chunks(threads as usize).map(<[u32]>::to_vec).collect()
        })
        .collect()
}

#[test]
fn scans_are_prefix_sums() {
    for threads in [32, 96, 512, 1024] {
        let mut rng = SplitMix64::new(u64::from(threads));
        let input: Vec<u32> = (0..threads).map(|_| rng.next_u64() as u32).collect();
        let results = run_block("scans", threads, &input, 0, |p, t| {
            let x = p.input.at(t.index).load();
            let [a, b, c] = ["a", "b", "c"].map(|name| SharedArray::<u32>::new(name, t.warps()));
            let within = warp_inclusive(x, t.lane);
            let (before, total) = block_exclusive(x, a, t);
            let sum = block_sum(x, b, t);
            when(t.lane.eq(31), || c.at(t.warp).store(within));
            sync_threads();
            let (before_warp, all) = warp_prefix(c, t);
            vec![within, before, total, sum, before_warp, all, warps_before(c, t)]
        });
        let total = input.iter().fold(0u32, |a, x| a.wrapping_add(*x));
        for result in results {
            let mut before = 0u32;
            for (i, x) in input.iter().enumerate() {
                let warp = i / 32 * 32;
                let sum = |range: &[u32]| range.iter().fold(0u32, |a, x| a.wrapping_add(*x));
                let got: Vec<u32> = result.iter().map(|words| words[i]).collect();
                let want =
                    vec![sum(&input[warp..=i]), before, total, total, sum(&input[..warp]), total, sum(&input[..warp])];
                assert_eq!(got, want, "thread {i} of {threads}");
                before = before.wrapping_add(*x);
            }
        }
    }
}

#[test]
fn fill_covers_every_word_and_no_other() {
    for (threads, len) in [(32, 5), (64, 2048), (128, 1023), (512, 33)] {
        let results = run_block("fills", threads, &[0], 0, |_, t| {
            let before = SharedArray::<u32>::aligned("before", 4, 16);
            let filled = SharedArray::<u32>::aligned("filled", len, 16);
            let after = SharedArray::<u32>::new("after", 4);
            when(t.index.lt(4), || {
                before.at(t.index).store(77u32);
                after.at(t.index).store(77u32);
            });
            fill(filled, 5, t);
            sync_threads();
            let sum = Var::new(0u32);
            for_range(0u32, len, 1u32, |i| sum.add(filled.at(i).load()));
            let guards = before.at(t.index & 3).load() + after.at(t.index & 3).load();
            vec![sum.get(), guards]
        });
        for result in results {
            assert!(result[0].iter().all(|sum| *sum == 5 * len), "{threads} threads, {len} words");
            assert!(result[1].iter().all(|guards| *guards == 154), "{threads} threads, {len} words");
        }
    }
}

/// Host form: the highest bin at which the counts from the top reach `need`, and the counts above it.
fn crossing(bins: &[u32], need: u32) -> (u32, u32) {
    let mut above = 0;
    for (bin, count) in bins.iter().enumerate().rev() {
        if above + count >= need {
            return (bin as u32, above);
        }
        above += count;
    }
    unreachable!("need is at most the total")
}

/// Digits that crowd few bins, or spread over all.
fn crowd(seed: u64, n: usize) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    let bins = u64::from(WARP_BINS);
    let spread = [1, 3, 40, bins][seed as usize % 4];
    let first = rng.next_u64() % (bins + 1 - spread);
    (0..n).map(|_| (first + rng.next_u64() % spread) as u32).collect()
}

#[test]
fn one_warp_finds_the_crossing_of_256_bins() {
    for round in 0..8 {
        let keys = crowd(round, 1024);
        let mut bins = vec![0u32; WARP_BINS as usize];
        keys.iter().for_each(|key| bins[*key as usize] += 1);
        for need in [1, 2, 341, 1023, 1024, 1025, u32::MAX] {
            let results = run_block("warp_crossing", 1024, &keys, need, |p, t| {
                let hist = SharedArray::<u32>::aligned("hist", WARP_BINS, 16);
                fill(hist, 0, t);
                sync_threads();
                count(hist.at(p.input.at(t.index).load()));
                sync_threads();
                let found = find_topdown_in_warp(hist, p.need, t.lane);
                vec![found.bin, found.above, found.here, found.total]
            });
            for result in results {
                assert!(result[3].iter().all(|total| *total == 1024), "round {round}");
                if need <= 1024 {
                    let (bin, above) = crossing(&bins, need);
                    for (words, want) in result.iter().zip([bin, above, bins[bin as usize]]) {
                        assert!(words.iter().all(|got| *got == want), "need {need}, round {round}: {words:?}, {want}");
                    }
                }
            }
        }
    }
}
