//! Turns what went wrong into messages that name everybody involved.

use std::collections::BTreeMap;

use ptx::op::Op;

use super::{Machine, replay};
use crate::race::{Actor, Party, Proxy, Race};
use crate::schedule::WarpRef;
use crate::step::{lanes_text, name};
use crate::trap::{Fault, SimError, Stop, Trap, TrapKind};
use crate::warp::Wait;

/// Distinct waits that a deadlock message lists.
const WAITS_MAX: usize = 12;

impl Machine {
    /// The fault of a warp that executes the instruction at `pc`.
    pub(super) fn fault(&self, at: WarpRef, pc: u32, stop: Stop) -> Fault {
        let grid = self.grids.get(at.block.grid as usize).and_then(Option::as_ref);
        let Some(grid) = grid else {
            return SimError::StreamsStuck(stop.message).into();
        };
        let ir = &grid.info.program.ir;
        let location = grid.info.program.location(stop.at.unwrap_or(pc));
        if stop.unsupported {
            return SimError::Unsupported { kernel: ir.name.clone(), at: location, what: stop.message }.into();
        }
        let cta = grid.blocks[at.block.block as usize].as_ref().map_or([0; 3], |b| b.cta.index);
        let message = match &stop.race {
            Some(race) => self.race_text(race, &stop.message),
            None => stop.message,
        };
        let (schedule, timing) = replay(&self.config);
        Fault::Trap(Box::new(Trap {
            kind: stop.kind,
            kernel: ir.name.clone(),
            at: location,
            device: grid.info.device,
            cta,
            warp: stop.warp.unwrap_or(at.warp),
            lane: stop.lane,
            address: stop.address,
            message,
            schedule,
            timing,
        }))
    }

    fn race_text(&self, race: &Race, place: &str) -> String {
        format!(
            "data race on {place}: (1) {}; (2) {}; {}",
            self.party_text(&race.first),
            self.party_text(&race.second),
            race.missing
        )
    }

    pub(super) fn party_text(&self, party: &Party) -> String {
        let strength = if party.strong.is_some() { "strong" } else { "weak" };
        let action = match (party.proxy, party.is_write) {
            (Proxy::Generic, false) => "read",
            (Proxy::Generic, true) => "write",
            (Proxy::Async, false) => "asynchronous read",
            (Proxy::Async, true) => "asynchronous write",
        };
        let lane = party.lane.map_or("several lanes".into(), |lane| format!("lane {lane}"));
        let who = self.world.streams.launch_of(party.agent).and_then(|id| {
            let past = self.past.get(id.0 as usize)?.as_ref()?;
            let (cta, actor) = self.world.streams.agents(id).locate(party.agent)?;
            let [x, y, _] = past.grid;
            let actor = match actor {
                Actor::Warp(warp) => format!("warp {warp} {lane}"),
                Actor::Slot(_) => format!("an operation issued by {lane}"),
            };
            Some(format!(
                "{actor} of CTA ({}, {}, {}) of {} on device {} at {}",
                cta % x,
                cta / x % y,
                cta / x / y,
                past.program.ir.name,
                past.device.0,
                past.program.location(party.instruction)
            ))
        });
        format!("{strength} {action} by {}", who.unwrap_or_else(|| "the host".into()))
    }

    /// The fault when nothing can go on: lists who waits where.
    pub(super) fn deadlock(&self, why: &str) -> Fault {
        let mut waits: BTreeMap<(String, String), (usize, WarpRef, u32, u32)> = BTreeMap::new();
        for (g, grid) in self.grids.iter().enumerate() {
            let Some(grid) = grid else { continue };
            for (b, block) in grid.blocks.iter().enumerate() {
                let Some(block) = block else { continue };
                for warp in &block.warps {
                    for group in warp.groups() {
                        // A barrier wait stands behind its instruction.
                        let pc = match group.wait {
                            Wait::Barrier { .. } | Wait::Cluster { .. } | Wait::Dependencies | Wait::Sleep { .. } => {
                                group.pc - 1
                            }
                            Wait::None | Wait::Converge { .. } | Wait::Event { .. } => group.pc,
                        };
                        let what = match group.wait {
                            Wait::None => polling_text(&grid.info.program.ops, pc),
                            Wait::Converge { required } => {
                                format!("waiting for lanes {:#010x} of the warp at {}", required & !group.mask, {
                                    name(&grid.info.program.ops[pc as usize])
                                })
                            }
                            Wait::Barrier { id, .. } => {
                                let barrier = &block.cta.barriers[id as usize];
                                let expected = barrier.threads.unwrap_or(block.cta.live_warps * 32);
                                format!("waiting at barrier {id} ({} of {expected} threads)", barrier.arrived)
                            }
                            Wait::Cluster { .. } => {
                                let cluster = &grid.clusters[b / grid.cluster_size as usize];
                                let (arrived, expected) = (cluster.arrived, cluster.live_warps);
                                format!("waiting at the barrier of the cluster ({arrived} of {expected} warps)")
                            }
                            Wait::Event { .. } => {
                                format!("waiting in {}", name(&grid.info.program.ops[pc as usize]))
                            }
                            Wait::Dependencies => "waiting for the preceding launches".to_string(),
                            Wait::Sleep { .. } => "sleeping".to_string(),
                        };
                        let at = WarpRef {
                            block: crate::world::BlockRef { grid: g as u32, block: b as u32 },
                            warp: warp.index,
                        };
                        let key = (format!("{} {}", grid.info.program.ir.name, grid.info.program.location(pc)), what);
                        waits.entry(key).or_insert((0, at, group.mask, pc)).0 += 1;
                    }
                }
            }
        }
        let mut message = format!("{why}:");
        for ((at, what), (count, first, mask, _)) in waits.iter().take(WAITS_MAX) {
            let cta = self.grids[first.block.grid as usize]
                .as_ref()
                .and_then(|g| g.blocks[first.block.block as usize].as_ref())
                .map_or([0; 3], |b| b.cta.index);
            message += &format!(
                " [{count}x {what} at {at}, first CTA ({}, {}, {}) warp {} {}]",
                cta[0],
                cta[1],
                cta[2],
                first.warp,
                lanes_text(*mask)
            );
        }
        if waits.len() > WAITS_MAX {
            message += &format!(" and {} more places", waits.len() - WAITS_MAX);
        }
        let (barriers, unbalanced) = self.open_mbarriers();
        message += &barriers;
        // All have arrived, and no copy is left that could bring the missing bytes.
        let kind = if unbalanced { TrapKind::ExpectTx } else { TrapKind::Deadlock };
        match waits.into_values().next() {
            Some((_, at, _, pc)) => self.fault(at, pc, *Stop::new(kind, message)),
            None => SimError::StreamsStuck(message).into(),
        }
    }

    /// The mbarriers that are in the middle of a phase, and whether one of them lacks nothing but bytes.
    fn open_mbarriers(&self) -> (String, bool) {
        let mut text = String::new();
        let mut count = 0;
        let mut unbalanced = false;
        for grid in self.grids.iter().flatten() {
            for block in grid.blocks.iter().flatten() {
                for (offset, barrier) in block.cta.mbarriers.iter() {
                    let (pending, expected, tx) = (barrier.pending(), barrier.expected(), barrier.tx());
                    if pending == expected && tx == 0 {
                        continue;
                    }
                    unbalanced |= pending == 0;
                    count += 1;
                    if count <= WAITS_MAX {
                        let [x, y, z] = block.cta.index;
                        let field = crate::shared::field(&grid.info.program.ir, offset as usize);
                        text += &format!(
                            "; the mbarrier at {field} of CTA ({x}, {y}, {z}) lacks {pending} of {expected} arrivals \
                             and {tx} bytes in phase {}",
                            barrier.phase()
                        );
                    }
                }
            }
        }
        (text, unbalanced)
    }
}

/// What a group that never stops is doing: the load or wait that its loop, if it is one, asks again and again.
fn polling_text(ops: &[Op], pc: u32) -> String {
    const LOOP_MAX: usize = 8;
    let asks = |op: &&Op| matches!(op, Op::MbarTryWait { .. } | Op::MbarTestWait { .. } | Op::Ld { .. });
    // The group may stand before it, at the head of the loop, or behind it.
    let (before, after) = ops.split_at(pc as usize);
    match after.iter().take(LOOP_MAX).find(asks).or_else(|| before.iter().rev().take(LOOP_MAX).find(asks)) {
        Some(op) => format!("polling by {}", name(op)),
        None => "polling".to_string(),
    }
}
