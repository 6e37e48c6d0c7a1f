//! Random programs of nested branches and loops, run by the simulator and, lane by lane, by plain Rust. They exercise
//! divergence, reconvergence and the sharing of registers.

mod common;

use common::*;
use proptest::prelude::*;
use ptx::*;
use ptx_sim::*;

/// Variables of a program.
const VARS: usize = 6;

#[derive(Clone, Debug)]
enum Stmt {
    /// `v[d] = (v[a] op v[b]) + k`, through temporaries that stay alive for a while.
    Set { d: usize, a: usize, b: usize, op: u8, k: u32 },
    /// Both branches.
    If { a: usize, k: u32, then: Vec<Stmt>, otherwise: Vec<Stmt> },
    /// `n + (v[a] & 3)` rounds, left early when `v[b]` has the low bits `k`.
    Loop { n: u32, a: usize, b: usize, k: u32, body: Vec<Stmt> },
    /// Exchange with a neighbour; only where all lanes are.
    Shuffle { d: usize, a: usize, mask: u32 },
}

fn stmt(depth: u32) -> BoxedStrategy<Stmt> {
    let var = || 0..VARS;
    let set =
        (var(), var(), var(), 0..6u8, prop::num::u32::ANY).prop_map(|(d, a, b, op, k)| Stmt::Set { d, a, b, op, k });
    if depth == 0 {
        return set.boxed();
    }
    let block = |n: usize| prop::collection::vec(stmt(depth - 1), 0..n);
    prop_oneof![
        3 => set,
        1 => (var(), 0..8u32, block(4), block(3))
            .prop_map(|(a, k, then, otherwise)| Stmt::If { a, k, then, otherwise }),
        1 => (0..3u32, var(), var(), 0..4u32, block(4)).prop_map(|(n, a, b, k, body)| Stmt::Loop { n, a, b, k, body }),
    ]
    .boxed()
}

fn program() -> impl Strategy<Value = Vec<Stmt>> {
    let shuffle = (0..VARS, 0..VARS, 1..32u32).prop_map(|(d, a, mask)| Stmt::Shuffle { d, a, mask });
    prop::collection::vec(prop_oneof![5 => stmt(3), 1 => shuffle], 1..10)
}

fn emit(stmts: &[Stmt], v: &[Var<u32>]) {
    for s in stmts {
        match s {
            Stmt::Set { d, a, b, op, k } => {
                let (x, y) = (v[*a].get() + 0u32, v[*b].get() + 0u32);
                let z = match op {
                    0 => x + y,
                    1 => x - y,
                    2 => x * y,
                    3 => x ^ y,
                    4 => x.min(y),
                    _ => (x >> 3) | y,
                };
                v[*d].set(z + *k);
            }
            Stmt::If { a, k, then, otherwise } => {
                when_else((v[*a].get() & 7).lt(*k), || emit(then, v), || emit(otherwise, v));
            }
            Stmt::Loop { n, a, b, k, body } => {
                let rounds = (v[*a].get() & 3) + *n;
                let i = Var::new(Reg::<u32>::from(0));
                repeat(|l| {
                    l.break_if(i.get().ge(rounds));
                    emit(body, v);
                    l.break_if((v[*b].get() & 7).eq(*k));
                    i.add(1u32);
                });
            }
            Stmt::Shuffle { d, a, mask } => v[*d].set(shuffle_xor(v[*a].get(), *mask)),
        }
    }
}

fn evaluate(stmts: &[Stmt], v: &mut [u32; VARS]) {
    for s in stmts {
        match s {
            Stmt::Set { d, a, b, op, k } => {
                let (x, y) = (v[*a], v[*b]);
                let z = match op {
                    0 => x.wrapping_add(y),
                    1 => x.wrapping_sub(y),
                    2 => x.wrapping_mul(y),
                    3 => x ^ y,
                    4 => x.min(y),
                    _ => (x >> 3) | y,
                };
                v[*d] = z.wrapping_add(*k);
            }
            Stmt::If { a, k, then, otherwise } => evaluate(if v[*a] & 7 < *k { then } else { otherwise }, v),
            Stmt::Loop { n, a, b, k, body } => {
                for _ in 0..(v[*a] & 3) + n {
                    evaluate(body, v);
                    if v[*b] & 7 == *k {
                        break;
                    }
                }
            }
            Stmt::Shuffle { .. } => unreachable!("handled for all lanes at once"),
        }
    }
}

/// All lanes, statement by statement at the top level, where shuffles are.
fn expected(stmts: &[Stmt]) -> Vec<[u32; VARS]> {
    let mut lanes: Vec<[u32; VARS]> = (0..32u32)
        .map(|lane| std::array::from_fn(|i| lane.wrapping_mul(2_654_435_761).rotate_left(i as u32)))
        .collect();
    for s in stmts {
        if let Stmt::Shuffle { d, a, mask } = s {
            let from: Vec<u32> = lanes.iter().map(|v| v[*a]).collect();
            lanes.iter_mut().enumerate().for_each(|(lane, v)| v[*d] = from[lane ^ *mask as usize]);
        } else {
            lanes.iter_mut().for_each(|v| evaluate(std::slice::from_ref(s), v));
        }
    }
    lanes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn simulator_and_scalar_rust_agree(stmts in program(), seed in prop::num::u64::ANY) {
        let k = kernel(32, |p| {
            let start = lane_index() * 2_654_435_761u32;
            let v: Vec<Var<u32>> = (0..VARS as u32)
                .map(|i| Var::new(if i == 0 { start + 0u32 } else { start.funnel_shl(start, i) }))
                .collect();
            emit(&stmts, &v);
            for (i, var) in v.iter().enumerate() {
                p.out.at(lane_index() * VARS as u32 + i as u32).store(var.get());
            }
        });
        let want: Vec<u32> = expected(&stmts).into_iter().flatten().collect();
        for config in [Config::default(), Config::seeded(seed)] {
            // A clobbered loop counter must fail, not run for ever.
            let mut bench = Bench::new(Config { fuel: 2_000_000, ..config });
            bench.run(&k, 1, 0).map_err(|fault| TestCaseError::fail(fault.to_string()))?;
            prop_assert_eq!(&bench.read(bench.out, 32 * VARS), &want);
        }
    }
}

#[test]
fn values_that_are_dead_give_their_registers_up() {
    // 20,000 values, of which few are alive at a time: with a register each the warps would need 2.5 MB apiece.
    let k = kernel(32, |p| {
        let x = Var::new(lane_index());
        for i in 0..10_000u32 {
            x.set((x.get() ^ i) * 3u32);
        }
        p.out.at(lane_index()).store(x.get());
    });
    assert!(k.ir().register_count(Class::B32) > 10_000);
    let want = |lane: usize| (0..10_000u32).fold(lane as u32, |x, i| (x ^ i).wrapping_mul(3));
    check(&k, 1, want, 32);
}
