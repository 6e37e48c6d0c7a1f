//! The query against independently computed answers.

mod common;

use common::*;
use dsa_core::consts::Q_LORA;
use dsa_core::layout::mla_entry::{DS_LATENT, FP8_LATENT, MlaCacheForm, NVFP4_LATENT};
use dsa_core::layout::mla_rows::{QKV, QUERY};
use dsa_core::numerics::{bf16, e4m3};
use mla_query::{MlaQuery, MlaShape};
use safetensors::SafeTensors;

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

    /// Its first `tokens` tokens.
    fn step(&self, tokens: usize) -> Step {
        let slots = self.bytes("slots").as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect::<Vec<_>>();
        let mut qkv = self.bf16("qkv");
        qkv.truncate(tokens * QKV);
        Step {
            heads: 6,
            tokens,
            q_a: self.bf16("w_qa"),
            kv_a: self.bf16("w_kva"),
            q_b: self.bf16("w_qb"),
            uk: self.bf16("w_uk"),
            qkv,
            slots: slots[..tokens].to_vec(),
            q_scale_inv: self.f32("q_scale_inv"),
            k_scale: self.f32("k_scale"),
            ..Step::random(0, 0, 0)
        }
    }

    fn expected_cache(&self, form: MlaCacheForm) -> Vec<u8> {
        self.bytes(match form {
            MlaCacheForm::Fp8Ds => "expected.cache_ds",
            MlaCacheForm::Fp8Divide => "expected.cache_fp8_dsa",
            MlaCacheForm::Fp8Multiply => "expected.cache_fp8_k3",
            MlaCacheForm::Nvfp4Ds => "expected.cache_nvfp4",
        })
    }
}

/// Checks a run of the fixture's first tokens against its own answers, in its tolerances.
fn check_expected(fixture: &Fixture, step: &Step, shape: MlaShape, got: &Outputs) {
    let tokens = step.tokens;
    let want = &fixture.bf16("expected.qc")[..tokens * Q_LORA];
    for (i, (got, want)) in got.q_c.as_ref().unwrap().iter().zip(want).enumerate() {
        assert!(ulps(*got, *want) <= 1, "q_c {i}: {got:04x}, want {want:04x}");
    }
    let want = &fixture.bf16("expected.q_bf16")[..tokens * step.heads * QUERY];
    check_query(step, shape, &got.query, want);
    if shape.is_fp8() {
        let codes = &fixture.bytes("expected.q_fp8")[..want.len()];
        let differ = got.query.iter().zip(codes).filter(|(got, want)| got != want).count();
        assert!(differ * 100 <= codes.len(), "{differ} of {} query codes differ", codes.len());
        for (row, want) in want.chunks(QUERY).enumerate() {
            let largest = want.iter().map(|x| bf16::to_f32(*x).abs()).fold(0.0, f32::max) * step.q_scale_inv;
            let range = row * QUERY..(row + 1) * QUERY;
            for (i, (got, want)) in got.query[range.clone()].iter().zip(&codes[range]).enumerate() {
                let (got, want) = (*got, *want);
                let near = (e4m3::to_f32(got) - e4m3::to_f32(want)).abs() <= largest / 256.0;
                assert!(near || steps(got, want) <= 1, "query row {row}, code {i}: {got:02x}, want {want:02x}");
            }
        }
    }

    let form = shape.form();
    let (bytes, all) = (form.entry_bytes(), fixture.expected_cache(form));
    let latent = match form {
        MlaCacheForm::Fp8Ds => DS_LATENT,
        MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => FP8_LATENT,
        MlaCacheForm::Nvfp4Ds => NVFP4_LATENT,
    };
    let (mut codes, mut differ) = (0, 0);
    for (slot, (got, want)) in got.cache.chunks(bytes).zip(all.chunks(bytes)).enumerate() {
        if !step.slots.contains(&(slot as i64)) {
            assert!(got.iter().all(|b| *b == POISON), "{form:?}: slot {slot} belongs to no token");
            continue;
        }
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            if !latent.contains(&i) {
                assert_eq!(got, want, "{form:?}: slot {slot}, byte {i}");
                continue;
            }
            let close = match form {
                MlaCacheForm::Nvfp4Ds => [0, 4].into_iter().all(|n| ((got >> n) & 15).abs_diff((want >> n) & 15) <= 1),
                _ => steps(*got, *want) <= 1,
            };
            assert!(close, "{form:?}: slot {slot}, byte {i}: {got:02x}, want {want:02x}");
            codes += 1;
            differ += usize::from(got != want);
        }
    }
    assert!(differ * 100 <= codes, "{form:?}: {differ} of {codes} codes differ");
    assert_eq!(got.dropped, 0);
}

/// The first `tokens` tokens, one by one (`None`) or in tiles.
#[track_caller]
fn check_fixture(tokens: usize, tiles: &[Option<usize>]) {
    let fixture = Fixture::load();
    let step = fixture.step(tokens);
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            for tile in tiles {
                let shape = shape_of(&step, form).with_tile(*tile).unwrap();
                let query = MlaQuery::new(device, shape).unwrap();
                let resident = Resident::new(device, &step, shape);
                let got = resident.run(&query, &step);
                check(&step, shape, &got);
                check_expected(&fixture, &step, shape, &got);
                if tokens <= 3 {
                    assert_eq!(resident.run(&query, &step), got, "two runs, the same bits");
                }
            }
        }
    });
}

#[test]
fn one_token() {
    check_fixture(1, &[None]);
}

#[test]
fn two_tokens() {
    check_fixture(2, &[None, Some(16)]);
}

#[test]
fn three_tokens() {
    check_fixture(3, &[None]);
}

#[test]
fn eight_tokens() {
    check_fixture(8, &[None, Some(16)]);
}

#[test]
fn nine_tokens_are_tiled() {
    check_fixture(9, &[Some(16)]);
}

#[test]
fn sixteen_tokens() {
    check_fixture(16, &[Some(16)]);
}

#[test]
fn twenty_tokens() {
    check_fixture(20, &[Some(32)]);
}
