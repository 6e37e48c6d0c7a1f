//! The KV insert of one token by 64 threads, 8 latent columns each: RMSNorm, then the cache's form.

use dsa_core::consts::{KV_LORA, ROPE};
use dsa_core::layout::mla_entry::{
    DS_ROPE, DS_SCALES, DS_TILE, FP8_ROPE, MlaCacheForm, NVFP4_BLOCK, NVFP4_ROPE, NVFP4_SCALES,
};
use dsa_core::layout::mla_rows::{K_PE, KV_C};
use dsa_core::numerics::{e4m3, pow2};
use ptx::*;

use super::kernel::{INSERT, INSERT_THREADS, MlaParams};
use super::numbers::{pack, squares, unpack};
use super::reduce::warp_sum;
use crate::shape::MlaShape;

/// Columns of a thread.
const COLUMNS: u32 = KV_LORA as u32 / INSERT_THREADS;
/// Threads that carry the rope part, 8 columns each.
const ROPE_THREADS: u32 = ROPE as u32 / COLUMNS;

pub(crate) struct Insert {
    shape: MlaShape,
    p: MlaParams,
    thread: Reg<u32>,
    weights: Vec<Reg<f32>>,
    sums: SharedArray<f32>,
}

impl Insert {
    /// Thread `thread` of 64; loads the norm's weights, which are static.
    pub(crate) fn new(shape: MlaShape, p: MlaParams, thread: Reg<u32>) -> Insert {
        let weights = unpack(p.w_kva.at(thread * 4).load_vec_as::<4>(LoadMode::STREAM));
        Insert { shape, p, thread, weights, sums: SharedArray::new("insert_sums", INSERT_THREADS / 32) }
    }

    /// Inserts `token` if its slot is one of the cache's.
    pub(crate) fn emit(&self, token: Reg<u32>) {
        let Insert { p, thread, .. } = self;
        let slot = p.slots.at(token).load();
        // As an unsigned number a negative slot is larger than any capacity.
        when_else(
            slot.as_u64().lt(p.capacity),
            || self.insert(token, slot.as_u64()),
            || {
                when(slot.ge(0i64) & thread.eq(0), || {
                    // ORDER: none; the host reads the count after the launch.
                    p.dropped.reduce(Atomic::Add, Sem::Relaxed(Scope::Gpu), 1);
                });
            },
        );
    }

    fn insert(&self, token: Reg<u32>, slot: Reg<u64>) {
        let Insert { shape, p, thread, .. } = self;
        let row = p.qkv.byte_at(token.mul_wide(p.qkv_stride * 2));
        let latent = self.normalised(row.offset(KV_C.start as i32));
        let entry = self.entry(slot);
        let k_pe = row.offset(K_PE.start as i32).cast::<u32>().at(*thread * 4);
        let is_rope = thread.lt(ROPE_THREADS);
        match shape.form() {
            MlaCacheForm::Fp8Ds => {
                self.tiles(entry, &latent);
                when(is_rope, || {
                    let to = entry.byte_offset(DS_ROPE.start as i32).cast::<u32>().at(*thread * 4);
                    to.store_vec(k_pe.load_vec::<4>());
                });
            }
            MlaCacheForm::Fp8Divide | MlaCacheForm::Fp8Multiply => {
                let scale = p.k_scale.load();
                let code = |x: Reg<f32>| match shape.form() {
                    MlaCacheForm::Fp8Divide => x.div_rn(scale),
                    _ => (x * scale).max(-e4m3::MAX).min(e4m3::MAX),
                };
                let store = |to: Global<u8>, values: &[Reg<f32>]| {
                    let values: Vec<_> = values.iter().map(|x| code(*x)).collect();
                    to.at(*thread * COLUMNS).cast::<u32>().store_vec(fp8(&values));
                };
                store(entry, &latent);
                when(is_rope, || {
                    store(entry.byte_offset(FP8_ROPE.start as i32), &unpack(k_pe.load_vec::<4>()));
                });
            }
            MlaCacheForm::Nvfp4Ds => {
                self.blocks(entry, &latent);
                when(is_rope, || {
                    let to = entry.byte_offset(NVFP4_ROPE.start as i32).at(*thread * COLUMNS);
                    to.cast::<u32>().store_vec(fp8(&unpack(k_pe.load_vec::<4>())));
                });
            }
        }
    }

    /// The thread's columns of the normalised latent, rounded to BF16.
    fn normalised(&self, latent: Global<u16>) -> Vec<Reg<f32>> {
        let Insert { p, thread, .. } = self;
        let values = unpack(latent.cast::<u32>().at(*thread * 4).load_vec::<4>());
        let sum = warp_sum(squares(&values));
        when((*thread & 31).eq(0), || self.sums.at(*thread >> 5).store(sum));
        sync_named(INSERT, INSERT_THREADS); // ORDER: both warps' sums, before they are added.
        let total = self.sums.at(0).load() + self.sums.at(1).load();
        let r = total.fma(1.0 / KV_LORA as f32, p.eps).math(Math::RsqrtApprox);
        let scaled: Vec<_> = values.iter().zip(&self.weights).map(|(x, w)| *x * r * *w).collect();
        unpack(pack(&scaled))
    }

    /// The entry of a slot inside the cache.
    fn entry(&self, slot: Reg<u64>) -> Global<u8> {
        let tokens = self.shape.page_tokens();
        let (page, within) = if tokens.is_power_of_two() {
            (slot >> tokens.trailing_zeros(), slot & u64::from(tokens - 1))
        } else {
            (slot / u64::from(tokens), slot % u64::from(tokens))
        };
        let page = page * self.p.page_stride;
        self.p.cache.byte_at(page + within.low().mul_wide(self.p.token_stride))
    }

    /// Largest magnitude of the thread's columns and of its neighbours up to `columns` in all; a NaN does not count.
    fn amax(&self, latent: &[Reg<f32>], columns: u32) -> Reg<f32> {
        let own = latent.iter().fold(Reg::from(0.0f32), |amax, x| amax.max(x.abs()));
        let neighbours = columns / COLUMNS;
        (0..neighbours.trailing_zeros()).fold(own, |amax, step| amax.max(shuffle_xor(amax, 1 << step)))
    }

    /// `fp8_ds_mla`: tiles of 128 columns, each with the least power of two that is at least `amax / 448`.
    fn tiles(&self, entry: Global<u8>, latent: &[Reg<f32>]) {
        let thread = self.thread;
        let quotient = self.amax(latent, DS_TILE as u32).div_rn(e4m3::MAX).max(1e-4f32);
        let scale: Reg<f32> = ((quotient.bitcast::<u32>() + 0x7F_FFFFu32) & 0x7F80_0000u32).bitcast();
        // The inverse of a power of two is exact, and so is the division.
        let inverse = Reg::<f32>::from(1.0).div_rn(scale);
        let values: Vec<_> = latent.iter().map(|x| *x * inverse).collect();
        entry.at(thread * COLUMNS).cast::<u32>().store_vec(fp8(&values));
        let threads = DS_TILE as u32 / COLUMNS;
        when((thread & (threads - 1)).eq(0), || {
            let scales = entry.byte_offset(DS_SCALES.start as i32).cast::<f32>();
            scales.at(thread / threads).store(scale);
        });
    }

    /// `nvfp4_ds_mla`: blocks of 16 columns, each with the least E4M3 scale that is at least `amax / 6`.
    fn blocks(&self, entry: Global<u8>, latent: &[Reg<f32>]) {
        let thread = self.thread;
        let least = self.amax(latent, NVFP4_BLOCK as u32).div_rn(6.0f32).max(pow2::exp2(-9));
        let nearest = e4m3x2_from_f32(least, Reg::from(0.0f32)).to_u32();
        let below = e4m3_value(nearest).lt(least) & nearest.lt(0x7E);
        let code = nearest + below.as_u32();
        let inverse = Reg::<f32>::from(1.0).div_rn(e4m3_value(code));
        let codes = latent.iter().map(|x| e2m1(*x * inverse));
        // The even column is the low nibble, so columns ascend from the lowest bits.
        let word = codes.zip(0..).map(|(code, i)| code << (4 * i)).reduce(|word, code| word | code);
        entry.cast::<u32>().at(thread).store(word.expect("eight columns"));
        let threads = NVFP4_BLOCK as u32 / COLUMNS;
        when((thread & (threads - 1)).eq(0), || {
            let block = thread / threads;
            let place = ((block & 3) << 3) + (block >> 2);
            entry.byte_offset(NVFP4_SCALES.start as i32).at(place).store(code);
        });
    }
}

/// Eight FP32 as E4M3.
fn fp8(values: &[Reg<f32>]) -> [Reg<u32>; 2] {
    std::array::from_fn(|i| {
        let v = &values[4 * i..4 * i + 4];
        e4m3x2_from_f32(v[0], v[1]).pack(e4m3x2_from_f32(v[2], v[3]))
    })
}

/// The value of a positive finite E4M3 code: its fields, moved to those of an FP32, are 2^120 too small.
fn e4m3_value(code: Reg<u32>) -> Reg<f32> {
    (code << 20).bitcast::<f32>() * pow2::exp2(120)
}

/// The E2M1 code of a value: to nearest even, saturating at 6, NaN to +6. Counts the midpoints below it, those that tie
/// upwards included.
fn e2m1(x: Reg<f32>) -> Reg<u32> {
    let a = x.abs();
    let above = [a.gt(0.25f32), a.ge(0.75f32), a.gt(1.25f32), a.ge(1.75f32), a.gt(2.5f32), a.ge(3.5f32), a.gt(5.0f32)];
    let count = above.into_iter().fold(Reg::from(0u32), |count, p| count + p.as_u32());
    let code = count | ((x.bitcast::<u32>() >> 31) << 3);
    // Only a NaN is unordered with itself.
    x.eq(x).select::<u32>(code, 7u32)
}

#[cfg(test)]
mod tests;
