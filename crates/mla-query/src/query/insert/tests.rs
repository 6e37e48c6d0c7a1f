//! The inserting warps alone, exhaustively where that is possible.

use dsa_core::consts::{KV_LORA, ROPE};
use dsa_core::layout::mla_entry::MlaCacheForm;
use dsa_core::layout::mla_rows::{K_PE, KV_C, QKV};
use dsa_core::numerics::bf16;
use dsa_core::oracle::mla_query::{self as oracle, Approximate};
use gpu::{Device, LaunchConfig};
use ptx_sim::numeric::approx;
use test_devices::on_every_device;

use super::*;
use crate::query::{MlaArgs, uk_map};

const EPS: f32 = 1e-5;
const POISON: u8 = 0xA5;

/// Rows, weights and slots of some tokens.
struct Case {
    qkv: Vec<u16>,
    kv_a: Vec<u16>,
    slots: Vec<i64>,
    k_scale: f32,
    capacity: usize,
}

impl Case {
    /// `tokens` tokens in consecutive slots, their latent rows ones, so that the weights come through.
    fn ones(tokens: usize) -> Case {
        Case {
            qkv: vec![bf16::from_f32(1.0); tokens * QKV],
            kv_a: vec![bf16::from_f32(1.0); KV_LORA],
            slots: (0..tokens as i64).collect(),
            k_scale: 1.0,
            capacity: tokens,
        }
    }

    fn row(&self, token: usize) -> &[u16] {
        &self.qkv[token * QKV..][..QKV]
    }
}

/// The inserting warps alone, a CTA per token, against the oracle: every byte of the cache, and the dropped slots.
fn check(device: &Device, form: MlaCacheForm, cases: &[Case]) {
    let shape = MlaShape::new(1, 1, form, 64).unwrap();
    let bounds = LaunchBounds::threads(INSERT_THREADS);
    let kernel = ptx::build::<MlaArgs>("insert_rows", device.target().unwrap(), bounds, |p| {
        Insert::new(shape, p, thread_index()).emit(cta_index());
    });
    let function = device.load(&kernel.unwrap()).unwrap();
    let stream = device.stream().unwrap();
    let uk = device.alloc_zeros::<u16>(128 * KV_LORA).unwrap();
    let map = device.tensor_map_with(&uk_map(uk.ptr(), &shape).unwrap(), gpu::L2Promotion::B128).unwrap();
    for (number, case) in cases.iter().enumerate() {
        let (tokens, bytes) = (case.slots.len(), form.entry_bytes());
        let cache = device.alloc::<u8>(case.capacity * bytes + 64).unwrap();
        cache.fill_bytes(&stream, POISON).unwrap();
        let [qkv, kv_a] = [&case.qkv, &case.kv_a].map(|values| device.upload(values).unwrap());
        let (slots, dropped) = (device.upload(&case.slots).unwrap(), device.alloc_zeros::<u32>(1).unwrap());
        let inverse = form == MlaCacheForm::Fp8Multiply;
        let k_scale = device.upload(&[if inverse { 1.0 / case.k_scale } else { case.k_scale }]).unwrap();
        let args = MlaArgs {
            query: DevicePtr::NULL,
            q_c: DevicePtr::NULL,
            cache: cache.ptr(),
            dropped: dropped.ptr(),
            qkv: qkv.ptr(),
            w_qa: DevicePtr::NULL,
            w_kva: kv_a.ptr_as(),
            w_qb: DevicePtr::NULL,
            w_qb_map: map,
            w_uk: map,
            slots: slots.ptr(),
            q_scale_inv: DevicePtr::NULL,
            k_scale: k_scale.ptr(),
            boxes: DevicePtr::NULL,
            peers: DevicePtr::NULL,
            multicast: 0,
            call: DevicePtr::NULL,
            status: DevicePtr::NULL,
            capacity: case.capacity as u64,
            page_stride: (64 * bytes) as u64,
            token_stride: bytes as u32,
            qkv_stride: QKV as u32,
            tokens: tokens as u32,
            heads: 1,
            rank: 0,
            eps: EPS,
        };
        function.launch(&stream, LaunchConfig::new(tokens as u32), &args).unwrap();
        let got = cache.copy_to_vec(&stream).unwrap();
        let mut want = vec![POISON; got.len()];
        let hardware = Approximate { rsqrt: &|x| f32::from_bits(approx::rsqrt(x.to_bits())), ..Approximate::exact() };
        for (token, slot) in case.slots.iter().enumerate().filter(|(_, slot)| (0..case.capacity as i64).contains(slot))
        {
            let entry = oracle::insert(form, case.row(token), &case.kv_a, EPS, case.k_scale, hardware);
            want[*slot as usize * bytes..][..bytes].copy_from_slice(&entry);
        }
        if let Some(at) = (0..got.len()).find(|at| got[*at] != want[*at]) {
            let (slot, byte) = (at / bytes, at % bytes);
            panic!("{form:?}, case {number}: slot {slot}, byte {byte}: {:02x}, want {:02x}", got[at], want[at]);
        }
        let outside = case.slots.iter().filter(|slot| **slot >= case.capacity as i64).count();
        assert_eq!(dropped.copy_to_vec(&stream).unwrap(), [outside as u32], "{form:?}, case {number}");
    }
}

#[test]
fn every_bf16_value_of_the_rope_part() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            let cases = [1.0, 0.037, 1e-30, 300.0].map(|k_scale| {
                let mut case = Case { k_scale, ..Case::ones(all.len() / ROPE) };
                for (row, values) in case.qkv.chunks_mut(QKV).zip(all.chunks(ROPE)) {
                    row[K_PE].copy_from_slice(values);
                }
                case
            });
            check(device, form, &cases);
        }
    });
}

#[test]
fn every_bf16_value_of_the_latent_part() {
    // As they follow each other, so that a tile's values are alike, and mixed, so that a few set its scale.
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let mixed: Vec<u16> = all.iter().map(|x| x.wrapping_mul(0x9E37)).collect();
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            let rows = all.chunks(KV_LORA).chain(mixed.chunks(KV_LORA));
            let cases: Vec<Case> = rows.map(|kv_a| Case { kv_a: kv_a.to_vec(), ..Case::ones(1) }).collect();
            check(device, form, &cases);
        }
    });
}

#[test]
fn finite_values_of_every_magnitude_under_every_scale() {
    // One outlier of each exponent in a tile of small values, of each sign.
    let finite = |exponent: u16| (exponent << 7) | 0x35;
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            let cases: Vec<Case> = (0..255u16)
                .map(|exponent| {
                    let value = |i: usize| finite(exponent.saturating_sub((i % 29) as u16)) | ((i as u16 & 1) << 15);
                    Case { kv_a: (0..KV_LORA).map(value).collect(), ..Case::ones(1) }
                })
                .collect();
            check(device, form, &cases);
        }
    });
}

#[test]
fn rows_of_zeros_outliers_and_values_that_are_no_numbers() {
    let row = |fill: f32, outliers: &[(usize, f32)]| {
        let mut row = vec![bf16::from_f32(fill); QKV];
        outliers.iter().for_each(|(at, x)| row[KV_C.start + at] = bf16::from_f32(*x));
        row
    };
    let rows = [
        row(0.0, &[]),
        row(-0.0, &[]),
        row(1e-4, &[]),
        row(0.01, &[(0, 60_000.0), (300, -60_000.0)]),
        row(1.0, &[(511, 3e38)]),
        row(0.5, &[(17, f32::NAN)]),
        row(0.5, &[(18, f32::INFINITY)]),
        row(0.5, &[(128, f32::NEG_INFINITY), (129, f32::NAN)]),
        row(1e-39, &[]),
    ];
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            check(device, form, &[Case { qkv: rows.concat(), ..Case::ones(rows.len()) }]);
        }
    });
}

#[test]
fn slots_at_the_ends_and_outside() {
    on_every_device(|device| {
        for form in MlaCacheForm::ALL {
            let capacity = 130i64;
            let slots = vec![-1, 0, capacity - 1, capacity, 1 << 40, i64::MIN, i64::MAX, (1 << 32) + 5, 64, 63];
            check(device, form, &[Case { slots, capacity: capacity as usize, ..Case::ones(10) }]);
        }
    });
}
