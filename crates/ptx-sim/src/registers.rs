//! The register file of one warp, one array per class: a register is a row of 32 lanes, with a mask of the lanes that
//! something has written.

use ptx::Class;

/// Lanes of a warp.
pub(crate) const LANES: usize = 32;

/// Values and defined lanes of every register of a warp.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    pub(crate) b16: Vec<[u16; LANES]>,
    pub(crate) b32: Vec<[u32; LANES]>,
    pub(crate) b64: Vec<[u64; LANES]>,
    /// One bit per lane.
    pub(crate) pred: Vec<u32>,
    /// Defined lanes, by class in declaration order.
    pub(crate) defined: [Vec<u32>; 4],
}

impl Registers {
    /// With `counts` registers per class, all undefined.
    pub(crate) fn new(counts: [u32; 4]) -> Registers {
        let n = |class: Class| counts[class as usize] as usize;
        Registers {
            b16: vec![[0; LANES]; n(Class::B16)],
            b32: vec![[0; LANES]; n(Class::B32)],
            b64: vec![[0; LANES]; n(Class::B64)],
            pred: vec![0; n(Class::Pred)],
            defined: counts.map(|n| vec![0; n as usize]),
        }
    }

    /// Makes every register undefined, for a new warp.
    pub(crate) fn reset(&mut self) {
        self.defined.iter_mut().for_each(|class| class.fill(0));
    }

    #[inline(always)]
    pub(crate) fn set16(&mut self, slot: u32, value: &[u16; LANES], mask: u32) {
        blend(&mut self.b16[slot as usize], value, mask);
        self.defined[Class::B16 as usize][slot as usize] |= mask;
    }

    #[inline(always)]
    pub(crate) fn set32(&mut self, slot: u32, value: &[u32; LANES], mask: u32) {
        blend(&mut self.b32[slot as usize], value, mask);
        self.defined[Class::B32 as usize][slot as usize] |= mask;
    }

    #[inline(always)]
    pub(crate) fn set64(&mut self, slot: u32, value: &[u64; LANES], mask: u32) {
        blend(&mut self.b64[slot as usize], value, mask);
        self.defined[Class::B64 as usize][slot as usize] |= mask;
    }

    #[inline(always)]
    pub(crate) fn set_pred(&mut self, slot: u32, value: u32, mask: u32) {
        let old = &mut self.pred[slot as usize];
        *old = (*old & !mask) | (value & mask);
        self.defined[Class::Pred as usize][slot as usize] |= mask;
    }
}

#[inline(always)]
fn blend<T: Copy>(target: &mut [T; LANES], value: &[T; LANES], mask: u32) {
    if mask == u32::MAX {
        *target = *value;
    } else {
        for lane in 0..LANES {
            target[lane] = if mask >> lane & 1 == 1 { value[lane] } else { target[lane] };
        }
    }
}

/// The set lanes of a mask, lowest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes(pub(crate) u32);

impl Iterator for Lanes {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let lane = self.0.trailing_zeros();
        self.0 &= self.0 - 1;
        Some(lane as usize)
    }
}
