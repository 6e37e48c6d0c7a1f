//! The instruction list. One enum, matched exhaustively by the printer, the verifier and the simulator: an
//! instruction cannot exist for one of them only, and there is no raw-text escape.

use crate::ty::{Class, Ty};

/// A virtual register: its class and its number within the class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegId {
    /// Width.
    pub class: Class,
    /// Number within the class, dense from 0.
    pub index: u32,
}

/// A source operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A register.
    Reg(RegId),
    /// A constant's bits, zero-extended to 64.
    Imm(u64),
}

/// `[base + offset]`. Shared addresses are 32 bits wide, global and parameter addresses 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Base register (or constant).
    pub base: Operand,
    /// Constant byte offset.
    pub offset: i32,
}

/// A branch target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LabelId(pub u32);

/// State space of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Device memory (own or a peer's).
    Global,
    /// This CTA's shared memory.
    Shared,
    /// Shared memory of any CTA of the cluster, at an address that [`Op::Mapa`] made (or at one of this CTA's own).
    Cluster,
}

/// Scope of a memory-ordering operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// The CTA.
    Cta,
    /// The cluster.
    Cluster,
    /// The device.
    Gpu,
    /// All devices and the host.
    Sys,
}

/// Memory-ordering semantics of a load, store, atomic or fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sem {
    /// No ordering; racing weak accesses are a fault.
    Weak,
    /// `.volatile`: relaxed at system scope in effect.
    Volatile,
    /// Morally strong, no ordering of other accesses.
    Relaxed(Scope),
    /// Later accesses stay after it.
    Acquire(Scope),
    /// Earlier accesses stay before it.
    Release(Scope),
    /// Both.
    AcqRel(Scope),
}

/// Cache behaviour of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Cache {
    /// Non-coherent path: the data is read-only for the lifetime of the kernel.
    pub nc: bool,
    /// Do not allocate in L1.
    pub no_allocate: bool,
    /// L2 policy made by [`Op::CreatePolicy`].
    pub policy: Option<RegId>,
}

/// Two-operand arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bin {
    /// Wrapping for integers; round to nearest even for floats.
    Add,
    /// As `Add`.
    Sub,
    /// Low half for integers; round to nearest even for floats.
    Mul,
    /// High half of an integer product.
    MulHi,
    /// Integer division; by zero gives all ones.
    Div,
    /// Integer remainder.
    Rem,
    /// Minimum; floats drop a NaN operand.
    Min,
    /// Maximum; floats drop a NaN operand.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Left shift; amounts at or past the width give 0.
    Shl,
    /// Right shift (arithmetic for signed types); amounts are clamped to the width.
    Shr,
}

/// One-operand arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Un {
    /// Bitwise complement.
    Not,
    /// Negation.
    Neg,
    /// Absolute value.
    Abs,
    /// Count of set bits (result is 32 bits).
    Popc,
    /// Count of leading zeros (result is 32 bits).
    Clz,
    /// Bit reversal.
    Brev,
}

/// FP32 functions beside add, sub, mul.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Math {
    /// `rcp.approx.ftz`
    RcpApproxFtz,
    /// `rsqrt.approx`
    RsqrtApprox,
    /// `rsqrt.approx.ftz`
    RsqrtApproxFtz,
    /// `ex2.approx.ftz`
    Ex2ApproxFtz,
    /// `sqrt.rn`
    SqrtRn,
}

/// FP32 divisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DivMode {
    /// IEEE round to nearest even.
    Rn,
    /// `div.full`: at most 2 ulp.
    Full,
}

/// Comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cmp {
    /// Equal.
    Eq,
    /// Not equal (for floats: ordered and not equal).
    Ne,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
}

/// Predicate logic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Logic {
    /// Both.
    And,
    /// Either.
    Or,
    /// Exactly one.
    Xor,
}

/// One-source conversions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cvt {
    /// Zero-extend 32 to 64 bits.
    U32ToU64,
    /// Sign-extend 32 to 64 bits.
    S32ToS64,
    /// Low 32 bits of 64.
    U64ToU32,
    /// Zero-extend 16 to 32 bits.
    U16ToU32,
    /// Low 16 bits of 32.
    U32ToU16,
    /// Round to nearest even.
    U32ToF32,
    /// Round to nearest even.
    S32ToF32,
    /// Toward zero, saturating.
    F32ToU32Rz,
    /// Toward zero, saturating.
    F32ToS32Rz,
    /// Exact.
    Bf16ToF32,
    /// Round to nearest even.
    F32ToBf16,
    /// E4M3 pair (16 bits) to FP16 pair, exact.
    E4m3x2ToF16x2,
    /// FP16 pair to E4M3 pair, round to nearest even, saturating.
    F16x2ToE4m3x2,
}

/// Two-source conversions: `hi` lands in the upper half of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CvtPack {
    /// Two FP32 to a BF16 pair.
    Bf16x2,
    /// Two FP32 to a BF16 pair, negatives and -0 to +0, NaN kept.
    Bf16x2Relu,
    /// Two FP32 to an E4M3 pair in 16 bits, saturating.
    E4m3x2,
    /// Two FP32 to an FP16 pair.
    F16x2,
}

/// BF16x2 two-operand arithmetic; each lane rounds once, NaN results are 0x7FFF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bf16Bin {
    /// Sum.
    Add,
    /// Product.
    Mul,
    /// Maximum, dropping a NaN operand.
    Max,
    /// Minimum, dropping a NaN operand.
    Min,
    /// Maximum, NaN if either operand is.
    MaxNan,
}

/// Special registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    /// Thread index in the CTA, x.
    TidX,
    /// CTA size, x.
    NtidX,
    /// CTA index in the grid, x.
    CtaidX,
    /// CTA index in the grid, y.
    CtaidY,
    /// CTA index in the grid, z.
    CtaidZ,
    /// Grid size in CTAs, x.
    NctaidX,
    /// Rank of the CTA in its cluster.
    ClusterCtarank,
    /// CTAs of the cluster.
    ClusterNctarank,
    /// Lane in the warp.
    Laneid,
    /// Multiprocessor number.
    Smid,
    /// Nanosecond clock (64 bits; ticks in 32 ns steps on an H200).
    Globaltimer,
    /// Cycle counter of the multiprocessor (64 bits).
    Clock64,
}

impl Special {
    /// Class of the destination.
    pub fn class(self) -> Class {
        match self {
            Special::Globaltimer | Special::Clock64 => Class::B64,
            _ => Class::B32,
        }
    }
}

/// L2 eviction priority of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// Evicted before everything else.
    First,
    /// Evicted after everything else.
    Last,
}

/// Shuffle modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shuffle {
    /// From lane `lane ^ b`.
    Bfly,
    /// From lane `b`.
    Idx,
    /// From lane `lane - b`, own value if below 0.
    Up,
    /// From lane `lane + b`, own value if past 31.
    Down,
}

/// Votes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vote {
    /// True in every lane of the mask.
    All,
    /// True in some lane of the mask.
    Any,
}

/// Warp reductions of 32-bit integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Redux {
    /// Wrapping sum.
    AddU32,
    /// Minimum.
    MinU32,
    /// Maximum.
    MaxU32,
    /// Signed minimum.
    MinS32,
    /// Signed maximum.
    MaxS32,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
}

/// Atomic read-modify-write operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Atomic {
    /// Wrapping sum.
    Add,
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Exchange.
    Exch,
    /// Compare with the first operand, swap in the second.
    Cas,
}

/// Element type of the A and B operands of a warpgroup MMA (the accumulator is FP32).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MmaInput {
    /// E4M3, K = 32 per instruction.
    E4m3,
    /// BF16, K = 16 per instruction, both operands K-major.
    Bf16,
}

/// One instruction.
///
/// Destination registers come first. Unless said otherwise every operation executes per active lane.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // fields are explained by their variant
pub enum Op {
    // -- moves and constants
    /// `dst = src`.
    Mov { dst: RegId, src: Operand },
    /// `dst` = special register.
    Special { dst: RegId, reg: Special },
    /// `dst` = value of kernel parameter number `param`.
    LdParam { dst: RegId, param: u32 },
    /// `dst` (64 bits) = generic address of the by-value parameter `param` (a tensor map).
    ParamAddress { dst: RegId, param: u32 },
    /// `dst` (32 bits) = shared address of the kernel's shared layout.
    SharedBase { dst: RegId },
    /// `dst = {lo, hi}`: two halves into a register of twice the width.
    Pack { dst: RegId, lo: Operand, hi: Operand },
    /// `{lo, hi} = src`.
    Unpack { lo: RegId, hi: RegId, src: Operand },

    // -- integer, FP32 and predicate arithmetic
    /// Two-operand arithmetic.
    Bin { op: Bin, ty: Ty, dst: RegId, a: Operand, b: Operand },
    /// One-operand arithmetic.
    Un { op: Un, ty: Ty, dst: RegId, a: Operand },
    /// 32 x 32 to 64 bits; `ty` (U32 or S32) is that of the sources.
    MulWide { ty: Ty, dst: RegId, a: Operand, b: Operand },
    /// Integer `a * b + c`, low half.
    Mad { ty: Ty, dst: RegId, a: Operand, b: Operand, c: Operand },
    /// 32 x 32 + 64 to 64 bits; `ty` is that of `a` and `b`.
    MadWide { ty: Ty, dst: RegId, a: Operand, b: Operand, c: Operand },
    /// FP32 `a * b + c`, one rounding.
    Fma { dst: RegId, a: Operand, b: Operand, c: Operand },
    /// FP32 division.
    Div { mode: DivMode, dst: RegId, a: Operand, b: Operand },
    /// FP32 function.
    Math { op: Math, dst: RegId, a: Operand },
    /// Byte permutation of `{b, a}` by the selector's low four nibbles.
    Prmt { dst: RegId, a: Operand, b: Operand, selector: Operand },
    /// Three-input logic by truth table.
    Lop3 { dst: RegId, a: Operand, b: Operand, c: Operand, table: u8 },
    /// Bit field of `len` bits from `pos`, zero-extended (32 bits).
    Bfe { dst: RegId, a: Operand, pos: Operand, len: Operand },
    /// Funnel shift: the high 32 bits of `{hi, lo} << n`, n clamped to 32 (`wrap`: taken modulo 32).
    ShfL { dst: RegId, lo: Operand, hi: Operand, n: Operand, wrap: bool },
    /// Funnel shift: the low 32 bits of `{hi, lo} >> n`.
    ShfR { dst: RegId, lo: Operand, hi: Operand, n: Operand, wrap: bool },
    /// `dst = p ? a : b`.
    Selp { ty: Ty, dst: RegId, a: Operand, b: Operand, p: RegId },
    /// `dst = a cmp b`.
    Setp { cmp: Cmp, ty: Ty, dst: RegId, a: Operand, b: Operand },
    /// Predicate logic.
    PredLogic { op: Logic, dst: RegId, a: RegId, b: RegId },
    /// Predicate complement.
    PredNot { dst: RegId, a: RegId },
    /// Predicate constant.
    PredConst { dst: RegId, value: bool },

    // -- conversions and packed arithmetic
    /// One-source conversion.
    Cvt { op: Cvt, dst: RegId, a: Operand },
    /// Two-source conversion; `hi` lands in the upper half.
    CvtPack { op: CvtPack, dst: RegId, hi: Operand, lo: Operand },
    /// BF16x2 arithmetic.
    Bf16Bin { op: Bf16Bin, dst: RegId, a: Operand, b: Operand },
    /// BF16x2 `a * b + c`; `relu` clamps the result at +0.
    Bf16Fma { dst: RegId, a: Operand, b: Operand, c: Operand, relu: bool },
    /// FP16x2 product, each lane rounds once.
    F16x2Mul { dst: RegId, a: Operand, b: Operand },

    // -- control flow
    /// A branch target.
    Label { label: LabelId },
    /// Asks the assembler not to unroll the loop that starts here.
    NoUnroll,
    /// Branch; with `cond` only the lanes where the predicate equals the flag.
    Bra { target: LabelId, cond: Option<(RegId, bool)> },
    /// The lane ends.
    Exit,
    /// Stops the launch with a fault.
    Trap,

    // -- memory
    /// Load of `dsts.len()` (1, 2 or 4) consecutive elements.
    Ld { space: Space, ty: Ty, sem: Sem, cache: Cache, dsts: Box<[RegId]>, addr: Address },
    /// Store of consecutive elements.
    St { space: Space, ty: Ty, sem: Sem, policy: Option<RegId>, srcs: Box<[Operand]>, addr: Address },
    /// Atomic read-modify-write; without `dst` the old value is not returned (`red`).
    Atom {
        space: Space,
        op: Atomic,
        ty: Ty,
        sem: Sem,
        dst: Option<RegId>,
        addr: Address,
        a: Operand,
        b: Option<Operand>,
    },
    /// Relaxed store at system scope to every memory behind a multicast address: one element of 4 or 8 bytes, or 2 or 4
    /// of `Bf16x2`, whatever their bits mean.
    MultimemSt { ty: Ty, srcs: Box<[RegId]>, addr: Address },
    /// Thread fence (`AcqRel` of a scope).
    Fence { scope: Scope },
    /// Sequentially consistent fence.
    FenceSc { scope: Scope },
    /// Orders this thread's earlier generic shared writes before later asynchronous-proxy accesses.
    FenceProxyAsync,
    /// Makes initialised mbarriers visible to the asynchronous proxy and the cluster.
    FenceMbarrierInit,
    /// `dst` (64 bits) = L2 policy for all accessed lines.
    CreatePolicy { dst: RegId, eviction: Eviction },
    /// Prefetch of `bytes` (a multiple of 16) into L2.
    PrefetchL2 { addr: Address, bytes: Operand },

    // -- warp
    /// `dst = src` of another lane; all lanes of `mask` must execute it together.
    Shfl { mode: Shuffle, dst: RegId, src: Operand, lane: Operand, mask: u32 },
    /// Vote over the lanes of `mask`.
    Vote { op: Vote, dst: RegId, p: RegId, mask: u32 },
    /// `dst` = bit mask of the lanes of `mask` where `p` holds.
    Ballot { dst: RegId, p: RegId, mask: u32 },
    /// Warp reduction.
    Redux { op: Redux, dst: RegId, src: Operand, mask: u32 },
    /// `dst` = lanes of `mask` whose `src` equals this lane's.
    MatchAny { dst: RegId, src: Operand, mask: u32 },
    /// `dst` = bit mask of the currently active lanes.
    ActiveMask { dst: RegId },
    /// `dst` holds in exactly one lane of the full warp.
    Elect { dst: RegId },
    /// Warp barrier with memory ordering among the lanes of `mask`.
    BarWarp { mask: u32 },

    // -- CTA barriers
    /// Named barrier: waits until `threads` threads have arrived.
    BarSync { id: Operand, threads: Option<u32> },
    /// Arrives at a named barrier without waiting.
    BarArrive { id: Operand, threads: u32 },

    // -- clusters
    /// `dst` = the address in CTA `rank` of the cluster of what is at `addr` in this CTA's shared memory.
    Mapa { dst: RegId, addr: RegId, rank: Operand },
    /// Stores `srcs.len()` (1, 2 or 4) consecutive elements of 4 or 8 bytes to shared memory of the cluster,
    /// asynchronously; their bytes complete on `mbar`, an mbarrier of the same CTA as `addr`.
    StAsync { ty: Ty, srcs: Box<[Operand]>, addr: Address, mbar: Address },
    /// The thread arrives at the cluster's barrier. `release` orders its earlier accesses before those after the wait;
    /// otherwise only what its last fences cover.
    ClusterArrive { release: bool },
    /// Waits until every thread of the cluster has arrived (or ended), and acquires what the arrivals release.
    ClusterWait,

    // -- mbarriers (8 bytes of shared memory)
    /// Initialises for phases of `count` arrivals.
    MbarInit { addr: Address, count: u32 },
    /// Ends the barrier's life; its bytes may be reused.
    MbarInval { addr: Address },
    /// Arrives `count` times.
    MbarArrive { addr: Address, count: u32 },
    /// Arrives once and adds `bytes` to the expected transactions of the phase.
    MbarArriveExpectTx { addr: Address, bytes: Operand },
    /// Adds `bytes` to the expected transactions of the phase without arriving.
    MbarExpectTx { addr: Address, bytes: Operand },
    /// `dst` = whether the phase of the given parity has completed; may suspend the thread for a while. What other CTAs
    /// did for the phase (asynchronous stores) is acquired only at `scope` cluster; otherwise it is the CTA.
    MbarTryWait { dst: RegId, addr: Address, parity: Operand, scope: Scope },
    /// As `MbarTryWait` of the CTA's scope, without suspending.
    MbarTestWait { dst: RegId, addr: Address, parity: Operand },

    // -- copies by threads
    /// 16 bytes of device memory to shared memory, asynchronously, in the thread's current copy group; past the L1 cache.
    /// Both ends are 16-byte aligned. Until the thread has waited for the group the destination is nobody's; from then on
    /// it is as if the thread had stored it.
    CpAsync { dst: Address, src: Address, policy: Option<RegId> },
    /// Closes the thread's current copy group.
    CpAsyncCommit,
    /// Waits until at most `pending` copy groups of the thread remain.
    CpAsyncWait { pending: u32 },

    // -- asynchronous copies (one lane issues; complete on an mbarrier or a bulk group)
    /// Tensor-map tile to shared memory; `coords` innermost first.
    TensorG2s { dst: Address, map: RegId, coords: Box<[Operand]>, mbar: Address, policy: Option<RegId> },
    /// Contiguous bytes (a multiple of 16) global to shared.
    BulkG2s { dst: Address, src: Address, bytes: Operand, mbar: Address, policy: Option<RegId> },
    /// Contiguous bytes shared to global, in the issuing thread's current bulk group.
    BulkS2g { dst: Address, src: Address, bytes: Operand },
    /// Closes the thread's current bulk group.
    BulkCommit,
    /// Waits until at most `pending` bulk groups remain; `read`: only for their shared-memory reads.
    BulkWait { pending: u32, read: bool },
    /// Brings a tensor map into the descriptor cache.
    PrefetchTensormap { map: RegId },

    // -- warp MMA
    /// Loads `dsts.len()` (1, 2 or 4) matrices of 8 x 8 16-bit elements from shared memory, the whole warp together. The
    /// address in lane `8 m + r` is that of row r of matrix m, 16 bytes, 16-byte aligned; those of further lanes do not
    /// matter. Lane `4 g + q` receives elements `2 q` and `2 q + 1` of row g, or of column g if `transposed`.
    LdMatrix { dsts: Box<[RegId]>, addr: Address, transposed: bool },
    /// `acc += A . B` of m16n8k16 over the warp: A is 16 x 16 and B 16 x 8, both BF16, `acc` FP32; see
    /// [`MmaTile`](crate::MmaTile) for which lane holds what.
    MmaBf16 { acc: [RegId; 4], a: [RegId; 4], b: [RegId; 2] },

    // -- warpgroup MMA
    /// Orders register and accumulator accesses before the following MMAs.
    WgmmaFence,
    /// `acc += A . B^T` of one k-step, m64 x n, asynchronously. `scale_d` false ignores the old accumulator.
    Wgmma { input: MmaInput, n: u32, acc: Box<[RegId]>, a: WgmmaA, b: Operand, scale_d: ScaleD },
    /// Closes the warpgroup's current MMA group.
    WgmmaCommit,
    /// Waits until at most `pending` MMA groups remain.
    WgmmaWait { pending: u32 },

    // -- launches and scheduling
    /// Waits for the launches this one depends on to complete and be visible.
    GridDepWait,
    /// Allows dependent launches to start once every CTA has executed it or ended.
    GridDepLaunch,
    /// Shrinks (`inc` false) or grows the warpgroup's registers per thread.
    SetMaxNReg { inc: bool, count: u32 },
    /// Suspends the thread for about `ns` nanoseconds.
    Nanosleep { ns: Operand },
}

/// The A operand of a warpgroup MMA.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WgmmaA {
    /// A shared-memory matrix descriptor (64 bits).
    Descriptor(Operand),
    /// This thread's fragment.
    Regs([RegId; 4]),
}

/// Whether a warpgroup MMA adds to its accumulator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScaleD {
    /// Known when the kernel is built.
    Const(bool),
    /// Decided at run time (uniform over the warpgroup).
    Pred(RegId),
}
