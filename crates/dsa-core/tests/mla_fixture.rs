//! The oracle of the MLA query against independently computed answers.

use dsa_core::layout::mla_entry::{
    DS_LATENT, DS_ROPE, DS_SCALES, MlaCacheForm, NVFP4_LATENT, NVFP4_ROPE, NVFP4_SCALES,
};
use dsa_core::layout::mla_rows::{K_PE, QKV, QUERY};
use dsa_core::numerics::{bf16, e2m1, e4m3, order16};
use dsa_core::oracle::mla_query::{self, Approximate, MlaWeights, QueryNorm};
use ptx_sim::numeric::{approx, float};
use safetensors::SafeTensors;

const EPS: f32 = 1e-5;
const HEADS: usize = 6;
const TOKENS: usize = 20;
const PAGE_TOKENS: usize = 64;

/// The hardware's `rsqrt.approx`, and `div.full` by an immediate: a product with the rounded reciprocal.
fn hardware() -> Approximate<'static> {
    Approximate {
        rsqrt: &|x| f32::from_bits(approx::rsqrt(x.to_bits())),
        div_full_1536: &|x| f32::from_bits(float::mul(x.to_bits(), (1.0f32 / 1536.0).to_bits())),
    }
}

struct Fixture(Vec<u8>);

impl Fixture {
    fn load() -> Fixture {
        let path = format!("{}/../../tests/fixtures/mla_query_h6.safetensors", env!("CARGO_MANIFEST_DIR"));
        Fixture(std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}")))
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap().data().to_vec()
    }

    fn bf16(&self, name: &str) -> Vec<u16> {
        self.bytes(name).as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect()
    }

    fn f32(&self, name: &str) -> f32 {
        f32::from_le_bytes(self.bytes(name).try_into().unwrap())
    }

    fn slots(&self) -> Vec<i64> {
        self.bytes("slots").as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }
}

fn ulps(a: u16, b: u16) -> u32 {
    u32::from(order16::key_of(a).abs_diff(order16::key_of(b)))
}

/// Codes on an even grid of neighbours: sign and magnitude.
fn e4m3_steps(a: u8, b: u8) -> u32 {
    let line = |c: u8| i32::from(c & 0x7F) * if c & 0x80 != 0 { -1 } else { 1 };
    line(a).abs_diff(line(b))
}

fn e2m1_steps(a: u8, b: u8) -> u32 {
    let line = |c: u8| i32::from(c & 7) * if c & 8 != 0 { -1 } else { 1 };
    line(a).abs_diff(line(b))
}

/// At most one step apart, and apart in at most 1 % of the codes.
#[track_caller]
fn close(pairs: impl Iterator<Item = (u8, u8)>, steps: fn(u8, u8) -> u32, what: &str) {
    let (mut n, mut differ) = (0, 0);
    for (got, want) in pairs {
        assert!(steps(got, want) <= 1, "{what}: code {n}: {got:02x}, want {want:02x}");
        n += 1;
        differ += usize::from(got != want);
    }
    assert!(n > 0 && differ * 100 <= n, "{what}: {differ} of {n} codes differ");
}

fn query_c(f: &Fixture, token: usize, norm: QueryNorm) -> Vec<u16> {
    let (qkv, w) = (f.bf16("qkv"), f.bf16("w_qa"));
    mla_query::query_c(&qkv[token * QKV..(token + 1) * QKV], &w, EPS, norm, hardware())
}

#[test]
fn the_normalised_query_is_within_one_ulp_in_both_forms() {
    let f = Fixture::load();
    let want = f.bf16("expected.qc");
    for norm in [QueryNorm::Dsa, QueryNorm::K3] {
        for (token, want) in want.chunks(1536).enumerate() {
            for (i, (got, want)) in query_c(&f, token, norm).iter().zip(want).enumerate() {
                assert!(ulps(*got, *want) <= 1, "{norm:?} token {token} element {i}: {got:04x}, want {want:04x}");
            }
        }
    }
}

#[test]
fn queries_are_within_their_tolerance() {
    let f = Fixture::load();
    let (kv_a, q_a, q_b, uk) = (f.bf16("w_kva"), f.bf16("w_qa"), f.bf16("w_qb"), f.bf16("w_uk"));
    let weights = MlaWeights { q_a: &q_a, kv_a: &kv_a, q_b: &q_b, uk: &uk };
    let (want, want_fp8, scale) = (f.bf16("expected.q_bf16"), f.bytes("expected.q_fp8"), f.f32("q_scale_inv"));
    let mut differ = 0;
    for token in 0..TOKENS {
        let q_c = query_c(&f, token, QueryNorm::Dsa);
        for head in 0..HEADS {
            let at = (token * HEADS + head) * QUERY;
            let got = mla_query::query_head(&q_c, &weights, head);
            let want = &want[at..at + QUERY];
            let largest = want.iter().map(|x| bf16::to_f32(*x).abs()).fold(0.0, f32::max);
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let near = (bf16::to_f32(*got) - bf16::to_f32(*want)).abs() <= largest / 256.0;
                assert!(near || ulps(*got, *want) <= 2, "token {token} head {head} column {i}: {got:04x}, {want:04x}");
            }
            let codes_got = mla_query::query_fp8(&got, scale);
            for (i, (got, want)) in codes_got.into_iter().zip(want_fp8[at..at + QUERY].iter().copied()).enumerate() {
                // Where columns cancel to almost nothing, the steps are finer than the tolerance of the value.
                let near = (e4m3::to_f32(got) - e4m3::to_f32(want)).abs() <= largest * scale / 256.0;
                assert!(
                    near || e4m3_steps(got, want) <= 1,
                    "token {token} head {head} column {i}: {got:02x}, {want:02x}"
                );
                differ += usize::from(got != want);
            }
        }
    }
    assert!(differ * 100 <= want_fp8.len(), "{differ} of {} codes differ", want_fp8.len());
}

/// The whole cache after the insert of every token.
fn cache(f: &Fixture, form: MlaCacheForm) -> Vec<u8> {
    let bytes = form.entry_bytes();
    let mut cache = vec![0xA5; 3 * PAGE_TOKENS * bytes];
    let (qkv, w) = (f.bf16("qkv"), f.bf16("w_kva"));
    for (token, slot) in f.slots().into_iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        let row = &qkv[token * QKV..(token + 1) * QKV];
        let entry = mla_query::insert(form, row, &w, EPS, f.f32("k_scale"), hardware());
        cache[slot * bytes..(slot + 1) * bytes].copy_from_slice(&entry);
    }
    cache
}

#[test]
fn caches_match_with_exact_scales_rope_and_untouched_bytes() {
    let f = Fixture::load();
    let (qkv, slots) = (f.bf16("qkv"), f.slots());
    let names = ["cache_ds", "cache_fp8_dsa", "cache_fp8_k3", "cache_nvfp4"];
    for (form, name) in MlaCacheForm::ALL.into_iter().zip(names) {
        let (got, want) = (cache(&f, form), f.bytes(&format!("expected.{name}")));
        assert_eq!(got.len(), want.len(), "{name}");
        let bytes = form.entry_bytes();
        let mut latent = Vec::new();
        for (slot, (got, want)) in got.chunks(bytes).zip(want.chunks(bytes)).enumerate() {
            let Some(token) = slots.iter().position(|s| *s == slot as i64) else {
                assert!(got == want && want.iter().all(|b| *b == 0xA5), "{name}: slot {slot} is nobody's");
                continue;
            };
            let pairs = |range: std::ops::Range<usize>| range.map(|i| (got[i], want[i]));
            match form {
                MlaCacheForm::Fp8Ds => {
                    latent.extend(pairs(DS_LATENT));
                    assert_eq!(got[DS_SCALES], want[DS_SCALES], "{name} slot {slot}: scales");
                    assert_eq!(got[DS_ROPE], want[DS_ROPE], "{name} slot {slot}: rope");
                    let k_pe: Vec<u8> = qkv[token * QKV..][K_PE].iter().flat_map(|x| x.to_le_bytes()).collect();
                    assert_eq!(got[DS_ROPE], k_pe, "k_pe is copied");
                }
                MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => {
                    latent.extend(pairs(0..512));
                    assert_eq!(got[512..], want[512..], "{name} slot {slot}: rope");
                }
                MlaCacheForm::Nvfp4Ds => {
                    latent.extend(pairs(NVFP4_LATENT).flat_map(|(a, b)| {
                        let ((a0, a1), (b0, b1)) = (e2m1::unpack(a), e2m1::unpack(b));
                        [(a0, b0), (a1, b1)]
                    }));
                    assert_eq!(got[NVFP4_ROPE], want[NVFP4_ROPE], "{name} slot {slot}: rope");
                    assert_eq!(got[NVFP4_SCALES], want[NVFP4_SCALES], "{name} slot {slot}: scales");
                }
            }
        }
        let steps = if form == MlaCacheForm::Nvfp4Ds { e2m1_steps } else { e4m3_steps };
        close(latent.into_iter(), steps, name);
    }
    assert!(slots.iter().any(|slot| *slot < 0), "the fixture skips a token");
}
