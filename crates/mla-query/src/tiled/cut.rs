//! How a cluster cuts Q_B and the sums.

use dsa_core::consts::{NOPE, Q_HEAD};
use ptx::*;

use super::{CLUSTER, LINE, LINES};

/// Rows of Q_B of a copy: a head's, or so many that each half of a cluster multiplies whole copies.
pub(crate) const COPY_ROWS: [u32; 2] = [Q_HEAD as u32, 32];

/// The rows of Q_B over the halves of a cluster, or all rows for every CTA; its columns over the CTAs that multiply the same
/// rows.
#[derive(Clone, Copy)]
pub(crate) struct Cut {
    halves: u32,
}

impl Cut {
    /// For so many tokens: halves for 64, whose parts would else take longer to exchange than all else.
    pub(crate) fn of(tokens: u32) -> Cut {
        Cut { halves: if by_warpgroups(tokens) { 2 } else { 1 } }
    }

    /// Which of [`COPY_ROWS`].
    pub(crate) fn copy(self) -> usize {
        self.halves as usize - 1
    }

    /// Parts of a sum.
    pub(super) fn parts(self) -> u32 {
        CLUSTER / self.halves
    }

    /// Eighths of the columns that a CTA multiplies.
    pub(super) fn eighths(self) -> u32 {
        self.halves
    }

    /// Lines of Q_B of a CTA.
    pub(super) fn lines(self) -> u32 {
        self.halves * LINES
    }

    /// Rows of such a line.
    pub(super) fn rows(self) -> u32 {
        Q_HEAD as u32 / self.halves
    }

    /// Words of such a line.
    pub(super) fn line_words(self) -> u32 {
        self.rows() * LINE
    }

    /// Where copies of a line go, in rows, and which of its head's rows they bring first: `half`'s latent rows, then its rope
    /// rows.
    pub(super) fn copies(self, half: Reg<u32>) -> Vec<(u32, Reg<u32>)> {
        match self.halves {
            1 => vec![(0, 0u32.into())],
            _ => {
                let [latent, rope] = [NOPE as u32, Q_HEAD as u32 - NOPE as u32].map(|rows| rows / self.halves);
                let rows = COPY_ROWS[self.copy()] as usize;
                let latents = (0..latent).step_by(rows).map(|row| (row, half.mad(latent, row)));
                let ropes = (0..rope).step_by(rows).map(|row| (latent + row, half.mad(rope, NOPE as u32 + row)));
                latents.chain(ropes).collect()
            }
        }
    }

    /// The CTA of the half that adds up tile `tile` of its rows, and as which of its tiles.
    pub(super) fn owner(self, tile: u32) -> (u32, u32) {
        let latents = NOPE as u32 / 8 / self.halves;
        match tile.checked_sub(latents) {
            None => (tile / 2, tile % 2),
            Some(rope) => (rope, 2),
        }
    }
}

/// A CTA's place in the cut.
#[derive(Clone)]
pub(super) struct Share {
    /// The half of the rows, 0 without halves.
    pub(super) half: Reg<u32>,
    /// Among the CTAs of the half: which part of a sum.
    pub(super) index: Reg<u32>,
    /// The eighths of the columns, first the one whose squares this CTA sums.
    pub(super) eighths: Vec<Reg<u32>>,
}

impl Share {
    /// Of CTA `part` of the cluster.
    pub(super) fn new(cut: Cut, part: Reg<u32>) -> Share {
        match cut.halves {
            1 => Share { half: 0u32.into(), index: part, eighths: vec![part] },
            halves => {
                let (half, index) = (part / cut.parts(), part % cut.parts());
                Share { half, index, eighths: (0..halves).map(|i| index.mad(halves, half ^ i)).collect() }
            }
        }
    }

    /// The rank of CTA `index` of the half.
    pub(super) fn rank(&self, cut: Cut, index: u32) -> Reg<u32> {
        self.half.mad(cut.parts(), index)
    }
}

/// Whether two warpgroups multiply, whose tiles are 64 tokens; fewer tokens go to each warp's own tensor core.
pub(super) fn by_warpgroups(tokens: u32) -> bool {
    tokens == 64
}
