//! Matrix products: those of a warp, and the issue, commit and wait of a warpgroup's.

use ptx::op::{Address, MmaInput, Operand, RegId, ScaleD, WgmmaA};
use ptx::{Class, Sem};

use super::memory::misaligned;
use super::warp_ops::converge;
use super::{Exec, Flow, Step};
use crate::block::Cta;
use crate::numeric::tensor_core::mma_bf16_k16;
use crate::race::Access;
use crate::registers::LANES;
use crate::shared::BASE;
use crate::trap::{Stop, TrapKind};
use crate::warp::Wait;
use crate::warpgroup::{ALL_WARPS, MatrixA, Mma, PendingTile};
use crate::wgmma::{K_BYTES, M, SharedOperand, Tile, WgmmaError, place_register_operand};

/// Bytes of a matrix row that `ldmatrix` loads, and its alignment.
const ROW_BYTES: u32 = 16;

impl Exec<'_> {
    /// `ldmatrix`: lane `8 m + r` names row r of matrix m; lane `4 g + q` receives elements 2 q and 2 q + 1 of row g, or
    /// of column g. As if each lane loaded its own elements.
    pub(super) fn ld_matrix(&mut self, dsts: &[RegId], addr: Address, transposed: bool) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let addresses = self.shared_addresses(addr)?;
        let mut rows = [0u64; LANES];
        for lane in 0..8 * dsts.len() {
            let offset = self.cta.shared.offset(&self.program.ir, addresses[lane], ROW_BYTES);
            rows[lane] = offset.map_err(|stop| stop.lane(lane as u32))? as u64;
            if addresses[lane] % ROW_BYTES != 0 {
                return Err(misaligned(addresses[lane].into(), ROW_BYTES, lane));
            }
        }
        // One load of both elements, or, down a column, one of each.
        let (size, loads) = if transposed { (2, 2) } else { (4, 1) };
        let who = Access::generic(self.clock, 0, self.pc, Sem::Weak);
        for (m, dst) in dsts.iter().enumerate() {
            let mut words = [0u32; LANES];
            for load in 0..loads {
                let offsets: [u64; LANES] = std::array::from_fn(|lane| {
                    let (g, q) = (lane / 4, lane % 4);
                    let (row, byte) = if transposed { (2 * q + load, 2 * g) } else { (g, 4 * q) };
                    rows[8 * m + row] + byte as u64
                });
                self.cta
                    .shadow
                    .check_warp_read(&offsets, u32::MAX, size, &who, self.clock)
                    .map_err(|race| self.shared_race(&race))?;
                for lane in 0..LANES {
                    let value = self
                        .cta
                        .shared
                        .load(&self.program.ir, offsets[lane] as usize, size as usize)
                        .map_err(|stop| stop.lane(lane as u32))?;
                    words[lane] |= (value as u32) << (16 * load);
                }
            }
            self.w32(*dst, &words)?;
        }
        Ok(Flow::Visible)
    }

    /// `mma.sync.m16n8k16`: lane `4 g + q` holds A rows g and g + 8, B column g, and acc columns 2 q and 2 q + 1.
    pub(super) fn mma_bf16(&mut self, acc: [RegId; 4], a: [RegId; 4], b: [RegId; 2]) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let (mut rows, mut columns) = ([[0u16; 16]; 16], [[0u16; 16]; 8]);
        let halves = |word: u32| [word as u16, (word >> 16) as u16];
        for (i, reg) in a.into_iter().enumerate() {
            for (lane, word) in self.r32(Operand::Reg(reg))?.into_iter().enumerate() {
                let k = 2 * (lane % 4) + 8 * (i / 2);
                rows[lane / 4 + 8 * (i % 2)][k..k + 2].copy_from_slice(&halves(word));
            }
        }
        for (i, reg) in b.into_iter().enumerate() {
            for (lane, word) in self.r32(Operand::Reg(reg))?.into_iter().enumerate() {
                let k = 2 * (lane % 4) + 8 * i;
                columns[lane / 4][k..k + 2].copy_from_slice(&halves(word));
            }
        }
        let place = |j: usize, lane: usize| (lane / 4 + 8 * (j / 2)) * 8 + 2 * (lane % 4) + j % 2;
        let mut tile = [0f32; 16 * 8];
        for (j, reg) in acc.into_iter().enumerate() {
            for (lane, word) in self.r32(Operand::Reg(reg))?.into_iter().enumerate() {
                tile[place(j, lane)] = f32::from_bits(word);
            }
        }
        mma_bf16_k16(&rows, &columns, &mut tile);
        for (j, reg) in acc.into_iter().enumerate() {
            self.w32(reg, &std::array::from_fn(|lane| tile[place(j, lane)].to_bits()))?;
        }
        Ok(Flow::Next)
    }

    /// (warpgroup, warp within it).
    fn warpgroup(&self) -> (usize, usize) {
        (self.warp.index as usize / 4, self.warp.index as usize % 4)
    }

    pub(super) fn wgmma_fence(&mut self) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let (group, w) = self.warpgroup();
        self.cta.warpgroups[group].fenced[w] = true;
        Ok(Flow::Next)
    }

    pub(super) fn wgmma(
        &mut self,
        input: MmaInput,
        n: u32,
        acc: &[RegId],
        a: WgmmaA,
        b: Operand,
        scale_d: ScaleD,
    ) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let (group, w) = self.warpgroup();
        if !self.cta.warpgroups[group].fenced[w] {
            let message = "warpgroup MMA without a wgmma.fence since the last wait: its registers may still change";
            return Err(Stop::new(TrapKind::WgmmaFence, message));
        }
        let accumulate = match scale_d {
            ScaleD::Const(c) => c,
            ScaleD::Pred(p) => {
                let p = self.r_pred(p)?;
                if p != 0 && p != u32::MAX {
                    return Err(Stop::new(TrapKind::Mismatch, "scale-d differs among the lanes of the warp"));
                }
                p != 0
            }
        };
        let uniform = |exec: &Self, operand: Operand| -> Result<u64, Box<Stop>> {
            let v = exec.r64(operand)?;
            match v.iter().position(|x| *x != v[0]) {
                None => Ok(v[0]),
                Some(lane) => {
                    Err(Stop::new(TrapKind::Mismatch, "matrix descriptor differs among the lanes of the warp")
                        .lane(lane as u32))
                }
            }
        };
        let descriptor_b = uniform(self, b)?;
        let (operand_a, descriptor_a) = match a {
            WgmmaA::Descriptor(d) => {
                let bits = uniform(self, d)?;
                (MatrixA::Shared(SharedOperand::decode(bits, M as u32).map_err(|e| refuse(&e))?), bits)
            }
            WgmmaA::Regs(_) => (MatrixA::Registers(Box::new([[0; K_BYTES]; M])), 0),
        };
        let operand_b = SharedOperand::decode(descriptor_b, n).map_err(|e| refuse(&e))?;

        self.add_mma(
            Mma {
                issuer: self.issuer(0),
                input,
                a: operand_a,
                b: operand_b,
                descriptors: [descriptor_a, descriptor_b],
                accumulate,
                issued: 0,
                tile: 0,
            },
            n,
            acc,
        )?;
        if let WgmmaA::Regs(registers) = a {
            let fragment = [
                self.r32v(registers[0])?,
                self.r32v(registers[1])?,
                self.r32v(registers[2])?,
                self.r32v(registers[3])?,
            ];
            let number = self.cta.warpgroups[group].issued[w] - 1;
            let warpgroup = &mut self.cta.warpgroups[group];
            let at = (number - warpgroup.done) as usize;
            if let MatrixA::Registers(rows) = &mut warpgroup.mmas[at].a {
                place_register_operand(w, &fragment, rows);
            }
        }
        self.world.effects += 1;
        // Warps that wait for the last of the four may go on.
        let complete = self.cta.warpgroups[group].mmas.back().is_some_and(|m| m.issued == ALL_WARPS);
        self.cta.events += u64::from(complete);
        if self.world.completes_at_once() {
            let ready = self.cta.warpgroups[group].mmas.iter().take_while(|m| m.issued == ALL_WARPS).count();
            let until = self.cta.warpgroups[group].done + ready as u64;
            execute(self.cta, group, until)?;
        }
        Ok(Flow::Visible)
    }

    fn r32v(&self, r: RegId) -> Result<[u32; LANES], Box<Stop>> {
        self.r32(Operand::Reg(r))
    }

    /// Enters this warp's part of an MMA: a new one for the first warp, else it must be the same as the first warp's.
    fn add_mma(&mut self, new: Mma, n: u32, acc: &[RegId]) -> Step {
        let (group, w) = self.warpgroup();
        self.check_operands(&new, group, w)?;
        let warpgroup = &mut self.cta.warpgroups[group];
        let number = warpgroup.issued[w];
        let at = (number - warpgroup.done) as usize;
        if at == warpgroup.mmas.len() {
            // The accumulator that this warp has under way, or a new one.
            let current = warpgroup
                .tiles
                .iter()
                .find(|t| t.loaded >> w & 1 == 1 && t.stored >> w & 1 == 0 && *t.registers == *acc);
            let tile = match current {
                Some(tile) => tile.id,
                None => {
                    let id = warpgroup.tiles_made;
                    warpgroup.tiles_made += 1;
                    warpgroup.tiles.push(PendingTile {
                        id,
                        registers: acc.into(),
                        tile: Tile::zero(n).map_err(|e| refuse(&e))?,
                        loaded: 0,
                        stored: 0,
                        last: [0; 4],
                    });
                    id
                }
            };
            for range in new.operands() {
                self.cta.shared.set_leaving(range, true);
            }
            self.cta.warpgroups[group].mmas.push_back(Mma { tile, ..new });
        } else {
            let first = &warpgroup.mmas[at];
            let same = first.issuer.pc == new.issuer.pc
                && first.descriptors == new.descriptors
                && first.accumulate == new.accumulate;
            if !same {
                let text = |mma: &Mma| {
                    let [a, b] = mma.descriptors;
                    format!("A {a:#x}, B {b:#x}, scale-d {}", mma.accumulate)
                };
                let message = format!(
                    "warps of the warpgroup issue different MMAs: warp {} issued {} at {}, this warp {}",
                    first.issuer.warp,
                    text(first),
                    self.program.location(first.issuer.pc),
                    text(&new),
                );
                return Err(Stop::new(TrapKind::Mismatch, message));
            }
        }
        let warpgroup = &mut self.cta.warpgroups[group];
        let mma = &mut warpgroup.mmas[at];
        mma.issued |= 1 << w;
        warpgroup.issued[w] += 1;
        let (tile_id, accumulate) = (mma.tile, mma.accumulate);
        let tile = warpgroup.tiles.iter().position(|t| t.id == tile_id).expect("tiles outlive their MMAs");
        warpgroup.tiles[tile].last[w] = number;
        if warpgroup.tiles[tile].loaded >> w & 1 == 1 {
            return Ok(());
        }
        warpgroup.tiles[tile].loaded |= 1 << w;
        for (j, r) in acc.iter().enumerate() {
            if self.warp.pending.contains(r.index) {
                return Err(self.pending_write(*r));
            }
            if accumulate {
                let lanes = self.r32v(*r)?;
                self.cta.warpgroups[group].tiles[tile].tile.load(w, j, &lanes);
            }
        }
        for r in acc {
            self.warp.pending.insert(r.index);
            self.warp.registers.defined[Class::B32 as usize][r.index as usize] = 0;
        }
        Ok(())
    }

    /// Checks that this warp may read the operands from shared memory, and records that the warpgroup does.
    fn check_operands(&mut self, mma: &Mma, group: usize, w: usize) -> Step {
        let queue = match self.cta.warpgroups[group].queue {
            Some(queue) => queue,
            None => {
                let queue =
                    self.cta.new_queue().ok_or_else(|| Stop::unsupported("more asynchronous queues than a CTA has"))?;
                self.cta.warpgroups[group].queue = Some(queue);
                queue
            }
        };
        // The first group is epoch 1.
        let epoch = self.cta.warpgroups[group].committed[w] as u32 + 1;
        let who = Access::asynchronous(queue, epoch, 0, self.pc);
        let len = self.cta.shared.len();
        for range in mma.operands() {
            if range.end > len {
                return Err(refuse(&WgmmaError::OutOfBounds(BASE + range.start as u32)));
            }
            self.cta.shared.check_async_read(&self.program.ir, range.clone())?;
            self.cta
                .shadow
                .check_read(range.start as u64, K_BYTES as u32, &who, self.clock)
                .map_err(|race| self.shared_race(&race))?;
        }
        Ok(())
    }

    pub(super) fn wgmma_commit(&mut self) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let (group, w) = self.warpgroup();
        let warpgroup = &mut self.cta.warpgroups[group];
        let (at, issued) = (warpgroup.committed[w], warpgroup.issued[w]);
        match warpgroup.commits.get(at) {
            None => warpgroup.commits.push(issued),
            Some(first) if *first != issued => {
                let message = format!("this warp commits {issued} MMAs where another of the warpgroup commits {first}");
                return Err(Stop::new(TrapKind::Mismatch, message));
            }
            Some(_) => {}
        }
        warpgroup.committed[w] += 1;
        Ok(Flow::Next)
    }

    pub(super) fn wgmma_wait(&mut self, pending: u32) -> Result<Flow, Box<Stop>> {
        converge!(self, u32::MAX);
        let (group, w) = self.warpgroup();
        let warpgroup = &self.cta.warpgroups[group];
        let groups = warpgroup.committed[w].saturating_sub(pending as usize);
        let until = if groups == 0 { 0 } else { warpgroup.commits[groups - 1] };
        let waiting = until.saturating_sub(warpgroup.done) as usize;
        if warpgroup.mmas.iter().take(waiting).any(|m| m.issued != ALL_WARPS) {
            // The MMA starts when the last warp of the warpgroup issues it.
            return Ok(Flow::Retry(Wait::Event { seen: self.cta.events }));
        }
        execute(self.cta, group, until)?;
        if let Some(queue) = self.cta.warpgroups[group].queue
            && groups > 0
        {
            self.clock.observe(queue, groups as u32);
        }
        let warpgroup = &mut self.cta.warpgroups[group];
        warpgroup.fenced[w] = false;
        let bit = 1u8 << w;
        for tile in &mut warpgroup.tiles {
            if tile.loaded & bit != 0 && tile.stored & bit == 0 && tile.last[w] < until {
                tile.stored |= bit;
                for (j, r) in tile.registers.iter().enumerate() {
                    self.warp.registers.set32(r.index, &tile.tile.store(w, j), u32::MAX);
                    self.warp.pending.remove(r.index);
                }
            }
        }
        warpgroup.tiles.retain(|tile| tile.stored != ALL_WARPS);
        Ok(Flow::Next)
    }
}

/// Executes the MMAs of a warpgroup up to number `until`.
fn execute(cta: &mut Cta, group: usize, until: u64) -> Step {
    let mut ranges = Vec::new();
    while cta.warpgroups[group].done < until {
        let warpgroup = &mut cta.warpgroups[group];
        let Some(mma) = warpgroup.mmas.pop_front() else { break };
        warpgroup.done += 1;
        let gather = |operand: &SharedOperand| {
            operand.gather(cta.shared.all(), BASE).map_err(|e| refuse(&e).issued_by(mma.issuer))
        };
        let b = gather(&mma.b)?;
        let tile = warpgroup.tiles.iter_mut().find(|t| t.id == mma.tile).expect("tiles outlive their MMAs");
        if !mma.accumulate {
            tile.tile = Tile::zero(mma.b.rows()).map_err(|e| refuse(&e))?;
        }
        match &mma.a {
            MatrixA::Registers(a) => tile.tile.accumulate(mma.input, a, &b),
            MatrixA::Shared(a) => {
                let rows: [_; M] = gather(a)?.try_into().expect("A has 64 rows");
                tile.tile.accumulate(mma.input, &rows, &b);
            }
        }
        ranges.extend(mma.operands());
    }
    if !ranges.is_empty() {
        cta.release_leaving(ranges.into_iter());
    }
    Ok(())
}

fn refuse(error: &WgmmaError) -> Box<Stop> {
    match error {
        WgmmaError::UnsupportedLayout(_) | WgmmaError::UnsupportedBaseOffset(_) => Stop::unsupported(error.to_string()),
        WgmmaError::OutOfBounds(address) => {
            Stop::new(TrapKind::OutOfBounds, error.to_string()).address((*address).into())
        }
        WgmmaError::Misaligned(address) => {
            Stop::new(TrapKind::Misaligned, error.to_string()).address((*address).into())
        }
        WgmmaError::ReservedBits(_) | WgmmaError::BadStride(_) | WgmmaError::BadColumns(_) => {
            Stop::new(TrapKind::Operand, error.to_string())
        }
    }
}
